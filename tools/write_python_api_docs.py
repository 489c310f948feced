"""Writes the tables of ``docs/python_api.md`` from the public names; ``--check`` only checks that they are up to date.

The rest of that page is for the site, which reads the docstrings; the tables can be read wherever the file is browsed.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import slime_plugins.rollout_buffer as package

PAGE = Path(__file__).resolve().parents[1] / "docs" / "python_api.md"
BEGIN, END = "<!-- tables: python tools/write_python_api_docs.py -->\n", "<!-- end of the tables -->\n"
CALLED = ("RolloutBufferClient", "RolloutFeed")
"""Classes whose methods have a table of their own."""
LITERAL = re.compile(r"``(.+?)``")


def tables() -> str:
    """Returns a table of every public name, and one of the methods of each class that programs call."""
    names = "".join(f"| `{name}` | {first_sentence(getattr(package, name))} |\n" for name in package.__all__)
    parts = [f"\n| name | what it is |\n|---|---|\n{names}"]
    for name in CALLED:
        rows = "".join(f"| `{call}` | {sentence} |\n" for call, sentence in methods_of(getattr(package, name)))
        parts.append(f"\n## {name}\n\n| call | what it does |\n|---|---|\n{rows}")
    return "".join(parts) + "\n"


def methods_of(kind: type[Any]) -> Iterator[tuple[str, str]]:
    """Yields each public method with its parameters and their defaults, and the first sentence of its docstring."""
    for name, member in inspect.getmembers(kind, callable):
        if not name.startswith("_"):
            parameters = inspect.signature(member).parameters.values()
            plain = [each.replace(annotation=each.empty) for each in parameters if each.name != "self"]
            yield f"{name}{inspect.Signature(plain)}", first_sentence(member)


def first_sentence(thing: Any) -> str:
    """Returns the first sentence of a docstring, on one line, as Markdown."""
    text = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
    text = re.split(r"(?<=\.) (?=[A-Z`])", text)[0]
    return LITERAL.sub(r"`\1`", text).replace("|", "\\|")


def page() -> str:
    """Returns the page with its tables as they should be."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    return before + BEGIN + tables() + END + rest.split(END)[1]


def main() -> int:
    """Writes the page, or with ``--check`` checks that it is up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 when the page is out of date")
    wanted = page()
    if not parser.parse_args().check:
        PAGE.write_text(wanted, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != wanted:
        sys.stderr.write("docs/python_api.md is out of date: python tools/write_python_api_docs.py writes it\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
