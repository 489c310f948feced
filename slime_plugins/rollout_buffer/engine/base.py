"""The ``Engine`` protocol: token ids and images in, sampled ids and log-probs out.

``sglang.py`` holds the client of an SGLang server or router, ``openai.py`` the client of servers that return no token
ids; ``http_engine.py`` holds the common part of both clients, and ``factory.py`` creates them.
``testing/fake_engine.py`` is the scripted fake for tests. An engine that returns token ids must pass
``testing/engine_conformance.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from slime.utils.mask_rows import RecordBytes, TokenRecords
from slime_plugins.rollout_buffer.errors import EngineError
from slime_plugins.rollout_buffer.types import Generation, Image, PromptReceipt, SamplingParams, WeightVersionSpan


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """One turn to sample: the prompt, the sampling parameters and the session.

    ``input_ids`` hold one image placeholder per entry of ``images``, in order. ``session_id`` is the trajectory's uid:
    a router sends all turns of a session to the engine that caches their prefix. ``banned_ids`` are never sampled; the
    log-probs of other tokens are computed as without the ban.

    ``on_tokens`` gets the next ids of the reply as they are sampled. Only an engine that can stream calls it. If a call
    to the engine fails after ``on_tokens`` got ids, the turn is continued after these ids, or it fails.
    """

    input_ids: Sequence[int]
    sampling_params: SamplingParams
    session_id: str
    images: Sequence[Image] = ()
    banned_ids: frozenset[int] = frozenset()
    on_tokens: Callable[[Sequence[int]], None] | None = field(default=None, compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateReply:
    """The sampled ids of one turn.

    ``finish_reason`` is ``stop``, ``length``, or, only with ``EngineSettings.resume_aborted`` False, ``abort``.
    ``weight_version_spans`` cover all of ``output_ids`` if the engine reports versions; ``weight_version`` is the
    version of the last token. ``prompt_tokens`` is the length of the prompt after the engine expanded its images,
    ``cached_tokens`` the part of it that the engine's cache held. ``records`` holds the requested
    per-token records by kind (``slime.utils.mask_rows``), at positions of the expanded sequence: top-p ids of
    the sampled tokens, and experts of each token whose experts the engine has not reported before. ``prompt_receipt``
    is the result of the prompt check; ``ran_prompt_ids`` are the ids that the engine ran, if they differ from those
    sent. ``engine_s`` are the seconds that the turn took, retries included; None if the client does not measure them.
    ``breaks`` counts how often the engine broke off its stream and was asked for the rest.

    Raises:
        EngineError: the turn ended by itself without a token: no policy samples an empty turn.
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
    breaks: int = 0

    def __post_init__(self) -> None:
        if not self.output_ids and self.finish_reason == "stop":
            raise EngineError("the engine ended a turn without a token")

    def as_generation(
        self, prompt_ids: Sequence[int], *, images: tuple[str, ...] | None = None, length: int | None = None
    ) -> Generation:
        """Returns the generation to store in a trajectory, with the first ``length`` tokens, or all if None.

        ``prompt_ids`` are the ids that were sent; if the engine ran other ids, those are stored. ``images`` are the
        sha256 of the prompt's images. A shortened turn has finish reason ``length``; its ``weight_version`` remains
        that of the last sampled token.
        """
        token_count = len(self.output_ids) if length is None else length
        spans = (
            WeightVersionSpan(span.weight_version, span.start, min(span.end, token_count))
            for span in self.weight_version_spans
            if span.start < token_count
        )
        return Generation(
            prompt_ids=prompt_ids if self.ran_prompt_ids is None else self.ran_prompt_ids,
            output_ids=self.output_ids[:token_count],
            output_log_probs=self.output_log_probs[:token_count],
            finish_reason=self.finish_reason if token_count == len(self.output_ids) else "length",
            weight_version=self.weight_version,
            weight_version_spans=tuple(spans),
            images=images,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            records=self.record_bytes(len(self.output_ids) - token_count),
            prompt_receipt=self.prompt_receipt,
            engine_s=self.engine_s,
        )

    def record_bytes(self, cut: int = 0) -> dict[str, RecordBytes]:
        """Returns the records to store in a trajectory, without those of the last ``cut`` tokens."""
        return {kind: RecordBytes.of(records.part(0, records.end - cut)) for kind, records in self.records.items()}


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
                exceeded. It is an ``EngineAwayError`` if ``retry_timeout_s`` was exceeded and the engine answers no
                other request either.
        """
        ...

    async def close(self) -> None:
        """Closes open connections; a second call does nothing."""
        ...
