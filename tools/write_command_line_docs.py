"""Writes ``docs/command_line.md`` from the command line itself; ``--check`` only checks that it is up to date."""

from __future__ import annotations

import argparse
import html
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import entry_points
from itertools import groupby
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs" / "command_line.md"
SHARED_BY = 2
"""An option with the same text in at least so many commands is described once, at the end."""


def command_line_docs() -> str:
    """Returns the reference of every command and option."""
    command = [sys.executable, "-m", "typer", "slime_plugins.rollout_buffer.cli.app", "utils", "docs"]
    answer = subprocess.run([*command, "--name", "rollout-buffer"], capture_output=True, text=True, check=True)
    return shortened(html.unescape(answer.stdout).rstrip()) + "\n"


def shortened(page: str) -> str:
    """Returns typer's page with what several commands share written once, and without what repeats a heading."""
    page = re.sub(r"\*\*Commands\*\*:\n\n(?:\* .*\n?)+\n", "", page)
    page = re.sub(r"\*\*Usage\*\*:\n\n```console\n\$ (.*)\n```\n\n", "", page)
    page = re.sub(r"\*\*(?:Arguments|Options)\*\*:\n\n", "", page)
    page = re.sub(r" <(?:list\[)?(?:str|Path|path|int|float)\]?(?: range)?>`", "`", page)
    page = re.sub(r"^(\* .*\n)\n(?=\* )", r"\1", page, flags=re.MULTILINE)
    for command in entry_points(group="rollout_buffer.commands"):
        page = _without_options(page, command.name, command.dist.name if command.dist else "")
    lines = page.splitlines()
    times = Counter(line for line in lines if line.startswith("* "))
    shared = [line for line, count in times.items() if count >= SHARED_BY and "--help" not in line]
    text = "\n".join(_without(shared, lines)).replace("# `rollout-buffer`", "# The command line: `rollout-buffer`", 1)
    return f"{text}\n\n## Options of several commands\n\n" + "\n".join(shared)


def _without_options(page: str, command: str, package: str) -> str:
    """Returns the page without the options of another package's command: its ``--help`` lists them."""
    opening, heading, rest = page.partition(f"## `rollout-buffer {command}`\n")
    section, next_heading, later = rest.partition("\n## ")
    section = re.sub(r"^\* .*\n?", "", section, flags=re.MULTILINE).rstrip()
    options = f"Part of `{package}`; `rollout-buffer {command} --help` lists its options."
    return f"{opening}{heading}{section}\n\n{options}\n{next_heading}{later}"


def _without(shared: list[str], lines: list[str]) -> Iterator[str]:
    """Yields the lines; each list ends with one entry that names its shared options."""
    for is_list, block in groupby(lines, key=lambda line: line.startswith("* ")):
        entries = list(block)
        yield from (line for line in entries if line not in shared and "`--help`" not in line)
        names = [line.split("`")[1].split(" ")[0] for line in entries if line in shared]
        if is_list and names:
            yield f"* {', '.join(f'`{name}`' for name in names)}: [below](#options-of-several-commands)"


def main() -> int:
    """Writes the page, or with ``--check`` checks that it is up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 when the page is out of date")
    wanted = command_line_docs()
    if not parser.parse_args().check:
        DOCS.write_text(wanted, encoding="utf-8")
        return 0
    current = DOCS.read_text(encoding="utf-8") if DOCS.exists() else ""
    if current != wanted:
        sys.stderr.write("docs/command_line.md is out of date: python tools/write_command_line_docs.py writes it\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
