"""Fixtures that several of the lab's tests use, some of them the product's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import buffer, clock
from tests.integration.conftest import stand_in_engine, start_buffer

__all__ = ["buffer", "clock", "stand_in_engine", "start_buffer"]


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """A tiny model is slower on several threads, and the machine has others to serve."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
