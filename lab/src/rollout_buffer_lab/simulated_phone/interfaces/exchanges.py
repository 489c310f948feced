"""Exchanges on disk: what a phone was asked and what it answered, one JSON line each, for a later replay.

They come by adb and by gRPC, in one file in chronological order. The program that drives the phone may add comments
between them.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_buffer_lab.simulated_phone.interfaces.shell_language import Output

_HOST_FILE = "{host file}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """One command and its answer. In a push or pull the host's file is a placeholder; ``content`` is what was in it."""

    arguments: tuple[str, ...]
    output: Output
    content: bytes | None = None

    def with_file(self, path: Path) -> list[str]:
        """Returns the arguments with a file of this host in place of the recorded one."""
        return [str(path) if word == _HOST_FILE else word for word in self.arguments]

    def text_on(self, path: Path) -> bytes:
        """Returns the answer with that file's name in it."""
        return self.output.text.replace(_HOST_FILE.encode(), str(path).encode())


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One gRPC call: its name, and both messages as they go over the wire; the answer as ``comparable`` leaves it."""

    name: str
    request: bytes
    answer: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Annotation:
    """A comment of the program that drove the phone."""

    fields: Mapping[str, Any]


class ExchangeRecorder:
    """Appends exchanges to a file, from any thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()

    def record(self, words: Sequence[str], output: Output) -> None:
        """Writes one exchange. Called when it is over, so that a pulled file is there."""
        verb = words[0] if words else ""
        position = {"push": 1, "pull": 2, "install": len(words) - 1}.get(verb)
        host_file = words[position] if position is not None and position < len(words) else None
        content = Path(host_file).read_bytes() if host_file and Path(host_file).is_file() else None
        arguments = [_HOST_FILE if position == number else word for number, word in enumerate(words)]
        text = output.text.replace(host_file.encode(), _HOST_FILE.encode()) if host_file else output.text
        line = {
            "arguments": arguments,
            "code": output.code,
            "text": base64.b64encode(text).decode(),
            "content": None if content is None else base64.b64encode(content).decode(),
        }
        self._write(line)

    def record_call(self, name: str, request: bytes, answer: bytes) -> None:
        """Writes one gRPC call."""
        self._write(
            {"call": name, "request": base64.b64encode(request).decode(), "answer": base64.b64encode(answer).decode()}
        )

    def remark(self, **fields: Any) -> None:
        """Writes a comment of the program that drives the phone."""
        self._write({"remark": fields})

    def _write(self, line: Mapping[str, Any]) -> None:
        with self._lock, self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def read_session(path: Path) -> Iterator[Exchange | Call | Annotation]:
    """Yields everything that was recorded, in order."""
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if "remark" in entry:
            yield Annotation(fields=entry["remark"])
        elif "call" in entry:
            request, answer = base64.b64decode(entry["request"]), base64.b64decode(entry["answer"])
            yield Call(name=entry["call"], request=request, answer=answer)
        else:
            yield _exchange(entry)


def _exchange(entry: Mapping[str, Any]) -> Exchange:
    content = entry["content"]
    return Exchange(
        arguments=tuple(entry["arguments"]),
        output=Output(code=entry["code"], text=base64.b64decode(entry["text"])),
        content=None if content is None else base64.b64decode(content),
    )
