"""Reads a page like its reader: the files it names, and the commands it gives, in order."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_FILE = re.compile(r"^\*\*`([^`\n]+)`\*\*\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMANDS = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """What a page asks its reader to do: contents by file name, and the commands as one script."""

    files: dict[str, str]
    script: str

    def write_into(self, folder: Path) -> None:
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")


def read_page(text: str) -> Page:
    """Takes files from blocks below a bold file name, commands from ``bash`` blocks."""
    return Page(files=dict(_FILE.findall(text)), script="".join(_COMMANDS.findall(text)))
