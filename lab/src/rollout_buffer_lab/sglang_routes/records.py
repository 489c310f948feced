"""Requests and replies of a backend behind SGLang's routes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from rollout_buffer_lab.sglang_routes.sampling import BadRequestError, Sampling

ABORTED: Mapping[str, Any] = {"type": "abort", "message": "Aborted"}


class PauseMode(StrEnum):
    """What a pause does to running requests."""

    ABORT = "abort"  # they are answered with the tokens so far
    IN_PLACE = "in_place"  # they wait, and keep their KV cache
    RETRACT = "retract"  # they wait, and their KV cache is computed again


class EngineBreakError(Exception):
    """A request that fails with HTTP 500, as in SGLang, for example with fewer images than placeholders."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateCall:
    """One request, its parameters checked. ``session`` is the caller's name for the conversation, empty without one.

    ``on_token`` gets the reply so far after each token but the last.
    """

    prompt: str | Sequence[int]
    images: tuple[bytes, ...] = ()
    sampling: Sampling
    rid: str = ""
    session: str = ""
    on_token: Callable[[Sampled], None] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """The reply to a request, or the reply so far.

    ``finish_reason`` is in SGLang's form, empty while more tokens will follow. ``prompt_ids`` hold a placeholder for
    each image token. ``version_spans`` are weight version, start and end of stretches of ``output_ids``.
    """

    rid: str
    text: str
    output_ids: list[int]
    log_probs: list[float]
    finish_reason: Mapping[str, Any]
    weight_version: str
    version_spans: list[tuple[str, int, int]]
    prompt_ids: list[int]
    cached_tokens: int
    image_tokens: int
    asked_log_probs: Sequence[Sequence[float]] | None = None
    """For each output token the log-probs of ``Sampling.asked_ids``; None if the engine does not compute them."""
    experts: Sequence[Sequence[int]] | None = None
    """The routed experts of every token but the last, from the first prompt token on; None if not recorded."""
    kept_ids: Sequence[Sequence[int]] | None = None
    """The ids kept by ``top_p`` for each output token; None if not recorded."""


class SglangBackend(Protocol):
    """An engine behind the routes of ``app.py``. All of it is called on the event loop."""

    @property
    def tokenizer(self) -> Any:
        """A tokenizer of transformers, for the chat template."""
        ...

    @property
    def paused(self) -> bool:
        """True while requests are held."""
        ...

    @property
    def weight_version(self) -> str:
        """The weight version of the next token."""
        ...

    def loads(self) -> tuple[int, int]:
        """Returns how many requests run, and how many wait."""
        ...

    def model_info(self) -> dict[str, Any]:
        """The reply of ``/model_info``."""
        ...

    def server_info(self) -> dict[str, Any]:
        """The reply of ``/server_info``, with ``context_length``."""
        ...

    async def generate(self, call: GenerateCall) -> Sampled:
        """Samples the reply to one request; while the engine is paused the request waits without an answer.

        Raises:
            BadRequestError: the request is wrong; the message says what is.
            EngineBreakError: SGLang would answer this request with HTTP 500.
        """
        ...

    async def abort(self, rid: str | None) -> None:
        """Finishes one request, or with None all, with the tokens so far; an unknown id is ignored."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Holds new requests; running ones are aborted or wait, by ``mode``."""
        ...

    async def resume(self) -> None:
        """Continues held requests."""
        ...

    async def update_weight_version(self, version: str) -> None:
        """Sets the weight version of later tokens."""
        ...

    async def flush_cache(self) -> bool:
        """Drops cached prefixes; refused (False) while requests run."""
        ...

    async def close(self) -> None:
        """Aborts running requests, and stops the engine's threads."""
        ...


def check_length(prompt_tokens: int, max_new_tokens: int, limit: int) -> None:
    """Checks that a request fits into the model's context.

    Raises:
        BadRequestError: it does not fit; the message has SGLang's wording.
    """
    if prompt_tokens > limit:
        sentence = f"The input ({prompt_tokens} tokens) is longer than the model's context length ({limit} tokens)."
        raise BadRequestError({"message": sentence})
    if prompt_tokens + max_new_tokens > limit:
        sentence = (
            f"Requested token count exceeds the model's maximum context length of {limit} tokens. "
            f"You requested a total of {prompt_tokens + max_new_tokens} tokens: {prompt_tokens} tokens from "
            f"the input messages and {max_new_tokens} tokens for the completion."
        )
        raise BadRequestError({"message": sentence})
