"""Rebuilds the prompt and output text of each turn from the messages of a conversation.

Part of ``slime.utils.mask_utils``, which is the name to import from. Standard library only.

A prompt is the template's render of the messages before a turn. The output is the message's text, with
``reasoning_content`` in front, tool calls in the template's format, and the end of turn unless the turn was truncated.
A template that drops or rewrites earlier reasoning therefore changes prompts only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

from slime.utils.mask_template import (
    THINKING_SWITCHES,
    ChatTemplate,
    Dialect,
    Message,
    Messages,
    Rendering,
    Tools,
    Undecided,
    UndecidedReason,
    Writer,
    text_of_part,
    with_text_content,
)

THINK, THINK_END = "<think>", "</think>"
_QUESTION = "probe-question"
_THOUGHT = "probe-thought"
_ANSWER = "probe-answer"


@dataclass(frozen=True, slots=True)
class WrittenTurn:
    """One turn as text: prompt and output. ``undecided`` lists parts that cannot be determined."""

    message_index: int
    prompt: str
    output: str
    undecided: tuple[Undecided, ...] = ()


@dataclass(frozen=True, slots=True)
class _PromptMode:
    """The generation prompt (``suffix``) of the template under some switches."""

    switches: Mapping[str, bool]
    suffix: str

    @property
    def is_closed(self) -> bool:
        """True if the generation prompt contains a closed thinking block."""
        return THINK_END in self.suffix

    @property
    def opening(self) -> str:
        """The thinking block that the prompt opens: ``<think>`` with its line break, or nothing."""
        return THINK + self.suffix.rpartition(THINK)[2] if self.suffix.rstrip().endswith(THINK) else ""

    @property
    def closed_block(self) -> str:
        """The closed thinking block at the end of the prompt, or nothing."""
        return THINK + self.suffix.rpartition(THINK)[2] if self.is_closed and THINK in self.suffix else ""


class _Thinking(Enum):
    """Whether a message shows that its turn was sampled with thinking."""

    SHOWN = 1  # the message has reasoning, or markers of reasoning
    ABSENT = 2  # the message is complete and has no reasoning
    UNKNOWN = 3  # the message was truncated: its text may be reasoning or an answer


class ConversationReader:
    """Reads turns from conversations with one chat template, whose behaviour is determined by probes."""

    def __init__(self, template: ChatTemplate, dialect: Dialect) -> None:
        self._template = template
        self._dialect = dialect

    def turns(self, messages: Messages, tools: Tools = None, *, cut: bool = False) -> list[WrittenTurn]:
        """Returns the turns of all assistant messages; ``cut``: the last message was truncated.

        A message with ``finish_reason: length`` was truncated as well. Errors of the template are not translated.
        """
        return _Conversation(self, self._template, self._dialect, messages, tools, cut).turns()

    @cached_property
    def thinking(self) -> _PromptMode:
        """The generation prompt of a turn with thinking: the first one that does not close the thinking block."""
        return next((mode for mode in self._modes if not mode.is_closed), self._modes[0])

    @cached_property
    def answering(self) -> _PromptMode:
        """The generation prompt of a turn without thinking; equal to ``thinking`` if the template has only one."""
        return next((mode for mode in self._modes if mode.is_closed), self.thinking)

    @cached_property
    def takes_reasoning_out(self) -> bool:
        """True if the template removes the reasoning from the text of an earlier reply."""
        reasoned = f"{THINK}\n{_THOUGHT}\n{THINK_END}\n\n{_ANSWER}"
        return reasoned not in self._probe(_user(), _assistant(reasoned), _user())

    @cached_property
    def writes_reasoning(self) -> bool:
        """True if the last turn is rendered with its reasoning."""
        return _THOUGHT in self._probe(_user(), _assistant(f"{THINK}\n{_THOUGHT}\n{THINK_END}\n\n{_ANSWER}"))

    @cached_property
    def reads_lists(self) -> bool:
        """True if the template renders content that is a list of text parts."""
        try:
            return _ANSWER in self._probe({"role": "user", "content": [{"type": "text", "text": _ANSWER}]})
        except Exception:  # noqa: BLE001 - a template that raises does not support lists
            return False

    @cached_property
    def _modes(self) -> list[_PromptMode]:
        modes = []
        for switches in THINKING_SWITCHES:
            try:
                without = self._template.text([_user()], switches=switches)
                with_prompt = self._template.text([_user()], generation_prompt=True, switches=switches)
            except Exception:  # a template may refuse a switch, but not the plain prompt
                if not switches:
                    raise
                continue
            is_appended = with_prompt.startswith(without)
            modes.append(_PromptMode(switches, with_prompt[len(without) :] if is_appended else ""))
        return modes

    def with_calls(self, text: str, message: Message) -> str:
        """Returns a text followed by the tool calls of its message in the template's format."""
        is_reasoning_alone = self.takes_reasoning_out and not text.rpartition(THINK_END)[2].strip("\n")
        answer = "" if is_reasoning_alone else text
        # A short answer with the same white space at its end stands for the text.
        probe = _ANSWER + answer[len(answer.rstrip()) :] if answer else ""
        rendering = self._template.render(
            self._dialect, [_user(), {**_assistant(probe), "tool_calls": message["tool_calls"]}]
        )
        if not rendering.turns:
            return text
        turn = rendering.turns[-1]
        body = rendering.text[turn.start : turn.end].removesuffix(self._dialect.end_marker)
        return _joined(text, body.partition(_ANSWER)[2]) if answer else text + body.removeprefix(self._empty_answer)

    @cached_property
    def _empty_answer(self) -> str:
        """The template's render of a reply without text: for some the end of a thinking block."""
        rendering = self._template.render(self._dialect, [_user(), _assistant("")])
        if not rendering.turns:
            return ""
        turn = rendering.turns[-1]
        return rendering.text[turn.start : turn.end].removesuffix(self._dialect.end_marker)

    def _probe(self, *messages: Message) -> str:
        return self._template.text(messages)


class _Conversation:
    """One conversation, in a form that the template accepts."""

    def __init__(
        self,
        reader: ConversationReader,
        template: ChatTemplate,
        dialect: Dialect,
        messages: Messages,
        tools: Tools,
        cut: bool,
    ) -> None:
        self._reader = reader
        self._template = template
        self._dialect = dialect
        if not reader.reads_lists:  # null is not changed: templates may render it otherwise than an empty text
            messages = [msg if msg.get("content") is None else with_text_content(msg) for msg in messages]
        self._write: Writer
        self._write, self._messages, _ = template.render_accepted_form(messages, tools)
        self._tools = tools
        indices = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
        self._assistant_indices = indices
        self._cut = {index for index in indices if messages[index].get("finish_reason") == "length"}
        if cut and indices and indices[-1] == len(messages) - 1:
            self._cut.add(indices[-1])
        self._thinking = {index: self._thinking_of(index) for index in indices}

    def turns(self) -> list[WrittenTurn]:
        return [self._turn(index) for index in self._assistant_indices]

    def _turn(self, index: int) -> WrittenTurn:
        mode = self._mode(index)
        prompt = self._prompt(index, mode)
        text, undecided = self._text_of_output(index, mode)
        opening = mode.opening if prompt.endswith(mode.opening) and not _reasoning_of(self._messages[index]) else ""
        if opening and text.startswith(opening):
            if self._reader.writes_reasoning:
                text = text.removeprefix(opening)  # the prompt ends with the marker already
            else:
                prompt = prompt.removesuffix(opening)  # a distilled DeepSeek: slime trains the message's marker, too
        end = "" if index in self._cut else self._dialect.end_marker
        # Calls alone are a part of the template's render, which has the end marker already.
        output = text if end and text.endswith(end) and self._is_calls_alone(index) else text + end
        return WrittenTurn(index, prompt, output, tuple(undecided))

    # --- prompts -----------------------------------------------------------------------------------------------------

    def _mode(self, index: int) -> _PromptMode:
        thinking, answering = self._reader.thinking, self._reader.answering
        match self._thinking[index]:
            case _Thinking.SHOWN:
                return thinking
            case _Thinking.ABSENT:
                return answering
        if not thinking.opening:
            return answering  # the prompt opens no thinking block, so that reasoning would begin with the marker
        # A truncated reply is taken for an answer if the conversation has answers and no reasoning.
        of_conversation = set(self._thinking.values())
        has_only_answers = _Thinking.ABSENT in of_conversation and _Thinking.SHOWN not in of_conversation
        return answering if has_only_answers else thinking

    def _thinking_of(self, index: int) -> _Thinking:
        message = self._messages[index]
        text = _text_of(message)
        block = self._reader.answering.closed_block
        if _reasoning_of(message):
            return _Thinking.SHOWN
        if self._reader.thinking.opening and block and text.startswith(block):
            return _Thinking.ABSENT
        if THINK_END in text or text.lstrip().startswith(THINK):
            return _Thinking.SHOWN
        return _Thinking.UNKNOWN if index in self._cut else _Thinking.ABSENT

    def _prompt(self, index: int, mode: _PromptMode) -> str:
        if mode.suffix:
            try:
                return self._write(
                    self._messages[:index], self._tools, generation_prompt=True, switches=dict(mode.switches)
                )
            except Exception:  # noqa: BLE001 - a template may refuse a conversation without its question
                pass
        rendering, turn = self._located(index)
        return rendering.text[: turn.start]

    def _located(self, index: int) -> tuple[Rendering, Any]:
        rendering = self._template.render(self._dialect, self._messages[: index + 1], self._tools)
        if not rendering.turns or rendering.turns[-1].message_index != index:
            raise ValueError(f"message {index} cannot be located in its render: {rendering.problem}")
        return rendering, rendering.turns[-1]

    # --- outputs -----------------------------------------------------------------------------------------------------

    def _text_of_output(self, index: int, mode: _PromptMode) -> tuple[str, list[Undecided]]:
        message = self._messages[index]
        if self._is_calls_alone(index):
            rendering, turn = self._located(index)
            return rendering.text[turn.start : turn.end], []
        text = _text_of(message)
        undecided: list[Undecided] = []
        if mode.is_closed:
            undecided.append(Undecided(UndecidedReason.EMPTY_THINKING, index))
            # Where prompts write the thinking block, the block before this text is the prompt's.
            text = text.removeprefix(mode.closed_block) if self._reader.thinking.opening else text
        if message.get("tool_calls"):
            without_calls, text = text, self._reader.with_calls(text, message)
            if text.rstrip() == without_calls.rstrip():
                undecided.append(Undecided(UndecidedReason.DROPPED_CALLS, index))
        return _with_reasoning(_reasoning_of(message), text, mode, cut=index in self._cut), undecided

    def _is_calls_alone(self, index: int) -> bool:
        """True for calls without text, in a template that renders them differently from calls with text."""
        message = self._messages[index]
        return self._dialect.header is None and message.get("content") is None and bool(message.get("tool_calls"))


def _joined(text: str, rest: str) -> str:
    """Joins a text and the template's text after it, without doubling white space between them."""
    space = text[len(text.rstrip()) :]
    if rest.startswith(space):
        return text + rest[len(space) :]
    if space.strip("\n"):
        return text + rest
    breaks_of_rest = len(rest) - len(rest.lstrip("\n"))
    return text + rest[min(len(space), breaks_of_rest) :]


def _with_reasoning(reasoning: str, rest: str, mode: _PromptMode, *, cut: bool) -> str:
    """Puts ``reasoning_content`` in front of the text, as a model writes it."""
    if not reasoning:
        return rest
    lead = "" if reasoning.startswith("\n") else "\n"
    opened = reasoning if mode.opening else THINK + lead + reasoning
    if cut and not rest:
        return opened
    close = ("" if reasoning.endswith("\n") else "\n") + THINK_END
    return opened + close + ("" if rest.startswith("\n") else "\n\n") + rest


def _reasoning_of(message: Message) -> str:
    reasoning = message.get("reasoning_content")
    return reasoning if isinstance(reasoning, str) and reasoning.strip() else ""


def _text_of(message: Message) -> str:
    """Returns the text of a message, with the parts of a list joined."""
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        return "".join(filter(None, map(text_of_part, content)))
    if content is not None and not isinstance(content, str):
        raise ValueError(f"the content of a message is {type(content).__name__} and no text")
    return content or ""


def _user() -> Message:
    return {"role": "user", "content": _QUESTION}


def _assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}
