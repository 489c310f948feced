"""What is tried again is listed by name, and nothing on the list is gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration import conftest
from tests.reruns import SECOND_CHANCE

INTEGRATION = Path(__file__).resolve().parents[1] / "integration"


def test_every_file_with_a_second_chance_is_there_and_says_why() -> None:
    there = {path.stem for path in INTEGRATION.glob("test_*.py")}
    assert set(SECOND_CHANCE) <= there
    assert all(SECOND_CHANCE.values())


class OneItem:
    """As much of a test as the hook asks for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.markers: list[pytest.MarkDecorator] = []

    def add_marker(self, marker: pytest.MarkDecorator) -> None:
        self.markers.append(marker)


def test_only_those_are_tried_again() -> None:
    listed, other, unit = (
        OneItem(INTEGRATION / "test_serve.py"),
        OneItem(INTEGRATION / "test_slime_train_step.py"),
        OneItem(INTEGRATION.parent / "unit" / "test_serve.py"),
    )
    conftest.pytest_collection_modifyitems([listed, other, unit])  # type: ignore[list-item]  # what it uses of an item
    assert [len(item.markers) for item in (listed, other, unit)] == [1, 0, 0]
