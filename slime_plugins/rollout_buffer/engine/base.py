"""The ``Engine`` protocol: token ids and images in, sampled ids and log-probs out.

``sglang.py`` holds the client of an SGLang server or router, ``openai.py`` that of servers which return no token ids;
``http.py`` holds their common part and ``factory.py`` creates them. ``testing/fake_engine.py`` is the scripted fake for
tests. One conformance suite runs against all of them.
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
    """One turn to sample: the prompt, the sampling parameters and the session.

    ``input_ids`` hold one image placeholder per entry of ``images``, in order. ``session_id`` is the trajectory's uid:
    a router sends all turns of a session to the engine that caches their prefix. ``banned_ids`` are never sampled; the
    log-probs of other tokens are computed as without the ban.
    """

    input_ids: Sequence[int]
    sampling_params: SamplingParams
    session_id: str
    images: Sequence[Image] = ()
    banned_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateReply:
    """The sampled ids of one turn.

    ``finish_reason`` is ``stop``, ``length``, or, only with ``EngineSettings.resume_aborted`` False, ``abort``.
    ``weight_version_spans`` cover all of ``output_ids`` if the engine reports versions; ``weight_version`` is the
    version of the last token. ``prompt_tokens`` is the length of the prompt after the engine expanded its images,
    ``cached_tokens`` the part of it that the engine's cache held. ``records`` holds the requested
    per-token records by kind (``slime.utils.mask_token_records``), at positions of the expanded sequence: top-p ids of
    the sampled tokens, and experts of each token whose experts the engine has not reported before. ``prompt_receipt``
    is the result of the prompt check; ``ran_prompt_ids`` are the ids that the engine ran, if they differ from those
    sent. ``engine_s`` are the seconds that the turn took, retries included; None if the client does not measure them.
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
    engine_s: float | None = field(default=None, compare=False)

    def as_generation(
        self, prompt_ids: Sequence[int], *, images: tuple[str, ...] | None = None, length: int | None = None
    ) -> Generation:
        """Returns the generation to store in a trajectory, with the first ``length`` tokens, or all if None.

        ``prompt_ids`` are the ids that were sent; if the engine ran other ids, those are stored. ``images`` are the
        sha256 of the prompt's images. A shortened turn has finish reason ``length``; its ``weight_version`` remains
        that of the last sampled token.
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
            engine_s=self.engine_s,
        )

    def record_bytes(self, cut: int = 0) -> dict[str, RecordBytes]:
        """Returns the records to store in a trajectory, without those of the last ``cut`` tokens."""
        return {kind: RecordBytes.of(one.part(0, one.end - cut)) for kind, one in self.records.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLoad:
    """Load of an engine, summed over its workers: running and queued requests."""

    running: int
    waiting: int


class Engine(Protocol):
    """Samples turns. Implementations resume aborted generations and retry through weight updates."""

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """Returns the tokens sampled after ``request.input_ids``.

        Raises:
            EngineError: the engine refused the request, sent an invalid reply, or a limit of ``EngineSettings`` was
                exceeded. An ``EngineAwayError`` if ``retry_timeout_s`` was exceeded and the engine answers no other
                request either.
        """
        ...

    async def close(self) -> None:
        """Closes open connections; a second call does nothing."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """Retry limits of the client, times in seconds. A single call has no read timeout: a paused engine may hold a
    request for minutes.

    ``retry_timeout_s`` limits the sum of the pauses between failed tries of one turn since its last sampled token. It
    covers engines that restart or load weights, and other programs that reply at the engine's address (a proxy's page,
    a redirect, an empty body). ``deadline_s`` limits a whole turn, held requests included; None = no limit.
    ``backoff_first_s`` and ``backoff_longest_s`` are the first and the longest pause. A turn fails after
    ``server_error_tries`` replies with HTTP 500, if the engine answers other requests: a router reports a lost worker
    that way, and an engine a request that crashes it. ``abort_timeout_s`` limits the abort of a cancelled request.
    ``connection_limit`` limits open connections; None = unlimited. The client resumes a generation that the engine
    aborted from its partial tokens; with ``resume_aborted`` false it returns the partial output with finish reason
    ``abort``.
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
