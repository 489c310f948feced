"""adb exchanges on disk: what a phone was asked and what it answered, one JSON line each, to be asked again later."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slime_plugins.rollout_buffer.generator.android_world.simulated_phone.fronts.shell_language import Output

__all__ = ["Exchange", "ExchangeRecorder", "read_exchanges"]

_PLACE_ON_HOST = "{host file}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """One command and its answer. In a push or pull the host's file is a placeholder; ``content`` is what was in it."""

    arguments: tuple[str, ...]
    output: Output
    content: bytes | None = None

    def with_file(self, path: Path) -> list[str]:
        """The arguments with a file of this host in the place of the recorded one."""
        return [str(path) if word == _PLACE_ON_HOST else word for word in self.arguments]

    def text_on(self, path: Path) -> bytes:
        """What the answer is with that file named in it."""
        return self.output.text.replace(_PLACE_ON_HOST.encode(), str(path).encode())


class ExchangeRecorder:
    """Appends exchanges to a file, from any thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()

    def record(self, words: Sequence[str], output: Output) -> None:
        """Writes one exchange. Called when it is over, so that a pulled file is there."""
        verb = words[0] if words else ""
        place = {"push": 1, "pull": 2, "install": len(words) - 1}.get(verb)
        host_file = words[place] if place is not None and place < len(words) else None
        content = Path(host_file).read_bytes() if host_file and Path(host_file).is_file() else None
        arguments = [_PLACE_ON_HOST if place == number else word for number, word in enumerate(words)]
        text = output.text.replace(host_file.encode(), _PLACE_ON_HOST.encode()) if host_file else output.text
        line = {
            "arguments": arguments,
            "code": output.code,
            "text": base64.b64encode(text).decode(),
            "content": None if content is None else base64.b64encode(content).decode(),
        }
        with self._lock, self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def read_exchanges(path: Path) -> Iterator[Exchange]:
    """Yields the recorded exchanges in their order."""
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        content = entry["content"]
        yield Exchange(
            arguments=tuple(entry["arguments"]),
            output=Output(code=entry["code"], text=base64.b64decode(entry["text"])),
            content=None if content is None else base64.b64decode(content),
        )
