"""The inference engine as an episode sees it: token ids and images in, sampled ids and log-probs out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from slime_plugins.rollout_buffer.types import Image, SamplingParams, WeightVersionSpan

__all__ = ["Engine", "GenerateReply", "GenerateRequest"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """One turn to sample.

    ``input_ids`` hold one image placeholder per entry of ``images``, in order. ``session_id`` is the trajectory's uid:
    a router keeps all turns of a session on the engine that has their prefix cached.
    """

    input_ids: Sequence[int]
    sampling_params: SamplingParams
    session_id: str
    images: Sequence[Image] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateReply:
    """What was sampled. ``finish_reason`` is ``stop``, ``length`` or ``abort`` (only when the caller gave it up)."""

    output_ids: tuple[int, ...]
    output_log_probs: tuple[float, ...]
    finish_reason: str
    weight_version: str | None = None
    weight_version_spans: tuple[WeightVersionSpan, ...] = ()
    prompt_tokens: int | None = None
    cached_tokens: int | None = None


class Engine(Protocol):
    """Samples turns. Implementations resume aborted generations and ride out weight updates by themselves."""

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """Returns what was sampled after ``request.input_ids``.

        Raises:
            EngineError: the engine refused the request or stayed out of reach for longer than the client's patience.
        """
        ...

    async def close(self) -> None:
        """Ends open connections; a second call does nothing."""
        ...
