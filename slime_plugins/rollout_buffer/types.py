"""The words of the project as frozen records and enums. Everything else is built from these.

A record is changed by copy: ``dataclasses.replace(record, field=value)``. Dicts appear only where JSON comes in or goes
out (``wire/``) and for OpenAI messages, which stay what the protocol made them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from slime.utils.mask_rows import Generation, PromptCheck, PromptReceipt, TrainingRow, WeightVersionSpan

__all__ = [
    "AckResult",
    "AttemptState",
    "DeliveryState",
    "EngineReport",
    "EngineTrouble",
    "EpisodeRequest",
    "Generation",
    "GroupState",
    "Image",
    "Instance",
    "JobState",
    "Message",
    "Outcome",
    "PromptCheck",
    "PromptReceipt",
    "SamplingParams",
    "StopReason",
    "TrainingRow",
    "Trajectory",
    "WeightVersionSpan",
    "WriteStatus",
]

Message = dict[str, Any]
"""One OpenAI message. An image in it is ``{"type": "image_url", "image_url": {"url": "sha256:<hex>"}}``."""


class JobState(StrEnum):
    """Where an accepted ``start_rollout`` stands."""

    RUNNING = "running"  # a runner plays its episodes, or (external jobs) writers may write
    PAUSED = "paused"  # no new episode starts until it is resumed
    FINISHED = "finished"  # every group is ready, delivered, filtered, failed or skipped
    CANCELLED = "cancelled"  # somebody asked for it; running episodes were given up
    FAILED = "failed"  # the job could not go on: its generator does not load, its tokenizer is missing …


class GroupState(StrEnum):
    """The one state that all slots of a group share. Why it got there is the group's ``cause``."""

    OPEN = "open"  # some slot is still to be filled
    READY = "ready"  # closed and valid, waiting for a poll
    LEASED = "leased"  # in a delivery that is not acknowledged yet
    DELIVERED = "delivered"  # acknowledged, or popped by a client that does not acknowledge
    FILTERED = "filtered"  # closed, and refused by a group function
    FAILED = "failed"  # too few slots could be filled, or a group function raised
    SKIPPED = "skipped"  # the trainer has trained it already, or its job was cancelled


class AttemptState(StrEnum):
    """Where one try to fill a slot stands."""

    RUNNING = "running"
    FINISHED = "finished"  # it brought a trajectory
    FAILED = "failed"  # its surroundings broke; it counts against the slot's max_attempts
    GIVEN_UP = "given_up"  # stopped from outside, or its runner died; a result of it is refused, and it counts nothing


class DeliveryState(StrEnum):
    """Where a set of groups stands that a poll was given."""

    LEASED = "leased"  # until it is acknowledged, or its lease runs out
    ACKED = "acked"
    POPPED = "popped"  # handed out for good, to a client that does not acknowledge
    EXPIRED = "expired"  # its lease ran out: its groups are ready again, and come back together


class AckResult(StrEnum):
    """What an acknowledged delivery was."""

    ACKED = "acked"  # now or earlier
    EXPIRED = "expired"  # its groups went to somebody else in the meantime
    UNKNOWN = "unknown"


class WriteStatus(StrEnum):
    """What became of a trajectory that was brought."""

    STORED = "stored"
    DUPLICATE = "duplicate"  # one of its uid was there: nothing changed
    LATE = "late"  # its group had closed, or has no free slot: it is kept, and not delivered


class EngineTrouble(StrEnum):
    """Why an engine gives no tokens."""

    NONE = ""  # it gives them
    UPDATING = "updating"  # it aborts or holds requests, as it does while its weights are updated
    SILENT = "silent"  # it holds requests and has answered none for long
    REFUSES = "refuses"  # it cannot be reached, or answers with errors


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineReport:
    """How the engine of a job is, as its runner sees it; all defaults when nobody knows.

    ``message`` is what it does in place of an answer, as what follows "the engine"; ``since_s`` for how many seconds;
    ``waiting`` how many requests wait for it.
    """

    url: str = ""
    code: EngineTrouble = EngineTrouble.NONE
    message: str = ""
    since_s: float | None = None
    waiting: int = 0


class Outcome(StrEnum):
    """How an attempt ended. Only the first two may be trained; an infrastructure failure is never a reward."""

    COMPLETED = "completed"  # the episode came to its own end
    TRUNCATED = "truncated"  # cut by a token, context or turn limit
    ABORTED = "aborted"  # given up from outside: cancelled job, shutdown
    FAILED = "failed"  # device, engine or environment broke; has a typed error and no reward


class StopReason(StrEnum):
    """Why an episode stopped."""

    TERMINATED = "terminated"  # the agent said it was done, or that it gives up
    ANSWERED = "answered"  # the agent gave its answer
    TASK_ENDED = "task_ended"  # the task itself said that it is over, solved or not
    STOP = "stop"  # a single-turn generation ended by itself
    REPEATED = "repeated"  # the agent did the same at the same screen too often (stop_after_repeats)
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"  # one generation reached its cap
    MAX_CONTEXT = "max_context"  # the whole sequence reached its cap
    FORBIDDEN_TOKEN = "forbidden_token"  # the agent sampled an image token; everything before it is kept
    ABORTED = "aborted"


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """An encoded screenshot, named by the sha256 of exactly these bytes."""

    data: bytes
    media_type: str = "image/png"
    sha256: str = ""

    def __post_init__(self) -> None:
        digest = hashlib.sha256(self.data).hexdigest()
        if self.sha256 and self.sha256 != digest:
            raise ValueError(f"image bytes hash to {digest}, not to the {self.sha256} they came under")
        object.__setattr__(self, "sha256", digest)


@dataclass(frozen=True, kw_only=True, slots=True)
class Instance:
    """One line of the input file. ``data`` is the whole line, ``instance_id`` its key as a string."""

    instance_id: str
    data: Mapping[str, Any]

    @property
    def task(self) -> str:
        """What it is one of: its ``metadata.task_name``, its id where it has none."""
        metadata = self.data.get("metadata")
        named = metadata.get("task_name") if isinstance(metadata, Mapping) else None
        return str(named or self.instance_id)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the engine samples; ``max_new_tokens`` caps one generation. ``extra`` is passed through to the engine."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeRequest:
    """What a generator is asked to play: one attempt to fill one slot.

    ``uid`` names the trajectory that a successful attempt returns; it is unique per (job, epoch, instance, slot,
    attempt). ``options`` are the job's settings that only the generator understands. ``evaluation`` is true when the
    result is measured and not trained. ``transcript`` is empty: a generator that keeps its messages in it lets people
    read, of an attempt that fails, what was said before (``rollout-buffer attempts``).
    """

    uid: str
    job_id: str
    instance: Instance
    epoch: int
    slot: int
    attempt: int
    sampling_params: SamplingParams
    options: Mapping[str, Any] = field(default_factory=dict)
    evaluation: bool = False
    transcript: list[Message] = field(default_factory=list, compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """The record of an episode that came to an end of its own.

    ``reward`` is what the trainer gets, ``raw_reward`` what the episode earned; a generator sets only ``reward`` unless
    it shapes one from the other. ``images`` holds each screenshot once, in order of first appearance; ``messages`` name
    them by hash. ``timings_s`` maps a phase (reset, generate, act, score) to its summed seconds.

    ``turn_rewards``, where a generator knows them, has one number for each generation that is trained (of a trajectory
    without generations, each assistant message that is): what that turn earned. The last one's holds what the episode
    earned in the end; ``reward`` is not added. ``token_rewards`` has as many entries, each None or one number for each
    of the turn's ``output_ids``, earned beside: penalties of single tokens. A trainer that does not ask for them sees
    ``reward`` alone.
    """

    uid: str
    instance_id: str
    messages: Sequence[Message]
    reward: float
    outcome: Outcome
    stop_reason: StopReason
    raw_reward: float | None = None
    turn_rewards: Sequence[float] | None = None
    token_rewards: Sequence[Sequence[float] | None] | None = None
    generations: Sequence[Generation] = ()
    images: Sequence[Image] = ()
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    timings_s: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.outcome is Outcome.FAILED:
            raise ValueError("a failed attempt is no trajectory: raise an EpisodeError instead")
