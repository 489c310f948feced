"""What the crash test writes and plays: a plan that every process of a run reads, and items that only depend on it.

Nothing is random at the moment of writing: an item is a function of the seed and its name, so that a writer that was
killed sends exactly the same again, and whoever reads it can tell whether it is whole.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

WRITTEN_JOB = "written"
PLAYED_JOB = "played"
PLAYED_TASK_TYPE = "crash_episodes"
SESSIONS_JOB = "sessions"
DEVICES_JOB = "devices"
DEVICES_TASK_TYPE = "crash_devices"
PNG_HEAD = b"\x89PNG\r\n\x1a\n"
MARK = "ROLLOUT_BUFFER_CRASH_RUN"
"""Environment variable that every process of a run inherits: what carries it afterwards was left behind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One run. Times are seconds; ``writers`` processes fill ``written_groups`` groups together."""

    folder: str
    url: str
    gateway_url: str
    gateway_workers: int
    engine_port: int
    seed: int
    writers: int
    written_groups: int
    written_size: int
    write_pause_s: float
    written_timeout_s: float
    lease_s: float
    played_instances: int
    played_epochs: int
    played_size: int
    train_pause_s: float
    sessions: int
    devices: int

    def save(self) -> Path:
        """Writes the plan where the processes of the run find it."""
        path = Path(self.folder) / "plan.json"
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return path

    def path(self, *parts: str) -> Path:
        """Returns a path under the run's folder."""
        return Path(self.folder, *parts)

    @property
    def is_calm(self) -> bool:
        """The killing is over: everybody hurries to the end."""
        return self.path("calm").exists()

    def pause(self, seconds: float) -> None:
        """Waits like somebody with other things to do; not at all once it is calm."""
        if not self.is_calm:
            time.sleep(seconds)


def load_plan(path: str) -> Plan:
    """Reads the plan of a run."""
    return Plan(**json.loads(Path(path).read_text(encoding="utf-8")))


# --- written items ---------------------------------------------------------------------------------------------------


def requests_of_writer(plan: Plan, writer: int) -> Iterator[list[dict[str, Any]]]:
    """Yields the requests of one writer in its order: one item or a few. Every group is filled by several writers."""
    rng = random.Random(f"{plan.seed}/requests/{writer}")
    batch: list[dict[str, Any]] = []
    wanted = rng.choice((1, 1, 2, 3))
    for uid, instance_id in names_of_writer(plan, writer):
        batch.append(item(plan, uid, instance_id))
        if len(batch) >= wanted:
            yield batch
            batch, wanted = [], rng.choice((1, 1, 2, 3))
    if batch:
        yield batch


def names_of_writer(plan: Plan, writer: int) -> Iterator[tuple[str, str]]:
    """Yields (uid, instance id): the slots of each group that fall to this writer.

    Every 13th group misses a member (it times out), every 11th gets one too many (one of its items is late).
    """
    for group in range(plan.written_groups):
        members = plan.written_size + (group % 11 == 5) - (group % 13 == 7)
        for slot in range(members):
            if (group + slot) % plan.writers == writer:
                yield f"g{group}.s{slot}", f"g{group}"


def item(plan: Plan, uid: str, instance_id: str) -> dict[str, Any]:
    """Builds an item of 1 to about 200 KB; every third has a screenshot, and some share one."""
    rng = random.Random(f"{plan.seed}/item/{uid}")
    text = rng.randbytes(rng.choice((300, 2_000, 9_000, 30_000, 60_000))).hex()
    content: list[dict[str, Any]] = [{"type": "text", "text": text}]
    if rng.random() < 0.35:
        content.append({"type": "image_url", "image_url": {"url": _screenshot(plan, rng, instance_id)}})
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": f"I am {uid}"}]
    return {
        "uid": uid,
        "instance_id": instance_id,
        "messages": messages,
        "reward": float(int(uid.rsplit("s", 1)[1]) % 2),
        "extra_info": {"checksum": checksum(messages)},
    }


def _screenshot(plan: Plan, rng: random.Random, instance_id: str) -> str:
    shared = rng.random() < 0.3
    pixels = random.Random(f"{plan.seed}/image/{instance_id}") if shared else rng
    data = PNG_HEAD + pixels.randbytes(pixels.choice((4_000, 40_000)))
    return "data:image/png;base64," + base64.b64encode(data).decode()


def checksum(messages: Sequence[Any]) -> str:
    """Returns a digest of messages that is the same whether their screenshots are inline or named by hash."""
    return hashlib.sha256(json.dumps(by_hash(messages), sort_keys=True).encode()).hexdigest()


def by_hash(messages: Sequence[Any]) -> list[Any]:
    """Returns the messages with every inline screenshot replaced by its hash."""
    return [{**message, "content": _content_by_hash(message["content"])} for message in messages]


def _content_by_hash(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [_part_by_hash(part) if part.get("type") == "image_url" else part for part in content]


def _part_by_hash(part: dict[str, Any]) -> dict[str, Any]:
    url = part["image_url"]["url"]
    if url.startswith("data:"):
        url = "sha256:" + hashlib.sha256(base64.b64decode(url.split(",", 1)[1])).hexdigest()
    return {"type": "image_url", "image_url": {"url": url}}


# --- played instances ------------------------------------------------------------------------------------------------


def played_lines(plan: Plan) -> list[dict[str, Any]]:
    """Returns the input of the job with a runner. The name says what its episodes meet."""
    kinds = {3: "short", 9: "dead", 15: "same"}
    return [{"instance_id": f"p{number}-{kinds.get(number % 20, 'fine')}"} for number in range(plan.played_instances)]


def say(text: str) -> None:
    """Prints a line of the report."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


# --- logs that survive a kill ----------------------------------------------------------------------------------------


class Journal:
    """Appends one JSON line per event. A line is handed to the kernel at once: a kill cannot take it back."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def note(self, **event: Any) -> None:
        """Appends an event with the time."""
        line = json.dumps({"at": time.time(), **event}) + "\n"
        os.write(self._descriptor, line.encode())

    def events(self) -> list[dict[str, Any]]:
        """Returns every event so far, oldest first."""
        return read_journal(self._path)


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Returns the events of a journal; none when there is no such file. A line cut by a kill is left out."""
    if not path.exists():
        return []
    events = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            events.append(json.loads(line))
        except ValueError:
            continue
    return events
