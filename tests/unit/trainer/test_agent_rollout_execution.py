"""Versions of slime differ in the field that all rows of a trajectory share, and one version has none."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from slime.rollout.agent_rollout_sample_fields import (
    check_weighs_trajectories,
    execution_field,
    execution_of,
    set_execution,
)
from slime.utils.types import Sample
from slime_plugins.rollout_buffer.errors import ConfigError


@dataclass
class SampleOfV030:
    """Its ``rollout_id`` can be written and not read, as in v0.3.0."""

    group_id: int | None = None

    @property
    def rollout_id(self) -> int:
        raise AttributeError("deprecated")


@dataclass
class SampleOfV022:
    """Each row is weighed alone."""

    index: int = 0


@pytest.mark.parametrize(
    ("kind", "field", "number"), [(Sample, "rollout_id", 3), (SampleOfV030, "group_id", 3), (SampleOfV022, None, None)]
)
def test_rows_share_the_field_that_this_slime_has(kind: type, field: str | None, number: int | None) -> None:
    sample = kind()
    assert execution_of(sample) is None
    set_execution(sample, 3)

    assert execution_field(kind) == field
    assert execution_of(sample) == number


def test_several_rows_are_refused_only_where_each_would_weigh_alone() -> None:
    check_weighs_trajectories([1, 2], Sample)
    check_weighs_trajectories([1, 1], SampleOfV022)
    with pytest.raises(ConfigError, match="rollout_mode incremental"):
        check_weighs_trajectories([1, 2], SampleOfV022)
