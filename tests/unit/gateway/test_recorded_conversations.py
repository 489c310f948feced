"""Conversations that real clients had with the gateway: each answer is given again, and it is what is trained."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from slime.utils.mask_utils import pack_training_rows
from tests.gateway_support import tokenizer
from tests.recorded_conversations import FOLDER, Recorded, Replayed, replayed

CONVERSATIONS = sorted(FOLDER.glob("*.json"))
SAID = re.compile(
    r"(<think>\n(?P<thought>.*?)\n</think>\n\n)?(?P<text>.*?)(?P<calls>\n?<tool_call>.*)?<\|im_end\|>", re.DOTALL
)
CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>")
DELTAS = {
    "response.reasoning_text.delta": "thought",
    "response.output_text.delta": "text",
    "response.function_call_arguments.delta": "arguments",
}
recorded_conversations = pytest.mark.parametrize("path", CONVERSATIONS, ids=[path.stem for path in CONVERSATIONS])


def check_rows(recorded: Recorded, found: Replayed) -> None:
    """The trained tokens of all rows are the sampled ones, each turn once."""
    in_order = [recorded.sampled[number - 1] for number in found.emission_order]
    assert [list(one.output_ids) for one in found.generations] == in_order
    assert found.rows == recorded.rows
    rows = pack_training_rows(found.generations)
    trained = [token for row in rows for token, mask in zip(row.token_ids, row.loss_mask, strict=True) if mask]
    assert trained == [token for ids in in_order for token in ids]


@recorded_conversations
async def test_each_answer_is_the_recorded_one_byte_for_byte(path: Path, tmp_path: Path) -> None:
    recorded = Recorded.read(path)
    found = await replayed(recorded, tmp_path)
    for answer, expected in zip(found.answers, recorded.answers, strict=True):
        assert answer.split("\n\n") == expected.split("\n\n")
    check_rows(recorded, found)


@recorded_conversations
@pytest.mark.parametrize("streamed", [False, True])
async def test_what_a_client_hears_decodes_from_what_is_trained_streamed_or_not(
    path: Path, streamed: bool, tmp_path: Path
) -> None:
    recorded = Recorded.read(path)
    found = await replayed(recorded, tmp_path, streamed=streamed)
    check_rows(recorded, found)
    sampled = iter(recorded.sampled)
    for request, answer in zip(recorded.requests, found.answers, strict=True):
        if request["path"].partition("?")[0].endswith("/count_tokens"):
            continue
        said = SAID.fullmatch(tokenizer.decode(next(sampled)))
        assert said is not None
        heard = list(heard_in(events_of(answer) if streamed else [json.loads(answer)]))
        assert "".join(text for kind, text in heard if kind == "thought") == (said["thought"] or "")
        text = "".join(text for kind, text in heard if kind == "text")
        assert text == said["text"].rstrip() or (text and said["text"].startswith(text) and request["body"]["stop"])
        calls = [json.loads(arguments) for arguments in arguments_in(heard)]
        assert calls == [json.loads(call)["arguments"] for call in CALL.findall(said["calls"] or "")]
    assert list(sampled) == []


def events_of(answer: str) -> list[Any]:
    """The bodies of a stream's events."""
    datas = (event.partition("data: ")[2] for event in answer.split("\n\n"))
    return [json.loads(data) for data in datas if data not in ("", "[DONE]")]


def arguments_in(heard: Sequence[tuple[str, str]]) -> list[str]:
    """The arguments of the calls that were heard, each put together."""
    found: list[str] = []
    for kind, text in heard:
        if kind == "call":
            found.append("")
        elif kind == "arguments" and text:
            found[-1] += text
    return found


def heard_in(bodies: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """What a client hears in bodies of any dialect: thoughts, texts, beginnings of calls, and their arguments."""
    for body in bodies:
        for choice in body.get("choices", ()):
            yield from heard_in_chat(choice.get("delta") or choice.get("message") or {})
        blocks = body.get("content", ()) if body.get("type") == "message" else ()
        for block in (*blocks, body.get("content_block"), body.get("delta")):
            if isinstance(block, dict):
                yield from heard_in_block(block)
        for item in body.get("output", ()):
            yield from heard_in_item(item)
        if body.get("type") == "response.output_item.added" and body["item"]["type"] == "function_call":
            yield "call", ""
        if body.get("type") in DELTAS:
            yield DELTAS[body["type"]], body["delta"]


def heard_in_chat(message: Any) -> Iterator[tuple[str, str]]:
    yield "thought", message.get("reasoning_content") or ""
    yield "text", message.get("content") or ""
    for call in message.get("tool_calls") or ():
        if "id" in call:
            yield "call", ""
        yield "arguments", call["function"].get("arguments", "")


def heard_in_block(block: Any) -> Iterator[tuple[str, str]]:
    yield "thought", block.get("thinking", "")
    yield "text", block.get("text", "")
    if block.get("type") == "tool_use":
        yield "call", ""
        yield "arguments", json.dumps(block["input"]) if block["input"] else ""
    yield "arguments", block.get("partial_json", "")


def heard_in_item(item: Any) -> Iterator[tuple[str, str]]:
    what = "thought" if item["type"] == "reasoning" else "text"
    for part in item.get("content", ()):
        yield what, part["text"]
    if item["type"] == "function_call":
        yield "call", ""
        yield "arguments", item["arguments"]
