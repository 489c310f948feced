"""The picture of the architecture is drawn from what it claims, and what it claims is so in the code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from slime_plugins.rollout_buffer.openapi.operations import OPERATIONS
from tools.write_architecture_diagram import ARROWS, BOXES, BUFFER, PICTURE, Arrow, architecture_svg

ROOT = Path(__file__).resolve().parents[3]
IMPORTING = [arrow for arrow in ARROWS if arrow.imports != ("", "")]


def test_the_picture_is_up_to_date() -> None:
    assert PICTURE.read_text(encoding="utf-8") == architecture_svg(), "python tools/write_architecture_diagram.py"


def test_every_module_in_the_picture_exists() -> None:
    modules = [module for box in BOXES.values() for module in box.modules]
    assert len(modules) > 15
    assert [module for module in modules if not (ROOT / module).exists()] == []


def test_every_request_in_the_picture_is_a_route() -> None:
    routes = {operation.path for operation in OPERATIONS}
    asked = {arrow.route for arrow in ARROWS if arrow.route}
    assert len(asked) == 3
    assert asked <= routes


@pytest.mark.parametrize("arrow", IMPORTING, ids=lambda arrow: arrow.label)
def test_who_calls_whom_imports_whom(arrow: Arrow) -> None:
    who, whom = arrow.imports
    place = ROOT / BUFFER / who
    files = [*place.rglob("*.py")] if place.is_dir() else [place.with_suffix(".py")]
    modules = {
        node.module
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom)
    }
    assert f"slime_plugins.rollout_buffer.{whom}" in modules


def test_boxes_lie_within_their_frame() -> None:
    frames = [box for box in BOXES.values() if box.frame]
    for box in BOXES.values():
        around = [f for f in frames if f.x <= box.x and box.x + box.width <= f.x + f.width]
        assert len(around) == 1, box.title
        assert around[0].y <= box.y
        assert box.y + box.height <= around[0].y + around[0].height
