"""Requests and replies of a backend behind SGLang's routes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from rollout_buffer_lab.sglang_routes.sampling import BadRequestError, Sampling

ABORTED: Mapping[str, Any] = {"type": "abort", "message": "Aborted"}


class PauseMode(StrEnum):
    """What a pause does to the requests that run."""

    ABORT = "abort"  # they come back with what they have
    IN_PLACE = "in_place"  # they wait, and go on from the keys and values that they have
    RETRACT = "retract"  # they wait, and their keys and values are computed again


class EngineBreakError(Exception):
    """A request that SGLang breaks on with HTTP 500, such as one with fewer images than placeholders."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateCall:
    """One request, its parameters checked. ``prompt`` is text or ids; ``session`` names the conversation's owner.

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
    """What came of a request. ``finish_reason`` is in SGLang's form, empty while more tokens will come; ``prompt_ids``
    have their images expanded."""

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
    """For each output token those of ``Sampling.asked_ids``; None where the engine does not compute them."""
    experts: Sequence[Sequence[int]] | None = None
    """Of each pass, from the one that read the first prompt token on; None where the model has none."""
    kept_ids: Sequence[Sequence[int]] | None = None
    """The ids kept by ``top_p`` for each output token; None if not recorded."""


class SglangBackend(Protocol):
    """Who samples behind the routes of ``app.py``. Everything is called on the event loop."""

    @property
    def tokenizer(self) -> Any:
        """A tokenizer of transformers, for the chat template."""
        ...

    @property
    def paused(self) -> bool:
        """Whether requests are held."""
        ...

    @property
    def weight_version(self) -> str:
        """The version that the next token will carry."""
        ...

    def loads(self) -> tuple[int, int]:
        """How many requests run, and how many wait."""
        ...

    def model_info(self) -> dict[str, Any]:
        """The reply of ``/model_info``."""
        ...

    def server_info(self) -> dict[str, Any]:
        """The reply of ``/server_info``, with ``context_length``."""
        ...

    async def generate(self, call: GenerateCall) -> Sampled:
        """Plays one request to its end; while the engine is paused it is held without an answer.

        Raises:
            BadRequestError: the request is wrong, and in which way.
            EngineBreakError: a request that SGLang breaks on.
        """
        ...

    async def abort(self, rid: str | None) -> None:
        """Ends one request, or with None every one, with what it has; an unknown one is no error."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Holds new requests; those that run are aborted or wait, by ``mode``."""
        ...

    async def resume(self) -> None:
        """Lets held requests go on."""
        ...

    async def update_weight_version(self, version: str) -> None:
        """Later tokens carry ``version``."""
        ...

    async def flush_cache(self) -> bool:
        """Forgets the prompts seen; refused (False) while requests run."""
        ...

    async def close(self) -> None:
        """Ends what runs."""
        ...


def check_length(prompt_tokens: int, max_new_tokens: int, limit: int) -> None:
    """Looks whether a request fits into the model's context.

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
