"""A conversation as token ids: rendering by the chat template, and the ids between two turns (the bridge).

    held ids   … <|im_start|>assistant\\n sampled … <|im_end|>
    bridge     \\n<|im_start|>user\\n<tool_response>\\n345 … <|im_end|>\\n<|im_start|>assistant\\n

Sampling stops at the end-of-turn token; the newline that templates write after it belongs to the bridge, and so does
the end-of-turn token of a turn that was cut. Held ids are never tokenised again, so the length of a bridge is exact,
however the tokenizer would encode the sampled text. Pure, except for the tokenizer.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from slime.utils.mask_template import with_reasoning_content
from slime_plugins.rollout_buffer.errors import ConfigError, InvalidPayloadError
from slime_plugins.rollout_buffer.types import Message

Tools = Sequence[Mapping[str, Any]]


class ConversationTokens:
    """Renders conversations with one tokenizer and its chat template; stateless and thread-safe.

    Raises:
        ConfigError: the tokenizer has no chat template, or its template does not end a turn with a special token.
    """

    def __init__(self, tokenizer: Any, template_options: Mapping[str, Any] | None = None) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError("the tokenizer has no chat template")
        self.tokenizer = tokenizer
        self._options = dict(template_options or {})
        self._reply_text = f"reply-{secrets.token_hex(16)}"  # random, so that no message holds it
        self.end_of_turn_id = self._find_end_of_turn()
        eos = getattr(tokenizer, "eos_token_id", None)
        self._ends = frozenset({self.end_of_turn_id} | ({eos} if isinstance(eos, int) else set()))

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Returns the ids of ``messages`` with the generation prompt, by the template.

        Raises:
            InvalidPayloadError: the template refuses the messages.
        """
        return self.encode(self._render(messages, tools))

    def bridge(
        self, before: Sequence[Message], added: Sequence[Message], held: Sequence[int], tools: Tools = ()
    ) -> list[int]:
        """Returns the ids from the end of the last turn of ``held`` through ``added`` to the next generation prompt.

        ``before`` are the messages before that turn.

        Raises:
            InvalidPayloadError: the template refuses the messages.
        """
        ids = self.encode(self._text_after_reply(before, added, tools))
        is_closed = bool(held) and held[-1] == self.end_of_turn_id
        return ids[1:] if is_closed and ids[:1] == [self.end_of_turn_id] else ids

    def text(self, output_ids: Sequence[int]) -> str:
        """Returns the text of a sampled turn, without its end-of-turn token and with all other special tokens."""
        content_ids = output_ids[:-1] if output_ids and output_ids[-1] in self._ends else output_ids
        return str(
            self.tokenizer.decode(list(content_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without special tokens added."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _find_end_of_turn(self) -> int:
        after = self._text_after_reply([{"role": "user", "content": "task"}], [{"role": "user", "content": "next"}], ())
        first = self.encode(after)[0]
        written = str(self.tokenizer.decode([first], skip_special_tokens=False))
        if not written.strip() or not after.startswith(written):
            raise ConfigError(f"the chat template does not end a turn with a special token, but with {after[:20]!r}")
        return first

    def _text_after_reply(self, before: Sequence[Message], added: Sequence[Message], tools: Tools) -> str:
        reply = {"role": "assistant", "content": self._reply_text}
        _, found, after = self._render([*before, reply, *added], tools).rpartition(self._reply_text)
        if not found:
            raise ConfigError("the chat template leaves out the text of an assistant turn")
        return after

    def _render(self, messages: Sequence[Message], tools: Tools) -> str:
        """Renders the messages; if the template refuses them, once more in the form that stricter templates accept."""
        try:
            return self._apply(messages, tools)
        except Exception as first:  # noqa: BLE001 - a template may raise anything
            try:
                return self._apply([_strict(message) for message in messages], tools)
            except Exception:  # noqa: BLE001 - as above; the first error is about the original messages
                raise InvalidPayloadError(f"the chat template refuses the messages: {first}") from first

    def _apply(self, messages: Sequence[Message], tools: Tools) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                [with_reasoning_content(message) for message in messages],
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=True,
                **self._options,
            )
        )


def plain_message(message: Message) -> dict[str, Any]:
    """Returns a message without null fields and empty tool calls, and with parsed arguments."""
    plain = {key: value for key, value in message.items() if value is not None and value != []}
    plain["content"] = plain.get("content", "")
    if "tool_calls" in plain:
        plain["tool_calls"] = [_plain_call(call) for call in plain["tool_calls"]]
    return plain


def is_same_message(left: Message, right: Message) -> bool:
    """Returns True if two messages are equal, apart from their form."""
    return left == right or plain_message(left) == plain_message(right)


def is_same_reply(sampled: Message, returned: Message) -> bool:
    """Returns True if an agent returned the reply that it was sent; surrounding spaces of its text may differ."""
    ours, theirs = plain_message(sampled), plain_message(returned)
    keys = ("role", "content", "tool_calls")
    return all(_stripped(ours.get(key)) == _stripped(theirs.get(key)) for key in keys)


def _stripped(value: Any) -> Any:
    return value.strip() if isinstance(value, str) else value


def _plain_call(call: Any) -> Any:
    """Returns a tool call with its name and arguments, without its id."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    return {"name": function.get("name"), "arguments": _parsed(function.get("arguments"))}


def _strict(message: Message) -> Message:
    strict = {key: value for key, value in message.items() if value is not None}
    strict.setdefault("content", "")
    if isinstance(strict.get("tool_calls"), list):
        strict["tool_calls"] = [_with_parsed_arguments(call) for call in strict["tool_calls"]]
    return strict


def _with_parsed_arguments(call: Any) -> Any:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return call
    function = call["function"]
    return {**call, "function": {**function, "arguments": _parsed(function.get("arguments"))}}


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
