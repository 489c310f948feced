"""Locates the sampled text in a rendered conversation, by probing the chat template.

Part of ``slime.utils.mask_utils``, which is the name to import from. Standard library only.

A conversation is rendered twice: unchanged, and as an *escaped render*, in which a character of each turn marker (``|``
in ``<|im_start|>``) is replaced by an unused character in all strings of the messages and tools. A marker in the
escaped render was therefore written by the template, never by a message or a tool definition. Unescaping it must give
the first render exactly; otherwise the template depends on that character, and nothing is decided.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import reduce
from itertools import islice
from types import NoneType
from typing import Any, Protocol

from slime.utils.mask_rows import common_prefix_length

Message = Mapping[str, Any]
Messages = Sequence[Message]
Tools = Sequence[Any] | None
Writer = Callable[..., str]
"""Renders messages with tools, as ``ChatTemplate.text`` does and with its keywords."""

_PRIVATE_USE = range(0xE000, 0xF900)
_RARE_ASCII = "~^`@#$%&!;"
THINKING_SWITCHES: tuple[dict[str, bool], ...] = (
    {},
    {"enable_thinking": True},
    {"enable_thinking": False},
    {"thinking": True},
    {"thinking": False},
)
"""The switches by which templates turn thinking on or off; the first sets none."""
_PROBE = ("probe-question-one", "probe-answer", "probe-question-two")


class UndecidedError(ValueError):
    """The sampled text cannot be located with this template and these messages."""


class UndecidedReason(StrEnum):
    """Why a part of an assistant turn is not trained although the model may have sampled it."""

    BOUNDARY = "boundary"  # one token contains text of the turn and text before or after it
    EMPTY_THINKING = "empty_thinking"  # an empty thinking block, attributed to the prompt; it may have been sampled
    DROPPED_REASONING = "dropped_reasoning"  # the message has reasoning that the template leaves out
    DROPPED_CALLS = "dropped_calls"  # the message has tool calls that the template does not render
    IMAGE = "image"  # an image token in an assistant turn
    TEMPLATE = "template"  # the turns of this conversation cannot be located: it is not trained


@dataclass(frozen=True, slots=True)
class Undecided:
    """A part that is not trained, with the reason.

    ``position`` is an index of ``token_ids``; None for a whole message or (``message_index`` None) the whole
    conversation.
    """

    reason: UndecidedReason
    message_index: int | None = None
    position: int | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class RenderedTurn:
    """Characters ``start`` to ``end`` of the rendered text are sampled as message ``message_index``.

    ``end`` is after the end-of-turn marker. ``holds_answer_only``: the generation prompt closed the thinking block, so
    that an empty thinking block in the text is attributed to the prompt.
    """

    message_index: int
    start: int
    end: int
    holds_answer_only: bool = False


@dataclass(frozen=True, slots=True)
class Rendering:
    """A rendered conversation with its turns; ``problem`` is the reason if the turns cannot be located.

    ``messages`` are in the form that the template accepted.
    """

    text: str
    turns: tuple[RenderedTurn, ...] = ()
    problem: str | None = None
    messages: Messages = field(default=())


class Dialect(Protocol):
    """One family of chat templates: its markers, the characters to escape in messages, and how to locate turns."""

    @property
    def escaped_characters(self) -> str:
        """The characters to escape in messages: the header and the end marker have one of them each."""
        ...

    @property
    def chunk_markers(self) -> tuple[str, ...]:
        """Added tokens at which a rendered conversation is split into messages."""
        ...

    @property
    def end_marker(self) -> str:
        """The end-of-turn token's text."""
        ...

    @property
    def header(self) -> str | None:
        """The text at the beginning of every assistant turn; None if it varies."""
        ...

    def assistant_turns(self, escaped_render: str, messages: Messages) -> list[RenderedTurn]:
        """Locates the sampled text of each assistant message.

        Raises:
            UndecidedError: a turn cannot be located.
        """
        ...


class ChatTemplate:
    """The tokenizer's chat template."""

    def __init__(self, tokenizer: Any, options: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._options = dict(options or {})

    def text(
        self,
        messages: Messages,
        tools: Tools = None,
        *,
        generation_prompt: bool = False,
        switches: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the rendered conversation. Errors of the template are not translated."""
        rendered: str = self._tokenizer.apply_chat_template(
            messages,
            tools=tools,
            tokenize=False,
            add_generation_prompt=generation_prompt,
            **{**(switches or {}), **self._options},
        )
        return rendered

    def render(self, dialect: Dialect, messages: Messages, tools: Tools = None) -> Rendering:
        """Renders a conversation, in a form that the template accepts, and locates its turns."""
        write, messages, text = self.render_accepted_form(messages, tools)
        try:
            escaped_render = self._escaped_render(dialect, write, messages, tools, text)
            return Rendering(text, tuple(dialect.assistant_turns(escaped_render, messages)), messages=messages)
        except UndecidedError as error:
            return Rendering(text, problem=str(error), messages=messages)

    def render_accepted_form(self, messages: Messages, tools: Tools = None) -> tuple[Writer, Messages, str]:
        """Returns a function that renders these messages, the messages in a form that the template accepts, and their
        render.

        Reasoning is passed as ``reasoning_content``. Messages that the template refuses are rendered again in other
        forms: with nulls, which some versions of transformers remove; with tool arguments as an object instead of JSON
        text; with ``content`` as text instead of null or a list of texts. If all forms are refused, the first error is
        raised.
        """
        messages = [with_reasoning_content(message) for message in messages]
        try:
            return self.text, messages, self.text(messages, tools)
        except Exception as refused:
            with_nulls = [(self._text_with_nulls, messages)] if _holds_null(messages) else []
            for write, variant in [*with_nulls, *((self.text, variant) for variant in _variants(messages))]:
                try:
                    return write, variant, write(variant, tools)
                except Exception:  # noqa: BLE001 - the next form may succeed; the first error is raised otherwise
                    continue
            raise refused

    def _text_with_nulls(
        self,
        messages: Messages,
        tools: Tools = None,
        *,
        generation_prompt: bool = False,
        switches: Mapping[str, Any] | None = None,
    ) -> str:
        """Renders messages with their null fields, which transformers 5 removes."""
        tokenizer: Any = self._tokenizer
        source = tokenizer.get_chat_template(None, tools)
        rendered: str = tokenizer.apply_chat_template(
            messages,
            tools=tools,
            tokenize=False,
            add_generation_prompt=generation_prompt,
            chat_template="{%- set messages = messages_with_nulls %}" + source,
            messages_with_nulls=messages,
            **{**(switches or {}), **self._options},
        )
        return rendered

    def _escaped_render(self, dialect: Dialect, write: Writer, messages: Messages, tools: Tools, text: str) -> str:
        if not _hold_any(dialect.escaped_characters, [messages, tools]) and not any(
            map(_continues_the_word_assistant, messages)
        ):
            return text

        for spares in _spare_characters(text, len(dialect.escaped_characters) + 1):  # the last one is for roles
            escaper = _MarkerEscaper(dialect.escaped_characters, spares)
            escaped_messages = [escaper.message(message) for message in messages]
            escaped_tools = escaper.value(tools) if tools else tools
            try:
                escaped_render = write(escaped_messages, escaped_tools)
            except Exception:  # noqa: BLE001 - a template that refuses one spare character may accept the next
                continue
            if escaper.unescape(escaped_render) == text:
                return escaped_render
        raise UndecidedError("the chat template depends on the characters of its own turn markers in the messages")


class _MarkerEscaper:
    """Escapes marker characters in messages by spare characters, and unescapes them.

    The last spare character replaces the "a" of roles that continue after "assistant".
    """

    def __init__(self, characters: str, spares: str) -> None:
        self._pairs = list(zip(characters, spares[: len(characters)], strict=True))
        self._role_spare = spares[len(characters)]

    def message(self, message: Message) -> dict[str, Any]:
        """Escapes the values of a message, not its keys, which the template reads."""
        escaped = {key: self.value(value) for key, value in message.items()}
        if _continues_the_word_assistant(message):
            escaped["role"] = self._role_spare + escaped["role"][1:]
        return escaped

    def value(self, value: Any) -> Any:
        """Escapes every string in a JSON-like value, including keys."""
        if isinstance(value, str):
            return self._string(value)

        if isinstance(value, Mapping):
            return {self.value(key): self.value(item) for key, item in value.items()}

        if isinstance(value, (list, tuple)):
            return [self.value(item) for item in value]

        if callable(getattr(value, "model_dump", None)):
            return self.value(value.model_dump())  # a pydantic record of an API client

        return value

    def unescape(self, escaped_render: str) -> str:
        for character, spare in [*self._pairs, ("a", self._role_spare)]:
            escaped_render = escaped_render.replace(spare, character)
        return escaped_render

    def _string(self, value: str) -> str:
        for character, spare in self._pairs:
            value = value.replace(character, spare)
        return value


def _continues_the_word_assistant(message: Message) -> bool:
    """True for a role like "assistant\\nx": rendered, it would look like the header of an assistant turn."""
    role = message.get("role")
    return isinstance(role, str) and role != "assistant" and role.startswith("assistant")


def _hold_any(characters: str, value: Any) -> bool:
    """True if a string in a JSON-like value has one of the characters, or the value has an unknown type."""
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, str):
            if any(map(part.__contains__, characters)):
                return True
        elif isinstance(part, Mapping):
            waiting += part.keys()
            waiting += part.values()
        elif isinstance(part, (list, tuple)):
            waiting += part
        elif not isinstance(part, (int, float, NoneType)):
            return True
    return False


def _spare_characters(text: str, count: int) -> Iterator[str]:
    """Yields strings of characters that the text does not contain: private-use ones first, then rare ASCII ones."""
    for candidates in (map(chr, _PRIVATE_USE), _RARE_ASCII):
        spares = "".join(islice((character for character in candidates if character not in text), count))
        if len(spares) == count:
            yield spares


def _holds_null(messages: Messages) -> bool:
    return any(value is None for message in messages for value in message.values())


def with_reasoning_content(message: Message) -> Message:
    """Returns an assistant's message with ``reasoning_content``, which some servers call ``reasoning``."""
    reasoning = message.get("reasoning")
    if message.get("role") != "assistant" or message.get("reasoning_content") or not isinstance(reasoning, str):
        return message
    return {**message, "reasoning_content": reasoning}


def _variants(messages: Messages) -> Iterator[Messages]:
    """Yields other forms of these messages that a template may accept, least changed first."""
    with_objects = [_with_argument_objects(message) for message in messages]
    with_text = [with_text_content(message) for message in messages]
    with_both = [with_text_content(message) for message in with_objects]
    known: list[Messages] = [list(messages)]
    for variant in (with_objects, with_text, with_both):
        if variant not in known:
            known.append(variant)
            yield variant


def _with_argument_objects(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not isinstance(calls, (list, tuple)):
        return message

    return {**message, "tool_calls": [_with_argument_object(call) for call in calls]}


def _with_argument_object(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call

    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_argument_object(call["function"])}

    arguments = call.get("arguments")
    if not isinstance(arguments, str):
        return call

    try:
        decoded = json.loads(arguments)
    except ValueError:
        return call
    return {**call, "arguments": decoded} if isinstance(decoded, dict) else call


def with_text_content(message: Message) -> Message:
    """Returns a message whose ``content`` is a text, if it is null or a list of texts."""
    content = [] if message.get("content") is None else message["content"]
    if not isinstance(content, (list, tuple)):
        return message

    texts = list(map(text_of_part, content))
    return message if None in texts else {**message, "content": "".join(filter(None, texts))}


def text_of_part(part: Any) -> str | None:
    """Returns the text of one part of a message; None for an image."""
    text = part.get("text") if isinstance(part, Mapping) else part
    return text if isinstance(text, str) else None


@dataclass(frozen=True, slots=True)
class MarkerDialect:
    """Templates in which every assistant turn begins with one header and ends with one marker, such as ChatML.

    ``prompts`` are the generation prompts of the template's modes, all of which begin with ``header``, longest first.
    """

    header: str
    prompts: tuple[str, ...]
    end_marker: str
    chunk_markers: tuple[str, ...]
    escaped_characters: str

    def assistant_turns(self, escaped_render: str, messages: Messages) -> list[RenderedTurn]:
        """Pairs the template's headers with the assistant messages, the only ones that are trained, in order."""
        indices = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
        headers = [match.start() for match in re.finditer(re.escape(self.header), escaped_render)]
        if len(headers) != len(indices):
            raise UndecidedError(f"the template wrote {len(headers)} turns for {len(indices)} assistant messages")

        limits = [*headers, len(escaped_render)][1:]  # the next header; empty without headers
        # A marker with an escaped character was written by the template, and begins the next message.
        openings = [marker for marker in self.chunk_markers if not set(self.escaped_characters).isdisjoint(marker)]
        return [
            self._turn(escaped_render, index, header, limit, openings)
            for index, header, limit in zip(indices, headers, limits, strict=True)
        ]

    def _turn(self, escaped_render: str, index: int, header: int, limit: int, openings: Sequence[str]) -> RenderedTurn:
        prompt = next(prompt for prompt in self.prompts if escaped_render.startswith(prompt, header))
        start = header + len(prompt)
        turn = escaped_render[start:limit]
        for opening in openings:
            turn = turn.partition(opening)[0]  # the next message has an end of its own
        length = turn.find(self.end_marker)
        if length < 0:
            raise UndecidedError(f"the template did not close the turn of message {index}")

        return RenderedTurn(index, start, start + length + len(self.end_marker), "</think>" in prompt)


@dataclass(frozen=True, slots=True)
class DeepSeekDialect:
    """Templates of DeepSeek-V3 and -R1 and its distillations: no header after tool results, calls without an end.

    System messages are moved to the front. An assistant message opens with ``<｜Assistant｜>``, or after tool results
    with ``<｜tool▁outputs▁end｜>``; tool calls after earlier tool calls have no opening. The message ends at its last
    end-of-turn marker or, if the template writes no marker, before the next message.
    """

    assistant: str
    user: str
    end_marker: str
    prompts: tuple[str, ...]
    chunk_markers: tuple[str, ...]
    escaped_characters: str = "｜"
    outputs_begin: str = "<｜tool▁outputs▁begin｜>"
    outputs_end: str = "<｜tool▁outputs▁end｜>"
    output_begin: str = "<｜tool▁output▁begin｜>"
    call_begin: str = "\n<｜tool▁call▁begin｜>"
    header: str | None = None

    def assistant_turns(self, escaped_render: str, messages: Messages) -> list[RenderedTurn]:
        """Locates the sampled text of each assistant message, message by message from the start of the text."""
        turns: list[RenderedTurn] = []
        cursor = 0
        written = [(index, message) for index, message in enumerate(messages) if self._is_written(message)]
        roles = [message.get("role") for _, message in written]
        for (index, message), next_role in zip(written, [*roles, None][1:], strict=True):
            opening_start, cursor = self._opening(escaped_render, message, cursor)
            if message.get("role") == "assistant":
                turn = self._turn(escaped_render, index, message, (opening_start, cursor), next_role)
                turns.append(turn)
                cursor = turn.end
        return turns

    @staticmethod
    def _is_written(message: Message) -> bool:
        """True if the template writes the message in its place, which it does not for a system message."""
        role = message.get("role")
        if role == "assistant":
            return message.get("content") is not None or bool(message.get("tool_calls"))

        return role in ("user", "tool")

    def _openings(self, role: Any) -> tuple[str, ...]:
        if role == "assistant":
            return (self.assistant, self.outputs_end, self.call_begin)

        return (self.user,) if role == "user" else (self.outputs_begin, "\n" + self.output_begin, self.output_begin)

    def _opening(self, escaped_render: str, message: Message, cursor: int) -> tuple[int, int]:
        """Returns where the message's opening marker begins and ends."""
        openings = self._openings(message.get("role"))
        begin, marker = _first_of(escaped_render, openings, cursor)
        if marker is None:
            raise UndecidedError(f"the template did not open a {message.get('role')} message")

        if marker == self.outputs_begin:  # it opens a list of outputs, of which this message is the first
            begin = escaped_render.find(self.output_begin, begin)
            marker = self.output_begin
        return begin, begin + len(marker)

    def _turn(
        self, escaped_render: str, index: int, message: Message, opening_range: tuple[int, int], next_role: Any
    ) -> RenderedTurn:
        """``opening_range`` is where the opening marker of the message begins and ends."""
        opening_start, opening_end = opening_range
        prompt = next((prompt for prompt in self.prompts if escaped_render.startswith(prompt, opening_start)), "")
        start = opening_start + len(prompt) if prompt else opening_end
        if escaped_render.startswith(self.call_begin, opening_start):
            start = opening_start  # the template wrote no header: the call itself is the turn
        limit = self._limit(escaped_render, index, max(opening_end, start), message, next_role)
        end = escaped_render.rfind(self.end_marker, start, limit)
        return RenderedTurn(index, start, limit if end < 0 else end + len(self.end_marker), "</think>" in prompt)

    def _limit(self, escaped_render: str, index: int, start: int, message: Message, next_role: Any) -> int:
        """Returns where the next message begins: the turn ends before it."""
        if next_role is None:
            return len(escaped_render)

        if message.get("content") is None:
            for _ in (message.get("tool_calls") or [])[1:]:  # each further call looks like a turn of its own
                start = max(start, escaped_render.find(self.call_begin, start + 1))
        limit, marker = _first_of(escaped_render, self._openings(next_role), start + 1)
        if marker is None:
            raise UndecidedError(f"the template did not open the message after message {index}")

        return limit


def _first_of(text: str, markers: Sequence[str], start: int) -> tuple[int, str | None]:
    """Returns the first of the markers from ``start`` on and its position; (-1, None) if the text has none."""
    positions = [(text.find(marker, start), marker) for marker in markers]
    return min((pair for pair in positions if pair[0] >= 0), key=lambda pair: pair[0], default=(-1, None))


def discover_dialect(template: ChatTemplate, added_tokens: Sequence[str]) -> Dialect:
    """Determines a template's turn markers from three probe conversations.

    Raises:
        ValueError: the template begins or ends assistant turns without a marker.
    """
    question, answer, follow_up = _PROBE
    messages = [_message("user", question), _message("assistant", answer), _message("user", follow_up)]
    one_message, two_messages, three_messages = (template.text(messages[:count]) for count in (1, 2, 3))
    user_close = _after(one_message, question)
    header = _between(three_messages, question, answer).removeprefix(user_close)
    close = _between(three_messages, answer, follow_up)
    last_close = _after(two_messages, answer)
    ends = {_leading_token(text, added_tokens) for text in (last_close, close)} - {None}
    # Two end tokens may begin with the same characters, which are no marker.
    shared_close = _common_prefix(last_close, close) if len(ends) < 2 else ""
    user_header = close.removeprefix(shared_close)
    end_marker = _leading_token(shared_close, added_tokens) or shared_close.rstrip()
    # A marker that opens user messages does not end a turn: a tool's message, opened otherwise, would be part of it.
    opens_user_message = not user_header.strip() and one_message.partition(question)[0].endswith(
        end_marker + user_header
    )
    if not header.strip() or not end_marker or opens_user_message:
        raise ValueError(
            "this chat template has no assistant header, or no end-of-turn marker of its own, that could be found: "
            "add a custom type with register_loss_mask_type"
        )

    return _dialect(template, added_tokens, header, user_header, end_marker)


def _dialect(
    template: ChatTemplate, added_tokens: Sequence[str], header: str, user_header: str, end_marker: str
) -> Dialect:
    prompts = [prompt for prompt in _generation_prompts(template) if prompt]
    opening_tokens = [_leading_token(text, added_tokens) for text in (header, user_header)]
    chunk_markers = tuple(dict.fromkeys(token for token in opening_tokens if token))
    if "<｜Assistant｜>" in header:
        ranked = tuple(sorted({*prompts, "<｜Assistant｜>"}, key=len, reverse=True))
        return DeepSeekDialect("<｜Assistant｜>", user_header, end_marker, ranked, chunk_markers)

    opening = _leading_token(header, added_tokens) or header[:1]
    prompts = [prompt for prompt in prompts if prompt.startswith(opening)]
    shared = reduce(_common_prefix, prompts, header)
    header_line = shared[: shared.index("\n") + 1] if "\n" in shared else shared
    ranked = tuple(sorted({*prompts, shared, header_line}, key=len, reverse=True))
    characters = "".join(dict.fromkeys(_character_to_escape(marker) for marker in (header_line, end_marker)))
    return MarkerDialect(header_line, ranked, end_marker, chunk_markers, characters)


def _generation_prompts(template: ChatTemplate) -> list[str]:
    """Returns the generation prompts of the template, in each of its modes."""
    question, answer, _ = _PROBE
    call = {"type": "function", "id": "call_0", "function": {"name": "probe", "arguments": {}}}
    conversations = (
        [_message("user", question)],
        [_message("user", question), {**_message("assistant", answer), "tool_calls": [call]}, _message("tool", answer)],
    )
    prompts: list[str] = []
    for conversation in conversations:
        for switches in THINKING_SWITCHES:
            try:
                without = template.text(conversation, switches=switches)
                with_prompt = template.text(conversation, generation_prompt=True, switches=switches)
            except Exception:  # noqa: BLE001 - not every template knows tools or every switch
                continue
            if with_prompt.startswith(without):
                prompts.append(with_prompt[len(without) :])
    return list(dict.fromkeys(prompts))


@dataclass(frozen=True, slots=True)
class VisionTokens:
    """The tokens that a template writes for an image or a video, and the placeholders that a processor repeats."""

    written: frozenset[str] = frozenset()
    placeholders: frozenset[str] = frozenset()


def discover_vision_tokens(template: ChatTemplate, added_tokens: Sequence[str]) -> VisionTokens:
    """Determines the tokens for images and videos by probes; empty for a text template."""
    written: set[str] = set()
    placeholders: set[str] = set()
    text_part = {"type": "text", "text": _PROBE[0]}
    for part in (
        {"type": "image", "image": "probe"},
        {"type": "image_url", "image_url": {"url": "probe"}},
        {"type": "video", "video": "probe"},
    ):
        try:
            without = template.text([{"role": "user", "content": [text_part]}])
            with_part = template.text([{"role": "user", "content": [part, text_part]}])
        except Exception:  # noqa: BLE001 - a template for text only refuses the probe in its own way
            continue
        tokens = [token for token in added_tokens if token in with_part and token not in without]
        tokens.sort(key=with_part.index)
        written.update(tokens)
        # The first and the last of several tokens mark the beginning and the end of an image.
        placeholders.update(tokens[1:-1] if len(tokens) > 2 else tokens)
    return VisionTokens(frozenset(written), frozenset(placeholders))


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _common_prefix(left: str, right: str) -> str:
    return left[: common_prefix_length(left, right)]


def _after(text: str, sentinel: str) -> str:
    return text[text.rindex(sentinel) + len(sentinel) :]


def _between(text: str, before: str, after: str) -> str:
    start = text.index(before) + len(before)
    return text[start : text.index(after, start)]


def _leading_token(text: str, added_tokens: Sequence[str]) -> str | None:
    return max((token for token in added_tokens if token and text.startswith(token)), key=len, default=None)


def _character_to_escape(marker: str) -> str:
    """Returns the character of the marker that is escaped in messages, preferably a rare one."""
    for wanted in ("｜", "|", "▁"):
        if wanted in marker:
            return wanted

    unusual = [character for character in marker if not character.isalnum() and character not in "<>/ \n"]
    return (unusual or [character for character in marker if not character.isspace()])[0]
