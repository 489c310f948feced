"""Fixtures of the product's tests that those of the lab share."""

from tests.conftest import buffer, clock
from tests.integration.conftest import stand_in_engine, start_buffer

__all__ = ["buffer", "clock", "stand_in_engine", "start_buffer"]
