"""Token ids of append-only conversations, without re-tokenising sampled tokens.

The first prompt is rendered by the tokenizer's chat template. Each new observation is added as a *bridge*: the ids of
the template's text between the end of a turn and the next one.

    ids so far … <|im_start|>assistant\\n sampled … <|im_end|>
    bridge     \\n<|im_start|>user\\n … <|im_end|>\\n<|im_start|>assistant\\n

Sampling stops at the end-of-turn token, so that the newline after it belongs to the bridge. A truncated turn lacks that
token, and the bridge begins with it. Bridges are extracted from a dummy conversation, so that they contain neither BOS
nor default system prompt, and a template that drops earlier reasoning does not change them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.types import Message

_IMAGE_PLACEHOLDERS = ("<|image_pad|>",)
"""Placeholder tokens of an image, one for each model family; the first that the tokenizer has is used."""

_VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""Tokens that must not be sampled: a sampled one shifts every later image against its placeholder."""

_SENTINEL = "0123456789 the last words of a turn 9876543210"
"""The assistant's text in the dummy conversation, which templates write as it is."""
_CACHED_BRIDGES = 4096


def image_placeholder_of(tokenizer: Any) -> int | None:
    """Returns the id of the image placeholder in a prompt; None for the tokenizer of a text model."""
    known_tokens = tokenizer.get_added_vocab()
    ids = (known_tokens[token] for token in _IMAGE_PLACEHOLDERS if token in known_tokens)
    return next(ids, None)


def encoded(tokenizer: Any, text: str) -> list[int]:
    """Returns the ids of a text, without special tokens added.

    The Rust backend of a fast tokenizer is called directly, unless truncation, padding or encoding of special tokens is
    set in it, as by another user's call with ``truncation=True``. ``tokenizer.encode`` resets these settings.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and not (backend.truncation or backend.padding or backend.encode_special_tokens):
        return list(backend.encode(text, add_special_tokens=False).ids)
    return list(tokenizer.encode(text, add_special_tokens=False))


def decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    """Returns the text of ids, special tokens included; the Rust backend of a fast tokenizer is called directly."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return str(backend.decode(list(ids), skip_special_tokens=False))
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


class ChatTokens:
    """Converts messages to prompt ids, and new messages to bridge ids, with a tokenizer and its chat template.

    A system message after the first message gets the role user if the template has no place for it.
    ``template_options`` are passed to the template (``enable_thinking``, for example).

    Raises:
        ConfigError: there is no tokenizer, it has no chat template, the template raised, leaves out the text of an
            assistant turn, or does not end a turn with a token of its own.
    """

    def __init__(self, tokenizer: Any, template_options: Mapping[str, Any] | None = None) -> None:
        if tokenizer is None:
            raise ConfigError("this generator works on token ids: give the job a tokenizer_path")
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError("the tokenizer has no chat template")
        self.tokenizer = tokenizer
        self._template_options = dict(template_options or {})
        self._bridges: dict[str, tuple[int, ...]] = {}
        known_tokens = tokenizer.get_added_vocab()
        self.vision_ids = frozenset(known_tokens[token] for token in _VISION_TOKENS if token in known_tokens)
        self._placeholder = image_placeholder_of(tokenizer)
        # Text models may have the token, too: their templates write no images, and the token in a text is plain text.
        self._writes_images = self._placeholder is not None and any(
            token in str(tokenizer.chat_template) for token in _IMAGE_PLACEHOLDERS
        )
        # ``tokenizer.encode`` comes first: it resets a truncation that the tokenizer's file sets in the backend.
        by_tokenizer = list(tokenizer.encode(_SENTINEL, add_special_tokens=False))
        self._backend_agrees = by_tokenizer == encoded(tokenizer, _SENTINEL)
        self.end_of_turn_id = self._find_end_of_turn()

    @property
    def image_placeholder_id(self) -> int:
        """The id of the image placeholder in a prompt.

        Raises:
            ConfigError: the tokenizer has no image placeholder: it belongs to a text model.
        """
        if self._placeholder is None:
            raise ConfigError(f"the tokenizer has none of the image placeholders {', '.join(_IMAGE_PLACEHOLDERS)}")
        return self._placeholder

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """Returns the ids of ``messages`` with the generation prompt, one placeholder per image.

        ``tools`` are function descriptions in OpenAI's format, which are passed to the template.

        Raises:
            ConfigError: the template raised, or the numbers of placeholders and images differ, because the template
                writes no images or a text holds the placeholder.
        """
        ids = self._encode(self._render(messages, tools))
        self._check_images(ids, messages)
        return ids

    def bridge(self, message: Message, *, turn_is_closed: bool) -> list[int]:
        """Returns the ids from the end of an assistant turn through ``message`` to the next generation prompt.

        ``turn_is_closed``: the turn's last sampled id was ``end_of_turn_id``.

        Raises:
            ConfigError: as ``prompt``, or the template leaves out the text of an assistant turn.
        """
        key = repr(_for_template(message))
        if key not in self._bridges:
            if len(self._bridges) >= _CACHED_BRIDGES:
                self._bridges.clear()
            self._bridges[key] = self._make_bridge([message])
        ids = self._bridges[key]
        return list(ids[1:] if turn_is_closed else ids)

    def bridge_over(self, messages: Sequence[Message], *, turn_is_closed: bool) -> list[int]:
        """Returns one bridge for several messages, such as the results of parallel tool calls; does not cache it.

        Raises:
            ConfigError: as ``bridge``.
        """
        ids = self._make_bridge(messages)
        return list(ids[1:] if turn_is_closed else ids)

    def is_closed(self, output_ids: Sequence[int]) -> bool:
        """Returns True if a sampled turn ends with the template's end-of-turn token."""
        return bool(output_ids) and output_ids[-1] == self.end_of_turn_id

    def length_before_vision(self, output_ids: Sequence[int]) -> int:
        """Returns the number of sampled ids before the first vision token; no reply may contain one."""
        return next((index for index, token in enumerate(output_ids) if token in self.vision_ids), len(output_ids))

    def text(self, output_ids: Sequence[int]) -> str:
        """Returns the text of a sampled turn without its end-of-turn token; other special tokens are included."""
        return self.decoded(output_ids[:-1] if self.is_closed(output_ids) else output_ids)

    def decoded(self, ids: Sequence[int]) -> str:
        """Returns ids as text, special tokens included; an incomplete character becomes U+FFFD."""
        return decoded(self.tokenizer, ids)

    def count(self, text: str) -> int:
        """Returns the number of tokens of ``text``."""
        return len(self._encode(text)) if text else 0

    def _make_bridge(self, messages: Sequence[Message]) -> tuple[int, ...]:
        ids = self._encode(self._text_after_a_turn(messages))
        self._check_images(ids, messages)
        return tuple(ids)

    def _find_end_of_turn(self) -> int:
        after = self._text_after_a_turn([{"role": "user", "content": "next"}])
        first = next(iter(self._encode(after)), -1)
        # A token of ordinary text could also be sampled within a turn.
        if first not in {*self.tokenizer.get_added_vocab().values(), *self.tokenizer.all_special_ids}:
            raise ConfigError(f"the chat template does not end a turn with a token of its own, but with {after[:20]!r}")
        return first

    def _text_after_a_turn(self, messages: Sequence[Message]) -> str:
        """Renders ``messages`` after a dummy exchange and returns the text after the dummy's answer."""
        dummy = [{"role": "user", "content": "task"}, {"role": "assistant", "content": _SENTINEL}, *messages]
        # Split at the first occurrence: the messages that follow may contain the sentinel, too.
        _, sentinel, after = self._render(dummy).partition(_SENTINEL)
        if not sentinel:
            raise ConfigError("the chat template leaves out the text of an assistant turn")
        return after

    def _render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        if any(message["role"] == "system" for message in messages[1:]) and not self._writes_late_system_messages:
            first, *later = messages
            messages = [first, *({**each, "role": "user"} if each["role"] == "system" else each for each in later)]
        return self._rendered(messages, tools)

    @cached_property
    def _writes_late_system_messages(self) -> bool:
        """True if the template writes a system message that follows other messages in its place.

        Other templates refuse such a message, leave it out, or move it to the front.
        """
        texts = ("early words", "the task", _SENTINEL, "late words", "the next task")
        roles = ("system", "user", "assistant", "system", "user")
        try:
            written = self._rendered([{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)])
        except ConfigError:
            return False
        places = [written.find(text) for text in texts]
        return places == sorted(places) and -1 not in places

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        try:
            rendered = self.tokenizer.apply_chat_template(
                [_for_template(message) for message in messages],
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=True,
                **self._template_options,
            )
        except Exception as error:  # templates may raise any exception
            raise ConfigError(f"the chat template refuses the messages: {error}") from error
        return str(rendered)

    def _encode(self, text: str) -> list[int]:
        if self._backend_agrees:
            return encoded(self.tokenizer, text)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _check_images(self, ids: Sequence[int], messages: Sequence[Message]) -> None:
        images = sum(_image_count(message) for message in messages)
        placeholders = ids.count(self.image_placeholder_id) if images or self._writes_images else 0
        if placeholders != images:
            raise ConfigError(
                f"the chat template renders {placeholders} image placeholders for {images} images"
                + ("; a text of the messages may not hold the placeholder" if placeholders > images else "")
            )


def _for_template(message: Message) -> Message:
    """Returns the message with images as ``{"type": "image"}``, which every vision template supports."""
    content = message.get("content")
    if isinstance(content, str) or content is None:
        return message
    return {**message, "content": [{"type": "image"} if _is_image(part) else part for part in content]}


def _is_image(part: Mapping[str, Any]) -> bool:
    return part.get("type") in ("image", "image_url")


def _image_count(message: Message) -> int:
    content = message.get("content")
    return 0 if isinstance(content, str) or content is None else sum(_is_image(part) for part in content)
