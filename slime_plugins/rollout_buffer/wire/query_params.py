"""Query parameters of the routes that only read, validated like bodies."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from slime_plugins.rollout_buffer.types import GroupState, Outcome, StopReason
from slime_plugins.rollout_buffer.wire.request_fields import Body, Count, Identifier, Number

MAX_KEY = 2**63 - 1


def _is_cursor(value: str) -> str:
    if re.fullmatch(r"[0-9.]{1,24}:[0-9]{1,18}", value) is None:
        raise ValueError("it is no next_cursor of this list: leave it out for the first page")
    return value


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
    """Only trajectories with this text in uid or instance id, ignoring case."""

    @model_validator(mode="after")
    def _has_a_range(self) -> Self:
        if self.min_reward is not None and self.max_reward is not None and self.min_reward > self.max_reward:
            raise ValueError("min_reward is larger than max_reward: nothing can lie between them")
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
    cursor: Annotated[str, AfterValidator(_is_cursor)] | None = None
    """`next_cursor` of the previous page. Default: the first page."""
    state: GroupState | None = None
    """Only those in this state."""
    search: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Only those with this text in their instance id, in either case of its letters."""
    cause: Annotated[str, Field(min_length=1, max_length=500)] | None = None
    """Only those with this text in their cause."""
    sort: Literal["updated_at", "instance_id", "reward_mean"] = "updated_at"
    """What the list is ordered by; a group without members counts as lowest by its mean reward."""
    order: Literal["descending", "ascending"] = "descending"
    """Last touched or highest first, or the other way round. A cursor belongs to one sort and order."""


def _is_attempt_cursor(value: str) -> str:
    if re.fullmatch(r"[0-9.]{1,24}(:[0-9]{1,18}){3}", value) is None:
        raise ValueError("it is no next_cursor of this list: leave it out for the first page")
    return value


class AttemptPageQuery(Body):
    """One page of the attempts of a job that failed, the last ended first; every filter that is given must hold."""

    limit: Annotated[Count, Field(ge=1, le=500)] = 50
    """Maximum number of entries."""
    cursor: Annotated[str, AfterValidator(_is_attempt_cursor)] | None = None
    """`next_cursor` of the previous page. Default: the first page."""
    error_code: Annotated[str, Field(min_length=1, max_length=100)] | None = None
    """Only those with this error code."""
    search: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Only those with this text in their instance id or error, in either case of its letters."""
    transcripts: bool = False
    """With what was said in them, where it was kept."""


class SeriesQuery(Body):
    """Which stretch of a job's time, in which buckets."""

    range_s: Annotated[Number, Field(gt=0, le=3e9)] | None = None
    """The last so many seconds; the whole job when it is left out."""
    since: Annotated[Number, Field(ge=0, le=1e12)] | None = None
    """Only buckets from this time on: what a caller that has the earlier ones asks for."""
    width_s: Annotated[Count, Field(ge=1, le=604_800)] | None = None
    """Seconds of a bucket; chosen by the length when it is left out. At least 60 where very many episodes lie in it."""


class OverviewQuery(Body):
    """One page of jobs, newest first."""

    state: Literal["open", "ended"] | None = None
    """Only jobs that are open (running or paused), or only those that ended."""
    search: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Only jobs with this text in their id or task type."""
    limit: Annotated[Count, Field(ge=1, le=100)] = 20
    """How many jobs at most."""
    cursor: Annotated[Count, Field(ge=1, le=MAX_KEY)] | None = None
    """`next_cursor` of the previous page. Default: the first page."""


class TokenRowQuery(Body):
    """Which training row of a trajectory."""

    job_id: Identifier | None = None
    """The job it belongs to; needed only when several jobs have that uid."""
    row: Annotated[Count, Field(ge=0, le=1_000_000)] = 0
    """Which row, from 0."""


class TrajectoryQuery(Body):
    """Which trajectory of that uid, and in which form."""

    job_id: Identifier | None = None
    """The job it belongs to; needed only when several jobs have that uid."""
    images: Literal["inline", "hash"] = "hash"
    """Screenshots as data URIs, or as hashes for `/images`."""
    generations: bool = True
    """Whether the token ids and log-probs come along: most of the bytes, and nothing that a reader of texts needs."""


class NamedTrajectoryQuery(Body):
    """Which trajectory of that uid."""

    job_id: Identifier | None = None
    """The job it belongs to; needed only when several jobs have that uid."""


class DeliveryQuery(Body):
    """In which form a past delivery is returned."""

    images: Literal["inline", "hash"] = "inline"
    """As in the poll that got it: screenshots as data URIs, or by hash."""
    reward_version: Annotated[Count, Field(ge=0)] = 0
    """Which rewards its trajectories get: 0, what was played, or a version that `rollout-buffer rescore` gave."""
