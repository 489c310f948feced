"""The picture of the architecture is up to date, and its modules and requests exist in the code."""

from __future__ import annotations

from pathlib import Path

from slime_plugins.rollout_buffer.server.app import OPERATIONS
from tools.write_architecture_diagram import ARROWS, BOXES, PICTURE, architecture_svg

ROOT = Path(__file__).resolve().parents[3]


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
