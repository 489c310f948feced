"""The Sample field that groups the rows of one execution (trajectory), which differs between versions of slime.

It is ``rollout_id``; between 30 May and 4 June 2026 (v0.3.0) it was ``group_id``; before 25 May there was none, and
every row counted as an execution. No other module depends on the version of slime.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from slime.utils.types import Sample
from slime_plugins.rollout_buffer.errors import ConfigError


def execution_field(sample_type: type[Any] = Sample) -> str | None:
    """Returns the field that the rows of one execution share; None if this slime has none."""
    known = {field.name for field in fields(sample_type)}
    return next((name for name in ("rollout_id", "group_id") if name in known), None)


def execution_of(sample: Any) -> int | None:
    """Returns the execution number of a sample; None if it is not set."""
    name = execution_field(type(sample))
    return None if name is None else getattr(sample, name)


def set_execution(sample: Any, number: int | None) -> None:
    """Sets the execution number of a sample, if this slime has the field."""
    name = execution_field(type(sample))
    if name is not None:
        setattr(sample, name, number)


def check_rows(rows_by_trajectory: Iterable[int], sample_type: type[Any] = Sample) -> None:
    """Checks that this slime weighs the rows of a trajectory together.

    Raises:
        ConfigError: a trajectory has several rows, and this slime weighs each row as a trajectory.
    """
    if execution_field(sample_type) is None and any(rows > 1 for rows in rows_by_trajectory):
        raise ConfigError(
            "a trajectory has several rows, and this slime weighs each row as a trajectory of its own (it has no "
            "rollout_id): train one row for each (rollout_mode incremental), or use a slime from 25 May 2026 on"
        )
