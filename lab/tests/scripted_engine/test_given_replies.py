"""``engine --script``: what was written down is what is said, turn by turn, tool calls included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollout_buffer_lab.scripted_engine.conversation import Conversation, Turn
from rollout_buffer_lab.scripted_engine.given_replies import GivenReplies, read_script
from rollout_buffer_lab.scripted_engine.rng import SessionRng
from rollout_buffer_lab.sglang_routes.sampling import BadRequestError
from slime_plugins.rollout_buffer.engine.tool_call_parser import read_segments
from slime_plugins.rollout_buffer.errors import ConfigError

LOOK = {"content": "I look.", "tool_calls": [{"function": {"name": "look", "arguments": '{"at": 1}'}}]}


def script(folder: Path, *lines: Any) -> GivenReplies:
    file = folder / "replies.jsonl"
    file.write_text("\n\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    return read_script(file)


def said(policy: GivenReplies, *replies: str, begun: str = "") -> str:
    turns = [Turn(role=role, text=text) for reply in replies for role, text in (("user", "?"), ("assistant", reply))]
    conversation = Conversation(turns=(*turns, Turn(role="user", text="?")), begun_reply=begun)
    return policy(conversation, skill=1.0, rng=SessionRng(0, ""))


def test_conversations_take_the_lines_in_turn_and_go_on_with_a_line_that_begins_like_them(tmp_path: Path) -> None:
    policy = script(tmp_path, "42", ["No.", "Yes."], [LOOK, "Done."])
    first = [said(policy) for _ in range(4)]
    assert first[:2] == ["42", "No."]
    assert first[3] == "42"
    (call,) = [one.call for one in read_segments(first[2], []) if one.call is not None]
    assert (call.name, call.arguments) == ("look", {"at": 1})
    assert said(policy, "No.") == "Yes."
    assert said(policy, first[2]) == "Done."
    assert said(policy, begun="No") == "No."


def test_a_conversation_goes_on_after_a_reply_was_deleted_from_it(tmp_path: Path) -> None:
    policy = script(tmp_path, ["a", "b", "c"], ["x", "y", "z"])
    assert said(policy, "[message 2 was deleted]", "y") == "z"


def test_a_turn_that_no_line_has_is_a_wrong_request(tmp_path: Path) -> None:
    policy = script(tmp_path, "42")
    with pytest.raises(BadRequestError) as refused:
        said(policy, "42")
    assert "no line of the script has a reply 2" in str(refused.value.args)


@pytest.mark.parametrize("line", [7, {"role": "assistant"}, ["a", None], {"tool_calls": [{"arguments": {}}]}])
def test_a_line_that_is_no_reply_is_named(tmp_path: Path, line: Any) -> None:
    with pytest.raises(ConfigError, match=r"replies.jsonl, line 3: a reply is"):
        script(tmp_path, "42", line)
