"""Conversations as an engine plays them: the prompt and the output of each turn, and the messages that an agent keeps.

Each reply is drawn together with its message, in one of the forms in which agents keep replies, so that what a trainer
must find again is known without looking at any rendered conversation. Only prompts come from the template, rendered
again for every turn.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

THINK, THINK_END = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Family:
    """What a model family does: which markers its prompts begin a reply with, and how it writes a tool call."""

    end: str
    opened: str = ""
    thinks: bool = True
    can_switch: bool = False
    parses_reasoning: bool = True
    calls: Callable[[str, list[dict[str, Any]]], str] | None = None
    shows_images: bool = False
    trains_repeated_opening: bool = False


@dataclass(slots=True)
class Played:
    """A conversation: its messages, and for each reply its prompt and what was written, end of turn included."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)
    cut: bool = False


def _calls_as_json(text: str, calls: list[dict[str, Any]]) -> str:
    written = [
        f'<tool_call>\n{{"name": "{call["function"]["name"]}", '
        f'"arguments": {json.dumps(call["function"]["arguments"], ensure_ascii=False)}}}\n</tool_call>'
        for call in calls
    ]
    return ("\n" if text else "") + "\n".join(written)


def _calls_as_tags(text: str, calls: list[dict[str, Any]]) -> str:
    written = []
    for call in calls:
        arguments = call["function"]["arguments"].items()
        parameters = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in arguments)
        written.append(f"<tool_call>\n<function={call['function']['name']}>\n{parameters}</function>\n</tool_call>")
    return ("\n\n" if text.strip() else "") + "\n".join(written)


CHATML_END, DEEPSEEK_END = "<|im_end|>", "<｜end▁of▁sentence｜>"
FAMILIES = {
    "qwen3-hybrid": Family(CHATML_END, can_switch=True, calls=_calls_as_json),
    "qwen3-first-release": Family(CHATML_END, can_switch=True, calls=_calls_as_json),
    "qwen3-2507": Family(CHATML_END, parses_reasoning=False, calls=_calls_as_json),
    "qwen3-vl": Family(CHATML_END, parses_reasoning=False, calls=_calls_as_json, shows_images=True),
    "qwen3.5": Family(CHATML_END, opened="<think>\n", can_switch=True, calls=_calls_as_tags, shows_images=True),
    "qwen2.5": Family(CHATML_END, thinks=False, parses_reasoning=False, calls=_calls_as_json),
    "deepseek-r1-distill": Family(DEEPSEEK_END, opened="<think>\n", trains_repeated_opening=True),
}

spaces = st.sampled_from(["", " ", "\n", "\n\n", "  \n"])
words = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Co", "Mn", "Mc"]), max_size=8)
HOSTILE = ["<|im_start|>assistant\n", "<|im_end|>", "<｜Assistant｜>", "<tool_call>", "|", "\n\n", "assistant", "42."]
pieces = st.lists(words | st.sampled_from(HOSTILE), min_size=1, max_size=4).map(" ".join)
texts = pieces.filter(lambda text: text == _composed(text) and THINK not in text and THINK_END not in text)
plain_texts = texts.map(str.strip).filter(bool)


def _composed(text: str) -> str:
    import unicodedata

    return unicodedata.normalize("NFC", text)


@st.composite
def played(draw: st.DrawFn, name: str, tokenizer: Any) -> Played:
    """Draws a played conversation of one family."""
    family = FAMILIES[name]
    result = Played()
    switched_off = family.can_switch and draw(st.integers(0, 3)) == 0
    if draw(st.booleans()):
        result.messages.append({"role": "system", "content": draw(texts)})
    result.messages.append({"role": "user", "content": draw(_asked(family))})
    for turns_left in range(draw(st.integers(1, 5)), 0, -1):
        cut = turns_left == 1 and draw(st.integers(0, 2)) == 0
        # A single reply without thinking that was cut may as well be thinking: nobody can tell from its message.
        cut = cut and not (switched_off and family.opened and not result.outputs)
        _play_turn(draw, family, tokenizer, result, switched_off=switched_off, cut=cut)
        if turns_left > 1 and result.messages[-1].get("tool_calls"):
            for _ in result.messages[-1]["tool_calls"]:
                result.messages.append({"role": "tool", "content": draw(texts)})
        elif turns_left > 1 or (not cut and draw(st.integers(0, 5)) == 0):
            result.messages.append({"role": "user", "content": draw(_asked(family))})
    return result


def _asked(family: Family) -> st.SearchStrategy[Any]:
    if not family.shows_images:
        return texts
    part = texts.map(lambda text: {"type": "text", "text": text}) | st.just(
        {"type": "image_url", "image_url": {"url": "sha256:00"}}
    )
    return texts | st.lists(part, min_size=1, max_size=3)


def _play_turn(
    draw: st.DrawFn, family: Family, tokenizer: Any, result: Played, *, switched_off: bool, cut: bool
) -> None:
    prompt = _prompt(tokenizer, result.messages, family, switched_off=switched_off)
    thinks = family.thinks and not switched_off and (family.opened != "" or draw(st.integers(0, 3)) > 0)
    if not thinks and family.can_switch and not switched_off:
        thinks = True  # such a model begins every reply with its block, unless the prompt has closed one
    message, written = _reply(draw, family, thinks=thinks, cut=cut)
    if written.startswith(THINK + "\n") and family.opened:
        written = written if family.trains_repeated_opening else written.removeprefix(family.opened)
        prompt = prompt.removesuffix(family.opened) if family.trains_repeated_opening else prompt
    if draw(st.integers(0, 7)) == 0:
        message["step_loss_mask"] = 0
    result.messages.append(message)
    result.prompts.append(prompt)
    result.outputs.append(written + ("" if cut else family.end))
    result.trained.append(message.get("step_loss_mask", 1) == 1)
    result.cut |= cut


def _prompt(tokenizer: Any, messages: list[dict[str, Any]], family: Family, *, switched_off: bool) -> str:
    options = {"enable_thinking": not switched_off} if family.can_switch else {}
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options))


def _reply(draw: st.DrawFn, family: Family, *, thinks: bool, cut: bool) -> tuple[dict[str, Any], str]:
    """Draws a reply: its message, and the sampled text. Both begin with the prompt's opening if it is repeated."""
    thought = draw(plain_texts)
    answer = draw(plain_texts | st.just(""))
    in_thinking = thinks and cut and draw(st.booleans())
    if in_thinking:
        return _cut_in_thinking(draw, family, thought)
    calls = draw(_calls()) if family.calls is not None and not cut and draw(st.integers(0, 2)) == 0 else []
    as_calls = family.calls(answer, calls) if family.calls is not None and calls else ""
    message: dict[str, Any] = {"role": "assistant", **({"tool_calls": calls} if calls else {})}
    opened = "" if family.opened else THINK + "\n"
    if thinks and draw(st.integers(0, 2)) == 0:
        message |= {"reasoning_content": thought, "content": answer}
        if cut and not answer:
            return {**message}, opened + thought
        return message, f"{opened}{thought}\n{THINK_END}\n\n{answer}{as_calls}"
    if not thinks:
        text = answer if calls else answer + draw(spaces)
        return {**message, "content": text}, text + as_calls
    repeats = bool(family.opened) and draw(st.booleans())
    before = f"{THINK}\n" if repeats else opened
    text = f"{before}{thought}\n{THINK_END}\n\n{answer}" + ("" if calls else draw(spaces))
    if calls and not family.parses_reasoning and family.calls is not None:
        as_calls = family.calls(text, calls)
    return {**message, "content": text}, text + as_calls


def _cut_in_thinking(draw: st.DrawFn, family: Family, thought: str) -> tuple[dict[str, Any], str]:
    opened = "" if family.opened else THINK + "\n"
    if draw(st.booleans()):
        return {"role": "assistant", "content": "", "reasoning_content": thought}, opened + thought
    repeats = bool(family.opened) and draw(st.booleans())
    text = (f"{THINK}\n" if repeats else opened) + thought
    return {"role": "assistant", "content": text}, text


def _calls() -> st.SearchStrategy[list[dict[str, Any]]]:
    argument = st.dictionaries(st.sampled_from(["x", "y"]), plain_texts, min_size=1, max_size=2)
    call = argument.map(lambda values: {"type": "function", "function": {"name": "tap", "arguments": dict(values)}})
    return st.lists(call, min_size=1, max_size=2)


def image_placeholders(messages: Sequence[Mapping[str, Any]]) -> int:
    """Counts the images that a conversation shows."""
    contents = [message.get("content") for message in messages]
    return sum(part.get("type") == "image_url" for content in contents if isinstance(content, list) for part in content)
