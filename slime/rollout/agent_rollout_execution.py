"""What differs between slimes of different age in how a Sample names the execution that it is a row of.

Today the field is ``rollout_id``; between 30 May and 4 June 2026 (v0.3.0) it was ``group_id``; before 25 May there was
none, and every row was an execution of its own. Nothing else of the trainer's side asks for slime's age.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from slime.utils.types import Sample
from slime_plugins.rollout_buffer.errors import ConfigError


def execution_field(sample_type: type[Any] = Sample) -> str | None:
    """Returns the field that the rows of one execution share; None where this slime knows none."""
    known = {field.name for field in fields(sample_type)}
    return next((name for name in ("rollout_id", "group_id") if name in known), None)


def execution_of(sample: Any) -> int | None:
    """Returns the number of the execution that the sample is a row of; None where nobody said."""
    name = execution_field(type(sample))
    return None if name is None else getattr(sample, name)


def set_execution(sample: Any, number: int | None) -> None:
    """Says which execution the sample is a row of. A slime without the field takes each row for one: nothing to say."""
    name = execution_field(type(sample))
    if name is not None:
        setattr(sample, name, number)


def check_rows(rows_by_trajectory: Iterable[int], sample_type: type[Any] = Sample) -> None:
    """Looks whether this slime can weigh a trajectory of several rows as one.

    Raises:
        ConfigError: it weighs each row alone, and cuts a batch at a number of rows.
    """
    if execution_field(sample_type) is None and any(rows > 1 for rows in rows_by_trajectory):
        raise ConfigError(
            "a trajectory became several rows, and this slime weighs each row as a trajectory of its own (it has no "
            "rollout_id): train one row for each (rollout_mode incremental), or take a slime from 25 May 2026 on"
        )
