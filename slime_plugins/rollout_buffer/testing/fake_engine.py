"""An ``Engine`` whose replies come from a script, for tests of code that calls an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from slime_plugins.rollout_buffer.engine.base import GenerateReply, GenerateRequest
from slime_plugins.rollout_buffer.types import WeightVersionSpan

END_OF_TURN = "<|im_end|>"

ScriptedReply = str | Sequence[int] | GenerateReply | Exception
"""A text (the end-of-turn marker is added), ids taken as they are, a whole reply, or an error to raise."""


class FakeEngine:
    """Plays a script: either replies in order of the calls, or a function from request to reply.

    ``tokenizer`` encodes texts; a script of ids needs none. Texts and ids are cut at the request's ``max_new_tokens``
    with finish reason ``length``. ``delay_s`` passes before each reply. ``requests`` holds every request, in order.

    Raises:
        LookupError: (from ``generate``) no reply is left, or a text came without a tokenizer: a bug of the test.
    """

    def __init__(
        self,
        script: Iterable[ScriptedReply] | Callable[[GenerateRequest], ScriptedReply],
        *,
        tokenizer: Any = None,
        weight_version: str | None = "1",
        delay_s: float = 0.0,
    ) -> None:
        self.requests: list[GenerateRequest] = []
        self.closed = False
        self.weight_version = weight_version
        self._script = script if callable(script) else _next_of(list(script))
        self._tokenizer = tokenizer
        self._delay_s = delay_s

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """Returns the script's reply to ``request``; raises it if it is an error."""
        self.requests.append(request)
        await asyncio.sleep(self._delay_s)
        reply = self._script(request)
        if isinstance(reply, Exception):
            raise reply
        if not isinstance(reply, GenerateReply):
            ids = self._encode(reply) if isinstance(reply, str) else tuple(reply)
            reply = self._sampled(ids, request)
        if request.on_tokens is not None:
            for token_id in reply.output_ids:
                request.on_tokens([token_id])
        return reply

    async def close(self) -> None:
        """Marks the engine as closed; a second call does nothing."""
        self.closed = True

    def _encode(self, text: str) -> tuple[int, ...]:
        if self._tokenizer is None:
            raise LookupError("the fake engine's script holds a text, and there is no tokenizer to encode it")
        return tuple(self._tokenizer.encode(text + END_OF_TURN, add_special_tokens=False))

    def _sampled(self, ids: tuple[int, ...], request: GenerateRequest) -> GenerateReply:
        kept = ids[: max(request.sampling_params.max_new_tokens, 0)]
        version = self.weight_version
        return GenerateReply(
            output_ids=kept,
            output_log_probs=tuple(-0.05 - (token_id % 97) / 50 for token_id in kept),
            finish_reason="stop" if len(kept) == len(ids) else "length",
            weight_version=version,
            weight_version_spans=(WeightVersionSpan(version, 0, len(kept)),) if version and kept else (),
            prompt_tokens=None if request.images else len(request.input_ids),  # the fake engine does not expand images
            cached_tokens=0,
        )


def _next_of(replies: list[ScriptedReply]) -> Callable[[GenerateRequest], ScriptedReply]:
    """Returns a function whose calls return ``replies``, one after the other."""

    def next_reply(request: GenerateRequest) -> ScriptedReply:
        if not replies:
            raise LookupError(f"the fake engine's script has no reply left for session {request.session_id!r}")
        return replies.pop(0)

    return next_reply
