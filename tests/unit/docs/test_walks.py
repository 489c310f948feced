"""The walks of ``docs/architecture.md``: each function is in the file that they name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
BUFFER = ROOT / "slime_plugins" / "rollout_buffer"
ROW = re.compile(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", re.MULTILINE)
SECTION = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("## Two walks")[1].split("\n## ")[0]
WALKS = dict(re.findall(r"^\*\*(.+?)\.\*\*(.*?)(?=^\*\*|\Z)", SECTION, re.MULTILINE | re.DOTALL))


def tree_of(file: str) -> ast.Module:
    path = ROOT / file if file.startswith("slime/") else BUFFER / file
    return ast.parse(path.read_text(encoding="utf-8"))


def defined(tree: ast.Module, qualified: str) -> bool:
    body = tree.body
    *classes, function = qualified.split(".")
    for name in classes:
        body = next((node.body for node in body if isinstance(node, ast.ClassDef) and node.name == name), [])
    return any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function for node in body)


def test_there_are_two_walks() -> None:
    assert list(WALKS) == ["A written item, from the route to disk", "A delivery, from the store to Samples"]


@pytest.mark.parametrize("walk", WALKS)
def test_every_function_is_where_the_walk_says(walk: str) -> None:
    steps = ROW.findall(WALKS[walk])
    assert len(steps) > 10
    assert [step for step in steps if not defined(tree_of(step[0]), step[1])] == []
