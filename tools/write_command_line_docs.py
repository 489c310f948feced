"""Writes ``docs/command_line.md`` from the command line itself; ``--check`` only says whether it is up to date."""

from __future__ import annotations

import argparse
import html
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs" / "command_line.md"


def command_line_docs() -> str:
    """Returns the reference of every command and option."""
    command = [sys.executable, "-m", "typer", "slime_plugins.rollout_buffer.cli.app", "utils", "docs"]
    answer = subprocess.run([*command, "--name", "rollout-buffer"], capture_output=True, text=True, check=True)
    return html.unescape(answer.stdout).rstrip() + "\n"


def main() -> int:
    """Writes the page, or with ``--check`` says whether it is up to date."""
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
