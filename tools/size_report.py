"""Prints the size of this project: lines of code without blanks, comments and docstrings, all lines, words of the docs.

python tools/size_report.py           # a table; --files 10 adds the largest modules
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str) -> int:
    """Returns how many lines of a module hold code: no blank line, no comment, no docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def part_of(path: Path) -> str:
    """Returns the part of the project that a module of it belongs to."""
    top, inside, *_ = path.parts
    if top == "lab":
        return "tests" if inside == "tests" else "lab"
    return "product" if top in ("slime", "slime_plugins") else top


def measure() -> dict[Path, tuple[int, int]]:
    """Returns for every module (lines of code, all lines), by its path from the root."""
    sizes = {}
    for top in ("slime", "slime_plugins", "lab", "tests", "tools", "benchmarks", "examples"):
        for file in (ROOT / top).rglob("*.py"):
            source = file.read_text(encoding="utf-8")
            sizes[file.relative_to(ROOT)] = (code_lines(source), source.count("\n"))
    return sizes


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", type=int, default=0, metavar="N", help="also the N largest modules of the product")
    shown = parser.parse_args().files
    measured = measure()
    code: Counter[str] = Counter()
    whole: Counter[str] = Counter()
    modules = Counter(part_of(path) for path in measured)
    for path, (lines, everything) in measured.items():
        code[part_of(path)] += lines
        whole[part_of(path)] += everything
    sys.stdout.write(f"{'part':<12}{'modules':>8}{'code':>9}{'lines':>9}\n")
    for part in modules:
        sys.stdout.write(f"{part:<12}{modules[part]:>8}{code[part]:>9,}{whole[part]:>9,}\n")
    pages = (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
    words = sum(len(page.read_text(encoding="utf-8").split()) for page in pages)
    sys.stdout.write(f"{'docs':<12}{len(pages):>8}{'':>9}{words:>9,} words, with the README\n")
    largest = sorted((-lines, path) for path, (lines, _) in measured.items() if part_of(path) == "product")
    for lines, path in largest[:shown]:
        sys.stdout.write(f"{-lines:>6,}  {path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
