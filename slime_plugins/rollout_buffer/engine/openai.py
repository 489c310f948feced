"""An ``Engine`` over ``POST /chat/completions`` of any OpenAI-compatible server, for evaluations.

Such a server returns no token ids and, for most models, no log-probs. Its replies suffice for evaluation and not for
training: the runner stores trajectories with messages and without generations.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.engine.base import GenerateRequest
from slime_plugins.rollout_buffer.engine.http_engine import HttpAnswer, HttpEngine, RefusalError, part_of_answer
from slime_plugins.rollout_buffer.engine.openai_protocol import (
    Envelope,
    chat_body,
    is_context_overflow,
    read_reply,
    requires_max_completion_tokens,
)
from slime_plugins.rollout_buffer.engine.settings import EngineSettings
from slime_plugins.rollout_buffer.engine.sglang_protocol import SampledPart

ENVELOPE_TOKENIZER_PATH: Final = DEMO_TOKENIZER_PATH
"""The tokenizer with which a generator must encode its prompts, so that they can be decoded into messages."""


class OpenAiEngine(HttpEngine):
    """Client of a chat server. Prompts must be encoded with the tokenizer at ``ENVELOPE_TOKENIZER_PATH``.

    ``prompt_tokens`` of its replies is None, and token ids are those of that tokenizer: token budgets are estimates.
    """

    route = "/chat/completions"

    def __init__(
        self,
        base_url: str,
        settings: EngineSettings | None = None,
        *,
        model: str,
        tokenizer: Any,
        api_key: str | None = None,
        randomness: random.Random | None = None,
    ) -> None:
        """``base_url`` is the root of the API, like ``https://host/v1``; with ``api_key`` None no key is sent."""
        super().__init__(base_url, settings, randomness=randomness)
        self._model = model
        self._envelope = Envelope(tokenizer)
        self._api_key = api_key
        self._token_limit_name = "max_tokens"

    def _headers(self, session_id: str) -> dict[str, str]:
        return {} if self._api_key is None else {"Authorization": f"Bearer {self._api_key}"}

    def _body(self, request: GenerateRequest, sampled: Sequence[int], rid: str) -> bytes:
        return chat_body(
            model=self._model,
            messages=self._envelope.messages_of(request.input_ids, request.images),
            sampling_params=request.sampling_params,
            token_limit_name=self._token_limit_name,
        )

    def _probe_request(self) -> GenerateRequest:
        return replace(super()._probe_request(), input_ids=self._envelope.question_ids("Say OK."))

    def _part(self, answer: HttpAnswer) -> SampledPart:
        if answer.status == 400 and is_context_overflow(answer.body):  # ends the episode, as a reply at its limit does
            return self._part_of_text("", "length")
        if (
            answer.status == 400
            and self._token_limit_name == "max_tokens"
            and requires_max_completion_tokens(answer.body)
        ):
            self._token_limit_name = "max_completion_tokens"
            raise RefusalError("names the token limit max_completion_tokens")
        return part_of_answer(answer, lambda body: self._part_of_text(*read_reply(body)))

    def _part_of_text(self, text: str, finish_reason: str) -> SampledPart:
        ids = self._envelope.reply_ids(text, closed=finish_reason == "stop")
        return SampledPart(
            ids=ids,
            log_probs=(float("nan"),) * len(ids),
            finish_reason=finish_reason,
            weight_version=None,
            spans=(),
            prompt_tokens=None,
            cached_tokens=None,
        )
