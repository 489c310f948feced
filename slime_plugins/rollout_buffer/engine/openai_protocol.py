"""Requests to and replies from an OpenAI-compatible server, for an engine that works on token ids.

Pure functions. Generators encode prompts as ids, but such a server takes messages. So prompts are encoded with the
project's own ChatML tokenizer: ``messages_of`` decodes them exactly, because each turn begins and ends with special
ids, and ``reply_ids`` encodes an answer. The model never sees these ids; its server renders the messages with its own
template. The result is for evaluation and cannot be trained on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import orjson

from slime_plugins.rollout_buffer.engine.sglang_protocol import ForeignReplyError, data_uri
from slime_plugins.rollout_buffer.errors import EngineError
from slime_plugins.rollout_buffer.types import Image, Message, SamplingParams

ROLES: Final = frozenset({"system", "user", "assistant"})
MAX_ROLE_TOKENS: Final = 8
"""Limit of the tokens of a role and the line break after it."""
NOT_SENT: Final = frozenset({"logit_bias", "stop_token_ids", "max_tokens", "sampling_seed"})
"""Sampling parameters that such a server does not have, or that are sent under another name."""
FINISH_REASONS: Final = {"stop": "stop", "length": "length", "eos": "stop"}
"""Finish reasons of such servers, and the project's names of them."""
_MARKER: Final = re.compile(r"(?<=<)(?=\|[a-z_]+\|>)")
"""Matches after the first character of a text that looks like a special token: split there, it is encoded as text."""


class Envelope:
    """Decodes prompt ids into messages and encodes replies, with the project's ChatML tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        special_ids = tokenizer.get_added_vocab()
        self._tokenizer = tokenizer
        self._begin, self._end = int(special_ids["<|im_start|>"]), int(special_ids["<|im_end|>"])
        self._image = int(special_ids["<|image_pad|>"])
        self._around_images = frozenset({int(special_ids["<|vision_start|>"]), int(special_ids["<|vision_end|>"])})

    def messages_of(self, ids: Sequence[int], images: Sequence[Image]) -> list[Message]:
        """Returns the conversation in ``ids``, without the generation prompt at its end.

        Raises:
            EngineError: the ids are not ChatML, or the numbers of placeholders and images differ.
        """
        pictures = iter(images)
        messages = [self._message(turn, pictures) for turn in self._turns(ids)]
        if not messages:
            raise EngineError(
                "the prompt is no conversation in ChatML: it cannot be sent to an OpenAI-compatible server"
            )
        if sum(1 for _ in pictures):
            raise EngineError(f"the prompt has fewer image placeholders than its {len(images)} images")
        return messages

    def question_ids(self, text: str) -> tuple[int, ...]:
        """Returns the prompt ids of a conversation with one user message ``text``."""
        return (self._begin, *self._ids(f"user\n{text}"), self._end, self._begin, *self._ids("assistant\n"))

    def reply_ids(self, text: str, *, closed: bool) -> tuple[int, ...]:
        """Returns a reply as ids; with ``closed`` the end-of-turn id is appended.

        Text that looks like a special token stays text.
        """
        pieces = [self._tokenizer.encode(piece, add_special_tokens=False) for piece in _MARKER.split(text) if piece]
        return (*(token for piece in pieces for token in piece), *([self._end] if closed else []))

    def _turns(self, ids: Sequence[int]) -> Iterator[tuple[str, list[int]]]:
        """Yields role and content of each turn, without the open turn at the end."""
        turn: list[int] | None = None
        for token in ids:
            if token == self._begin:
                turn = []
            elif token == self._end and turn is not None:
                yield self._role_and_content(turn)
                turn = None
            elif turn is not None:
                turn.append(token)

    def _role_and_content(self, ids: list[int]) -> tuple[str, list[int]]:
        for end in range(1, min(len(ids), MAX_ROLE_TOKENS) + 1):
            role, newline, rest = self._text(ids[:end]).partition("\n")
            if newline:  # its token may also hold the first characters of the content
                if role not in ROLES:
                    break
                return role, [*self._ids(rest), *ids[end:]]
        raise EngineError(f"a turn of the prompt begins with {self._text(ids[:MAX_ROLE_TOKENS])!r}, which is no role")

    def _message(self, turn: tuple[str, list[int]], pictures: Iterator[Image]) -> Message:
        role, ids = turn
        parts: list[dict[str, Any]] = []
        text: list[int] = []
        for token in (token for token in ids if token not in self._around_images):
            if token == self._image:
                parts += [*self._text_part(text), _image_part(next(pictures, None))]
                text = []
            else:
                text.append(token)
        if not parts:
            return {"role": role, "content": self._text(text)}
        return {"role": role, "content": [*parts, *self._text_part(text)]}

    def _text_part(self, ids: list[int]) -> list[dict[str, Any]]:
        return [{"type": "text", "text": self._text(ids)}] if ids else []

    def _text(self, ids: Sequence[int]) -> str:
        decoded = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(decoded)

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False)) if text else []


def chat_body(
    *, model: str, messages: Sequence[Message], sampling_params: SamplingParams, token_limit_name: str
) -> bytes:
    """Returns the body of one ``POST /chat/completions``; ``token_limit_name`` is the server's name of the limit."""
    extra = {key: value for key, value in sampling_params.extra.items() if key not in NOT_SENT}
    seed = sampling_params.extra.get("sampling_seed")
    body = extra | {
        "model": model,
        "messages": list(messages),
        "temperature": sampling_params.temperature,
        "top_p": sampling_params.top_p,
        token_limit_name: sampling_params.max_new_tokens,
        **({} if seed is None else {"seed": seed}),
    }
    return orjson.dumps(body)


def read_reply(body: bytes) -> tuple[str, str]:
    """Returns the text of a reply and its finish reason, ``stop`` or ``length``.

    Raises:
        ForeignReplyError: the body is no chat completion.
        EngineError: another finish reason (a content filter, tool calls), no message, or content that is no string.
    """
    choice = _first_choice(body)
    reason = choice.get("finish_reason")
    if reason == "tool_calls":
        raise EngineError("the server returned tool calls although none were offered: disable its tool-call parser")
    if reason not in FINISH_REASONS:
        raise EngineError(f"the server ended the reply with finish_reason {str(reason)[:100]!r}")
    message = choice.get("message")
    if not isinstance(message, Mapping):
        raise EngineError("the server's reply has no message")
    content = message.get("content")
    if content is None:
        content = message.get("refusal") or ""
    if not isinstance(content, str):
        raise EngineError(f"the server's reply has content of the type {type(content).__name__}, not a string")
    return content, FINISH_REASONS[str(reason)]


def is_context_overflow(body: bytes) -> bool:
    """Returns True if an error reply states that prompt and reply exceed the model's context."""
    error = _error(body)
    text = str(error.get("message", "")).lower()
    return error.get("code") == "context_length_exceeded" or "context length" in text or "maximum context" in text


def requires_max_completion_tokens(body: bytes) -> bool:
    """Returns True if an error reply states that the limit is named ``max_completion_tokens``."""
    error = _error(body)
    return "max_completion_tokens" in str(error.get("message", "")) and "max_tokens" in f"{error}"


def _error(body: bytes) -> Mapping[str, Any]:
    try:
        reply = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {"message": body[:2000].decode("utf-8", errors="replace")}
    error = reply.get("error", reply) if isinstance(reply, dict) else reply
    return error if isinstance(error, dict) else {"message": str(error)}


def _first_choice(body: bytes) -> Mapping[str, Any]:
    try:
        choices = orjson.loads(body)["choices"]
        choice = choices[0]
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError) as error:
        shown = " ".join(body[:300].decode("utf-8", errors="replace").split())
        raise ForeignReplyError(f"no chat completion: {shown or '(an empty body)'}") from error
    if not isinstance(choice, dict):
        raise EngineError("the server's reply is no chat completion: its choice is no object")
    return choice


def _image_part(image: Image | None) -> dict[str, Any]:
    if image is None:
        raise EngineError("the prompt has more image placeholders than images")
    return {"type": "image_url", "image_url": {"url": data_uri(image)}}
