"""The inference engine as an episode sees it: token ids and images in, sampled ids and log-probs out.

``Engine`` is the seam. ``sglang.py`` has the client of an SGLang server or its router, ``openai.py`` that of servers
that give no token ids; what both have in common is in ``http.py``, and ``factory.py`` makes the one that is asked for.
``FakeEngine`` in ``testing/fake_engine.py`` is the scripted one for tests. All keep the same promises, and one
conformance suite holds them to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from slime.utils.mask_token_records import RecordBytes, TokenRecords
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.types import Generation, Image, PromptReceipt, SamplingParams, WeightVersionSpan


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """One turn to sample.

    ``input_ids`` hold one image placeholder per entry of ``images``, in order. ``session_id`` is the trajectory's uid:
    a router keeps all turns of a session on the engine that has their prefix cached. ``banned_ids`` are never sampled,
    and the log-probs of the others are what they are without that ban.
    """

    input_ids: Sequence[int]
    sampling_params: SamplingParams
    session_id: str
    images: Sequence[Image] = ()
    banned_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateReply:
    """What was sampled. ``finish_reason`` is ``stop``, ``length`` or ``abort`` (only when the caller gave it up).

    ``weight_version_spans`` cover all of ``output_ids`` when the engine tells its versions; ``weight_version`` is the
    last of them. ``prompt_tokens`` counts the prompt as the engine expanded it, images included. ``records`` holds by
    kind what was asked for of single tokens beside (``slime.utils.mask_token_records``), in the places of the expanded
    sequence: kept ids of the sampled tokens, experts of every token that the engine was not known to have told before.
    ``prompt_receipt`` is what it said of the ids that it ran; ``ran_prompt_ids`` are those where they differ from what
    it was sent.
    """

    output_ids: tuple[int, ...]
    output_log_probs: tuple[float, ...]
    finish_reason: str
    weight_version: str | None = None
    weight_version_spans: tuple[WeightVersionSpan, ...] = ()
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    records: Mapping[str, TokenRecords] = field(default_factory=dict)
    prompt_receipt: PromptReceipt | None = None
    ran_prompt_ids: Sequence[int] | None = None

    def as_generation(
        self, prompt_ids: Sequence[int], *, images: tuple[str, ...] | None = None, length: int | None = None
    ) -> Generation:
        """Returns the turn as a trajectory keeps it, after the prompt that was run, with its first ``length`` tokens.

        ``prompt_ids`` are those that were sent: the engine's own take their place where it ran others. A turn that is
        cut has finish reason ``length``; None keeps it whole. ``images`` names those of the prompt.
        """
        kept = len(self.output_ids) if length is None else length
        spans = (
            WeightVersionSpan(span.weight_version, span.start, min(span.end, kept))
            for span in self.weight_version_spans
            if span.start < kept
        )
        return Generation(
            prompt_ids=prompt_ids if self.ran_prompt_ids is None else self.ran_prompt_ids,
            output_ids=self.output_ids[:kept],
            output_log_probs=self.output_log_probs[:kept],
            finish_reason=self.finish_reason if kept == len(self.output_ids) else "length",
            weight_version=self.weight_version,
            weight_version_spans=tuple(spans),
            images=images,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            records=self.record_bytes(len(self.output_ids) - kept),
            prompt_receipt=self.prompt_receipt,
        )

    def record_bytes(self, cut: int = 0) -> dict[str, RecordBytes]:
        """Returns the records as a trajectory keeps them, without those of the last ``cut`` tokens."""
        return {kind: RecordBytes.of(one.part(0, one.end - cut)) for kind, one in self.records.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLoad:
    """How busy an engine is, over all its workers: requests that run, and that wait in its queues."""

    running: int
    waiting: int


class Engine(Protocol):
    """Samples turns. Implementations resume aborted generations and ride out weight updates by themselves."""

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """Returns what was sampled after ``request.input_ids``.

        Raises:
            EngineError: the engine refused the request or sent nonsense; an ``EngineAwayError`` when it stayed out of
                reach, for this and for any other request, for longer than ``retry_timeout_s``.
        """
        ...

    async def close(self) -> None:
        """Ends open connections; a second call does nothing."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """How long the client retries. There is no read timeout: a paused engine holds a healthy request for minutes.

    ``retry_timeout_s`` bounds the pauses between refused tries of one turn, summed since it last got a token; an engine
    that restarts or loads weights may refuse for that long, and what answers in its place (a proxy's page, a redirect,
    an empty body) is waited out as long. ``deadline_s`` bounds a whole turn, held requests included; None
    = no bound. ``server_error_tries`` is how often HTTP 500 is tried: a router reports a lost worker that way, an
    engine a request it cannot digest. ``connection_limit`` caps open connections; None = unlimited. A generation that
    the engine aborted goes on from its partial tokens, unless ``resume_aborted`` is false: then it is returned as it
    is, with finish reason ``abort``.
    """

    retry_timeout_s: float = 900.0
    deadline_s: float | None = 7200.0
    connect_timeout_s: float = 10.0
    backoff_first_s: float = 0.5
    backoff_longest_s: float = 15.0
    server_error_tries: int = 3
    abort_timeout_s: float = 5.0
    connection_limit: int | None = None
    resume_aborted: bool = True

    def __post_init__(self) -> None:
        lengths = (self.connect_timeout_s, self.backoff_first_s, self.backoff_longest_s, self.abort_timeout_s)
        if self.retry_timeout_s < 0 or min(lengths) <= 0:
            raise ConfigError("engine settings: retry_timeout_s must not be negative, the other times must be above 0")
        if self.deadline_s is not None and self.deadline_s <= 0:
            raise ConfigError("engine settings: deadline_s must be above 0, or None for no deadline")
        if self.server_error_tries < 1 or (self.connection_limit is not None and self.connection_limit < 1):
            raise ConfigError("engine settings: server_error_tries and connection_limit must be at least 1")
