"""The expected masks: conversations written in pieces, each of which is known to be sampled or not.

The pieces joined must equal the tokenizer's own render byte by byte; only then do they judge a mask. Nothing here looks
for markers in text, and nothing comes from the code under test.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

Message = Mapping[str, Any]
PROBE = "where the messages begin"
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of the render; ``turn`` is the index of the assistant message that sampled it, or None."""

    text: str
    turn: int | None = None


@dataclass(frozen=True, slots=True)
class Expected:
    """Ids, and for each token 1, 0, or None where it lies across the edge of a sampled stretch (and must be 0)."""

    token_ids: list[int]
    loss_mask: list[int | None]
    pieces: list[Piece]


def expected(tokenizer: Any, oracle: str, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> Expected:
    """Gives the right answer for one conversation, after checking the pieces against the tokenizer's own render."""
    pieces = WRITERS[oracle](messages, _opening(tokenizer, oracle, messages, tools))
    text = "".join(piece.text for piece in pieces)
    assert text == _render(tokenizer, messages, tools), "the oracle itself is wrong"
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    sampled = _sampled_characters(pieces, messages)
    mask = [_value(sampled, start, end) for start, end in encoding["offset_mapping"]]
    return Expected(list(encoding["input_ids"]), mask, pieces)


def sampled_text(pieces: Sequence[Piece], turn: int) -> str:
    return "".join(piece.text for piece in pieces if piece.turn == turn)


def _render(tokenizer: Any, messages: Sequence[Message], tools: Sequence[Any] | None) -> str:
    if all(value is not None for message in messages for value in message.values()):
        return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))

    # transformers 5 takes null fields out of messages; DeepSeek's templates need to see them.
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(tokenizer.chat_template)
    return template.render(messages=messages, add_generation_prompt=False, **tokenizer.special_tokens_map)


def _opening(tokenizer: Any, oracle: str, messages: Sequence[Message], tools: Sequence[Any] | None) -> str:
    """Gives everything before the first message that is not the opening system message: none of it is sampled."""
    if oracle.startswith("deepseek"):
        return str(tokenizer.bos_token)

    head = [message for message in messages[:1] if message["role"] == "system"]
    text = tokenizer.apply_chat_template([*head, {"role": "user", "content": PROBE}], tools=tools, tokenize=False)
    return str(text[: text.rindex(f"<|im_start|>user\n{PROBE}")])


def _sampled_characters(pieces: Sequence[Piece], messages: Sequence[Message]) -> list[int | None]:
    """Gives, for each character, the trained assistant message that sampled it."""
    sampled: list[int | None] = []
    for piece in pieces:
        is_trained = piece.turn is not None and messages[piece.turn].get("step_loss_mask", 1) == 1
        sampled += [piece.turn if is_trained else None] * len(piece.text)
    return sampled


def _value(sampled: Sequence[int | None], start: int, end: int) -> int | None:
    turns = set(sampled[start:end])
    return None if len(turns) > 1 else int(turns != {None})


def _chatml(messages: Sequence[Message], opening: str, turn: Callable[[int], list[Piece]]) -> list[Piece]:
    """Writes the parts that all ChatML templates have in common; ``turn`` writes an assistant message."""
    pieces = [Piece(opening)]
    for index, message in enumerate(messages):
        role = message["role"]
        if role == "assistant":
            pieces += turn(index)
        elif role == "tool":
            first = index == 0 or messages[index - 1]["role"] != "tool"
            last = index + 1 == len(messages) or messages[index + 1]["role"] != "tool"
            text = f"\n<tool_response>\n{_text(message)}\n</tool_response>"
            pieces.append(Piece(("<|im_start|>user" if first else "") + text + ("<|im_end|>\n" if last else "")))
        elif role == "user" or index > 0:
            pieces.append(Piece(f"<|im_start|>{role}\n{_text(message)}<|im_end|>\n"))
    return pieces


def _turn(index: int, prompt: str, body: str) -> list[Piece]:
    return [Piece(prompt), Piece(body + "<|im_end|>", index), Piece("\n")]


def _text(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part.get("text", IMAGE) for part in content)

    return content or ""


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _call(call: Any, *, quote_text: bool) -> str:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    written = arguments if isinstance(arguments, str) and not quote_text else _json(arguments)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {written}}}\n</tool_call>'


def _calls_after(text: str, message: Message) -> str:
    calls = [_call(call, quote_text=False) for call in message.get("tool_calls") or []]
    return ("\n" if text and calls else "") + "\n".join(calls)


def _write_qwen2_5(messages: Sequence[Message], opening: str) -> list[Piece]:
    def turn(index: int) -> list[Piece]:
        content = messages[index].get("content") or ""
        calls = [_call(call, quote_text=True) for call in messages[index].get("tool_calls") or []]
        parts = [content, *calls] if content or not calls else calls
        return _turn(index, "<|im_start|>assistant\n", "\n".join(parts))

    return _chatml(messages, opening, turn)


def _write_plain(messages: Sequence[Message], opening: str) -> list[Piece]:
    def turn(index: int) -> list[Piece]:
        text = _text(messages[index])
        return _turn(index, "<|im_start|>assistant\n", text + _calls_after(text, messages[index]))

    return _chatml(messages, opening, turn)


def _write_qwen2_5_vl(messages: Sequence[Message], opening: str) -> list[Piece]:
    pieces = [Piece(opening)]
    for index, message in enumerate(messages):
        header = f"<|im_start|>{message['role']}\n"
        if message["role"] == "assistant":
            pieces += _turn(index, header, _text(message))
        elif index > 0 or message["role"] != "system":
            pieces.append(Piece(f"{header}{_text(message)}<|im_end|>\n"))
    return pieces


def _split_reasoning(message: Message, text: str) -> tuple[str, str]:
    if isinstance(message.get("reasoning_content"), str):
        return message["reasoning_content"], text

    if "</think>" not in text:
        return "", text

    before, after = text.split("</think>")[0], text.split("</think>")[-1]
    return before.rstrip("\n").split("<think>")[-1].lstrip("\n"), after.lstrip("\n")


def _last_question(messages: Sequence[Message], *, trim: bool) -> int:
    def is_question(message: Message) -> bool:
        text = _text(message).strip() if trim else _text(message)
        return message["role"] == "user" and not (
            text.startswith("<tool_response>") and text.endswith("</tool_response>")
        )

    questions = (index for index, message in enumerate(messages) if is_question(message))
    return max(questions, default=len(messages) - 1)


def _write_hybrid(messages: Sequence[Message], opening: str) -> list[Piece]:
    question = _last_question(messages, trim=False)

    def turn(index: int) -> list[Piece]:
        reasoning, text = _split_reasoning(messages[index], _text(messages[index]))
        calls = _calls_after(text, messages[index])
        if index > question and (index == len(messages) - 1 or reasoning):
            thought = reasoning.strip("\n")
            if thought:
                body = f"<think>\n{thought}\n</think>\n\n{text.lstrip(chr(10))}{calls}"
                return _turn(index, "<|im_start|>assistant\n", body)
            # An empty block is what the prompt with thinking switched off ends in.
            return _turn(index, "<|im_start|>assistant\n<think>\n\n</think>\n\n", text.lstrip("\n") + calls)
        empty = "<think>\n\n</think>\n\n" if text.startswith("<think>\n\n</think>\n\n") else ""
        return _turn(index, f"<|im_start|>assistant\n{empty}", text.removeprefix(empty) + calls)

    return _chatml(messages, opening, turn)


def _tagged_call(call: Any) -> str:
    def write(value: Any) -> str:
        return _json(value) if isinstance(value, (dict, list)) else str(value)

    parameters = "".join(
        f"<parameter={name}>\n{write(value)}\n</parameter>\n" for name, value in call["function"]["arguments"].items()
    )
    return f"<tool_call>\n<function={call['function']['name']}>\n{parameters}</function>\n</tool_call>"


def _write_thinking(messages: Sequence[Message], opening: str) -> list[Piece]:
    trimmed = [{**message, "content": _text(message).strip()} for message in messages]
    question = _last_question(trimmed, trim=True)

    def turn(index: int) -> list[Piece]:
        reasoning, text = _split_reasoning(trimmed[index], trimmed[index]["content"])
        calls = [_tagged_call(call) for call in trimmed[index].get("tool_calls") or []]
        body = text + ("\n\n" if calls and text.strip() else "") + "\n".join(calls)
        thought = reasoning.strip()
        if index <= question:
            # The text itself may begin with what a prompt ends in.
            ends_of_prompts = ("<think>\n\n</think>\n\n", "<think>\n")
            prompt = next((end for end in ends_of_prompts if body.startswith(end)), "")
            return _turn(index, f"<|im_start|>assistant\n{prompt}", body.removeprefix(prompt))

        if thought:
            return _turn(index, "<|im_start|>assistant\n<think>\n", f"{thought}\n</think>\n\n{body}")

        return _turn(index, "<|im_start|>assistant\n<think>\n\n</think>\n\n", body)

    return _chatml(trimmed, opening, turn)


def _write_deepseek(messages: Sequence[Message], opening: str, *, version_3: bool = False) -> list[Piece]:
    systems = [message["content"] for message in messages if message["role"] == "system"]
    pieces = [Piece(opening + ("\n\n".join(systems) if version_3 else "".join(systems[-1:])))]
    called = answered = in_tools = False
    end = "<｜end▁of▁sentence｜>"
    for index, message in enumerate(messages):
        content = message.get("content")
        if message["role"] == "user":
            in_tools = False
            pieces.append(Piece(f"<｜User｜>{content}"))
        elif message["role"] == "tool":
            in_tools = True
            before = "\n" if answered else "<｜tool▁outputs▁begin｜>"
            answered = True
            pieces.append(Piece(f"{before}<｜tool▁output▁begin｜>{content}<｜tool▁output▁end｜>"))
        elif message["role"] == "assistant" and content is None:
            in_tools = False
            for call in message["tool_calls"]:
                if not called:
                    pieces.append(Piece("<｜Assistant｜>"))
                function = call["function"]
                body = (
                    ("\n" if called else "<｜tool▁calls▁begin｜>")
                    + f"<｜tool▁call▁begin｜>{call['type']}<｜tool▁sep｜>{function['name']}\n```json\n"
                    + f"{function['arguments']}\n```<｜tool▁call▁end｜>"
                    + (f"<｜tool▁calls▁end｜>{end}" if called else "")
                )
                called = True
                pieces.append(Piece(body, index))
        elif message["role"] == "assistant" and in_tools:
            in_tools = False
            pieces += [Piece("<｜tool▁outputs▁end｜>"), Piece(str(content) + end, index)]
        elif message["role"] == "assistant":
            text = str(content) if version_3 else str(content).split("</think>")[-1]
            prompt = "<think>\n" if text.startswith("<think>\n") and not version_3 else ""
            pieces += [Piece(f"<｜Assistant｜>{prompt}"), Piece(text.removeprefix(prompt) + end, index)]
    return [*pieces, Piece("<｜tool▁outputs▁end｜>" if in_tools else "")]


def _write_deepseek_v3(messages: Sequence[Message], opening: str) -> list[Piece]:
    return _write_deepseek(messages, opening, version_3=True)


WRITERS: dict[str, Callable[[Sequence[Message], str], list[Piece]]] = {
    "qwen2_5": _write_qwen2_5,
    "plain": _write_plain,
    "vision": _write_plain,
    "qwen2_5_vl": _write_qwen2_5_vl,
    "hybrid": _write_hybrid,
    "thinking": _write_thinking,
    "deepseek": _write_deepseek,
    "deepseek_v3": _write_deepseek_v3,
}
