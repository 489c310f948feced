"""The walks of ``docs/architecture.md``: a function is where they say, and is called in another file of its walk."""

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
ENTRIES = {"Application._write", "Application._poll", "generate_rollout"}
"""What clients and slime call."""


def tree_of(file: str) -> ast.Module:
    path = ROOT / file if file.startswith("slime/") else BUFFER / file
    return ast.parse(path.read_text(encoding="utf-8"))


def defined(tree: ast.Module, qualified: str) -> bool:
    body = tree.body
    *classes, function = qualified.split(".")
    for name in classes:
        body = next((node.body for node in body if isinstance(node, ast.ClassDef) and node.name == name), [])
    return any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function for node in body)


def mentioned(tree: ast.Module) -> set[str]:
    nodes = list(ast.walk(tree))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def test_there_are_two_walks() -> None:
    assert list(WALKS) == ["A written item, from the route to disk", "A delivery, from the store to Samples"]


@pytest.mark.parametrize("walk", WALKS)
def test_every_function_is_where_the_walk_says(walk: str) -> None:
    steps = ROW.findall(WALKS[walk])
    assert len(steps) > 10
    assert [step for step in steps if not defined(tree_of(step[0]), step[1])] == []


@pytest.mark.parametrize("walk", WALKS)
def test_every_function_is_called_in_another_file_of_its_walk(walk: str) -> None:
    steps = ROW.findall(WALKS[walk])
    uses = {file: mentioned(tree_of(file)) for file, _ in steps}
    apart = [
        function
        for at, function in steps
        if function not in ENTRIES
        and not any(function.split(".")[-1] in names for file, names in uses.items() if file != at)
    ]
    assert apart == []


@pytest.mark.parametrize("walk", WALKS)
def test_a_table_visits_each_file_once(walk: str) -> None:
    for table in re.split(r"\n\n(?!\|)", WALKS[walk]):
        files = [file for file, _ in ROW.findall(table)]
        assert len(files) == len(set(files))
