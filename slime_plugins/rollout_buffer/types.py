"""The terms of the project as frozen records and enums.

Use ``dataclasses.replace(record, field=value)`` to change a record. Dicts are used only for JSON (``wire/``) and for
OpenAI messages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

# Re-exported from mask_rows, which imports nothing of this package.
from slime.utils.mask_rows import Generation as Generation
from slime.utils.mask_rows import PromptCheck as PromptCheck
from slime.utils.mask_rows import PromptReceipt as PromptReceipt
from slime.utils.mask_rows import TrainingRow as TrainingRow
from slime.utils.mask_rows import WeightVersionSpan as WeightVersionSpan

DEFAULT_TEMPERATURE = 1.0
"""Sampling temperature of a job that names none."""
MAX_EXACT_INTEGER = 2**53
"""The largest integer that every JSON reader represents exactly."""
CHANGEABLE = frozenset(
    {
        "num_process",
        "num_process_min",
        "num_process_max",
        "tokenizer_path",
        "max_attempts",
        "attempt_timeout_seconds",
        "group_timeout_seconds",
        "stop_after_failures",
        "stop_hopeless_groups",
        "max_groups_ahead",
        "max_groups_ready",
        "staleness_policy",
        "pause_when_idle_s",
        "exact_prompts",
    }
)
"""Settings that a start may change in a running job: they do not identify the work."""

Message = dict[str, Any]
"""One OpenAI message. An image in it is ``{"type": "image_url", "image_url": {"url": "sha256:<hex>"}}``."""


class JobState(StrEnum):
    """State of a job."""

    RUNNING = "running"  # a runner plays its episodes, or (external jobs) writers may write
    PAUSED = "paused"  # no new episode starts until it is resumed
    FINISHED = "finished"  # every group is ready, delivered, filtered, failed or skipped
    CANCELLED = "cancelled"  # by request; running episodes were given up
    FAILED = "failed"  # for example its generator cannot be loaded, or its tokenizer is missing


class GroupState(StrEnum):
    """State of a group and of all its slots. The group's ``cause`` holds the reason."""

    OPEN = "open"  # a slot is not filled yet
    READY = "ready"  # closed and valid, waiting for a poll
    LEASED = "leased"  # in a delivery that is not acknowledged yet
    DELIVERED = "delivered"  # acknowledged, or popped by a client that does not acknowledge
    FILTERED = "filtered"  # closed and never delivered: a group function rejected it, or it is too old
    FAILED = "failed"  # too few slots could be filled, too few payloads could be read, or a group function raised
    SKIPPED = "skipped"  # the trainer trained it in an earlier run, or its job was cancelled


class AttemptState(StrEnum):
    """State of an attempt to fill a slot."""

    RUNNING = "running"
    FINISHED = "finished"  # with a trajectory
    FAILED = "failed"  # with an error, which counts against the slot's max_attempts
    # it was stopped, its runner died, or its engine was away: its result is refused, and it is no failed attempt
    GIVEN_UP = "given_up"


class DeliveryState(StrEnum):
    """State of a delivery."""

    LEASED = "leased"  # until it is acknowledged, or its lease runs out
    ACKED = "acked"
    POPPED = "popped"  # delivered without a lease, to a client that does not acknowledge
    EXPIRED = "expired"  # its lease ran out: its groups are ready again, and are redelivered together


class AckResult(StrEnum):
    """Result of an acknowledgement."""

    ACKED = "acked"  # now or earlier
    EXPIRED = "expired"  # its groups were delivered to another consumer
    UNKNOWN = "unknown"


class WriteStatus(StrEnum):
    """Result of writing a trajectory."""

    STORED = "stored"
    DUPLICATE = "duplicate"  # its uid was stored already: nothing changed
    LATE = "late"  # its group is closed, or has no free slot: it is stored, and not delivered


class EngineTrouble(StrEnum):
    """Why an engine returns no tokens."""

    NONE = ""
    UPDATING = "updating"  # it aborts or holds requests, as during an update of its weights
    SILENT = "silent"  # it holds requests and has not answered any for long
    REFUSES = "refuses"  # it cannot be reached, or replies with errors


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineReport:
    """State of a job's engine, as a runner or gateway sees it; all defaults if unknown.

    ``message`` is a predicate of "the engine"; ``since_s`` is the duration of the trouble in seconds, ``waiting`` the
    number of requests that wait.
    """

    url: str = ""
    code: EngineTrouble = EngineTrouble.NONE
    message: str = ""
    since_s: float | None = None
    waiting: int = 0


class MessageMatching(StrEnum):
    """Rules by which the messages of a request count as those recorded in its session.

    The names are those of miles' ``--session-message-matcher``.
    """

    STRICT = "strict"
    LOOSE_TOOL_CALL = "loose_tool_call"
    ROLE_CONTENT_ONLY = "role_content_only"


class Outcome(StrEnum):
    """Outcome of an attempt. Only ``COMPLETED`` and ``TRUNCATED`` are trained; a failure never has a reward."""

    COMPLETED = "completed"  # the episode ended by itself
    TRUNCATED = "truncated"  # by a token, context or turn limit
    ABORTED = "aborted"  # stopped from outside, for example by an aborted generation; the runner counts it as failed
    FAILED = "failed"  # an error of device, engine, environment or generator, without a trajectory


class StopReason(StrEnum):
    """Why an episode stopped. ``trainer/mask_selection.py`` lists the reasons that cut the last reply."""

    TERMINATED = "terminated"  # the agent reported that it is done, or that it gives up
    ANSWERED = "answered"  # the agent gave its answer
    TASK_ENDED = "task_ended"  # the environment ended the episode, solved or not
    STOP = "stop"  # a single-turn generation ended by itself
    REPEATED = "repeated"  # the agent repeated an action at the same screen too often (stop_after_repeats)
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"  # one generation reached its cap
    MAX_CONTEXT = "max_context"  # the whole sequence reached its cap
    FORBIDDEN_TOKEN = "forbidden_token"  # the agent sampled an image token; all tokens before it are used
    ABORTED = "aborted"


def image_hash(data: bytes) -> str:
    """Returns the name of an image everywhere in the buffer: the sha256 of its encoded bytes, in hex."""
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """An encoded screenshot, identified by the sha256 of its bytes.

    Raises:
        ValueError: ``sha256`` is given and is not that of ``data``.
    """

    data: bytes
    media_type: str = "image/png"
    sha256: str = ""

    def __post_init__(self) -> None:
        digest = image_hash(self.data)
        if self.sha256 and self.sha256 != digest:
            raise ValueError(f"the sha256 of the image is {digest}, not {self.sha256}")
        object.__setattr__(self, "sha256", digest)


@dataclass(frozen=True, kw_only=True, slots=True)
class Instance:
    """One line of the input file. ``data`` is the whole object, ``instance_id`` the value of its id key as a string."""

    instance_id: str
    data: Mapping[str, Any]

    @property
    def task(self) -> str:
        """Name of the task: ``metadata.task_name``, or else the id."""
        metadata = self.data.get("metadata")
        task_name = metadata.get("task_name") if isinstance(metadata, Mapping) else None
        return str(task_name or self.instance_id)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the engine samples one turn, of at most ``max_new_tokens`` tokens.

    ``extra`` has further parameters under SGLang's names.
    """

    max_new_tokens: int
    temperature: float = DEFAULT_TEMPERATURE
    top_p: float = 1.0
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeRequest:
    """One attempt to fill one slot, for a generator to play.

    ``uid`` identifies the trajectory of a successful attempt; it is unique per (job, epoch, instance, slot, attempt).
    ``options`` are the job's settings for the generator. ``evaluation`` is true if the result is not trained.
    ``transcript`` is an empty list: messages that a generator appends to it are shown for failed attempts
    (``rollout-buffer attempts``).
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
    """The record of an episode that ended with a reward.

    ``reward`` is for the trainer, ``raw_reward`` is the reward of the episode; a generator sets only ``reward`` unless
    it shapes rewards. ``images`` holds each screenshot once, in order of first appearance; ``messages`` name them by
    hash. ``timings_s`` maps a phase (``reset``, ``generate``, ``act``, ``score``) to its total seconds.

    ``turn_rewards`` has one reward for each trained generation, or, without generations, for each trained assistant
    message. Its last entry includes the final reward of the episode: ``reward`` is not added to it. ``token_rewards``
    has one entry for each trained turn: None, or one additional reward for each of the turn's ``output_ids``. A trainer
    without a discount for turns uses ``reward`` alone.
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
            raise ValueError("a failed attempt has no trajectory: raise an EpisodeError instead")


def version_number(text: str | None) -> int | None:
    """Parses a weight version, as an engine reports it; None if the text is no version.

    The trainer counts from 1; ``default``, an engine's version before the first update, is 0. A number above
    ``MAX_EXACT_INTEGER`` is no version.
    """
    if text == "default":
        return 0
    if text is None or not text.isascii() or not text.isdigit() or len(text) > len(str(MAX_EXACT_INTEGER)):
        return None
    number = int(text)
    return number if number <= MAX_EXACT_INTEGER else None
