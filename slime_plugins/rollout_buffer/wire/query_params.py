"""Query parameters of the routes that only read, validated like bodies."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from slime_plugins.rollout_buffer.types import GroupState, Outcome, StopReason
from slime_plugins.rollout_buffer.wire.request_fields import Body, Count, Identifier, Number

MAX_KEY = 2**63 - 1
"""The largest integer of a database column."""


def _cursor_of(pattern: str) -> AfterValidator:
    """Returns a validator of cursors that match the pattern."""

    def check(value: str) -> str:
        if re.fullmatch(pattern, value) is None:
            raise ValueError("it is no next_cursor of this list: leave it out for the first page")
        return value

    return AfterValidator(check)


class PageQuery(Body):
    """One page of a list, newest first."""

    limit: Annotated[Count, Field(ge=1, le=1000)] = 50
    """Maximum number of entries."""
    cursor: Annotated[Count, Field(ge=1, le=MAX_KEY)] | None = None
    """`next_cursor` of the previous page. Default: the first page."""


class TrajectoryFilters(PageQuery):
    """A page of trajectories that pass all given filters."""

    job_id: Identifier | None = None
    """Only trajectories of this job."""
    instance_id: Identifier | None = None
    """Only trajectories of this instance."""
    outcome: Outcome | None = None
    """Only trajectories with this outcome."""
    stop_reason: StopReason | None = None
    """Only trajectories with this stop reason."""
    min_reward: Number | None = None
    """Only trajectories with at least this reward."""
    max_reward: Number | None = None
    """Only trajectories with at most this reward."""
    success: bool | None = None
    """Only trajectories with (true) or without (false) success in the environment."""
    min_version: Annotated[Count, Field(ge=0, le=MAX_KEY)] | None = None
    """Only trajectories whose oldest weight version is at least this."""
    max_version: Annotated[Count, Field(ge=0, le=MAX_KEY)] | None = None
    """Only trajectories whose oldest weight version is at most this."""
    search: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Only trajectories with this text in uid or instance id, ignoring the case of ASCII letters."""

    @model_validator(mode="after")
    def _has_ordered_ranges(self) -> Self:
        for name in ("reward", "version"):
            low, high = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if low is not None and high is not None and low > high:
                raise ValueError(f"min_{name} is larger than max_{name}: nothing can lie between them")
        return self


class TrajectoryPageQuery(TrajectoryFilters):
    """A page of trajectories that pass all given filters, newest first or by `sort`."""

    sort: Literal["created_at", "reward", "turns", "sampled_tokens", "played_s"] = "created_at"
    """Sort key; unknown values count as lowest."""
    order: Literal["descending", "ascending"] = "descending"
    """Sort order. A cursor is valid for one `sort` and `order`."""
    previews: bool = False
    """Adds `goal` and `answer`, a line each from the messages; null beyond the first 16 MB of a page's payloads."""


class SearchQuery(TrajectoryFilters):
    """A page of trajectories with a text in their messages that pass all given filters, newest first."""

    text: Annotated[str, Field(min_length=1, max_length=256)]
    """Text to search in messages, thoughts and tool calls, ignoring case."""
    limit: Annotated[Count, Field(ge=1, le=200)] = 20
    """Maximum number of trajectories."""


class GroupPageQuery(Body):
    """A page of a job's groups that pass all given filters, last changed first or by `sort`."""

    limit: Annotated[Count, Field(ge=1, le=500)] = 50
    """Maximum number of entries."""
    cursor: Annotated[str, _cursor_of(r"[0-9]{1,12}\.[0-9]{1,12}:[0-9]{1,18}")] | None = None
    """`next_cursor` of the previous page. Default: the first page."""
    state: GroupState | None = None
    """Only groups in this state."""
    search: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Only groups with this text in their instance id, ignoring the case of ASCII letters."""
    cause: Annotated[str, Field(min_length=1, max_length=500)] | None = None
    """Only groups with this text in their cause."""
    sort: Literal["updated_at", "instance_id", "reward_mean"] = "updated_at"
    """Sort key; a group without members has the lowest mean reward."""
    order: Literal["descending", "ascending"] = "descending"
    """Sort order. A cursor is valid for one `sort` and `order`."""


class AttemptPageQuery(Body):
    """A page of a job's failed attempts that pass all given filters, last ended first."""

    limit: Annotated[Count, Field(ge=1, le=500)] = 50
    """Maximum number of entries."""
    cursor: Annotated[str, _cursor_of(r"[0-9]{1,12}\.[0-9]{1,12}(:[0-9]{1,18}){3}")] | None = None
    """`next_cursor` of the previous page. Default: the first page."""
    error_code: Annotated[str, Field(min_length=1, max_length=100)] | None = None
    """Only attempts with this error code."""
    search: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Only attempts with this text in their instance id or error, ignoring the case of ASCII letters."""
    transcripts: bool = False
    """Adds the stored transcript of each attempt, if it has one."""


class SeriesQuery(Body):
    """A range of a job's time, in buckets of equal width."""

    range_s: Annotated[Number, Field(gt=0, le=3e9)] | None = None
    """Length of the range in seconds, up to now. Default: the whole job."""
    since: Annotated[Number, Field(ge=0, le=1e12)] | None = None
    """Only buckets from this time on, for a caller that has the earlier ones."""
    width_s: Annotated[Count, Field(ge=1, le=604_800)] | None = None
    """Width of a bucket in seconds. Default: by the length of the range. At least 60 with very many episodes."""


class OverviewQuery(Body):
    """One page of jobs, newest first."""

    state: Literal["open", "ended"] | None = None
    """Only jobs that are open (running or paused), or only those that ended."""
    search: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Only jobs with this text in their id or task type, ignoring the case of ASCII letters."""
    limit: Annotated[Count, Field(ge=1, le=100)] = 20
    """Maximum number of jobs."""
    cursor: Annotated[Count, Field(ge=1, le=MAX_KEY)] | None = None
    """`next_cursor` of the previous page. Default: the first page."""


class NamedTrajectoryQuery(Body):
    """The trajectory with that uid."""

    job_id: Identifier | None = None
    """Job of the trajectory; required if several jobs have that uid."""


class TokenRowQuery(NamedTrajectoryQuery):
    """A training row of the trajectory with that uid."""

    row: Annotated[Count, Field(ge=0, le=1_000_000)] = 0
    """Index of the row, from 0."""


class TrajectoryQuery(NamedTrajectoryQuery):
    """The trajectory with that uid, and its form."""

    images: Literal["inline", "hash"] = "hash"
    """Screenshots as data URIs, or as hashes for `/images`."""
    generations: bool = True
    """Includes token ids and log-probs, which are most of the bytes."""


class DeliveryQuery(Body):
    """The form of a past delivery."""

    images: Literal["inline", "hash"] = "inline"
    """Screenshots as data URIs, or as hashes for `/images`."""
    reward_version: Annotated[Count, Field(ge=0)] = 0
    """Version of the rewards: 0 for those of the episodes, else a version that `rollout-buffer rescore` made."""
