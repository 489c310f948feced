"""Replies as a model writes them and as the gateway converts them, under a tokenizer whose tokens are bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from slime_plugins.rollout_buffer.gateway.chat_requests import ChatBody
from slime_plugins.rollout_buffer.gateway.dialects.chat_completions import ChatReply
from slime_plugins.rollout_buffer.gateway.reply_pieces import Listener, ReplyStream
from slime_plugins.rollout_buffer.types import Message

TOOLS: Any = [
    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}},
]
HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": "é</tool_call>"}}\n</tool_call>'
CODER = "<tool_call>\n<function=f>\n<parameter=a>\né\n</parameter>\n</function>\n</tool_call>"

marks = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "<think>", "</think>", "<thinking>", "</thinking>", "<", '{"name": "f"}', "}",
        " ", "\n", "é", "🙂", "STOP", "ST", HERMES, CODER,
    ]
)  # fmt: skip
values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5) | marks,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


@st.composite
def calls(draw: st.DrawFn) -> str:
    """A call in one of the two dialects, which may be cut or changed at any place."""
    arguments = draw(st.dictionaries(st.text("ab\n", min_size=1, max_size=2), values, max_size=3))
    space = draw(st.sampled_from(["", " ", "\n"]))
    if draw(st.booleans()):
        written = json.dumps(arguments, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 1])))
        more = draw(st.sampled_from(["", "", ', "id": 1', ', "name": "g"', ', "arguments": {}']))
        inside = f'{{"name":{space}"f",{space}"arguments":{space}{written}{more}}}'
    else:
        given = [f"{space}<parameter={key}>\n{value}\n</parameter>" for key, value in arguments.items()]
        inside = f"<function=f>{''.join(given)}{space}</function>"
    call = f"<tool_call>{space}{inside}{space}</tool_call>"
    change = draw(st.one_of(st.just(""), st.just(""), marks, st.text(max_size=2)))
    start = draw(st.integers(11, len(call))) if change else len(call)
    return call[:start] + change + call[start + draw(st.sampled_from([0, 1, 400])) :]


texts = st.lists(st.one_of(marks, st.text(max_size=4), calls()), max_size=10).map("".join)
"""Replies of a model: texts, thoughts, and calls that can be read, or are cut or changed."""

END_OF_TURN = 256
BEGUN = ChatReply(name="a", created=0, model="m", message={}, finish_reason="", usage={}, weight_version=None)


class ByteTokens:
    """What the conversion takes of ``ChatTokens``."""

    def is_closed(self, ids: Sequence[int]) -> bool:
        return bool(ids) and ids[-1] == END_OF_TURN

    def text(self, ids: Sequence[int]) -> str:
        return self.decoded(ids[:-1] if self.is_closed(ids) else ids)

    def decoded(self, ids: Sequence[int]) -> str:
        pieces = b"".join(b"<end>" if one == END_OF_TURN else bytes([one]) for one in ids)
        return pieces.decode(errors="replace")


def reply_stream(
    prompt: str = "", tell: Listener | None = None, *, begun: ChatReply = BEGUN, **body: Any
) -> ReplyStream:
    tokens: Any = ByteTokens()
    return ReplyStream(tokens, ChatBody(**body), list(prompt.encode()), begun, tell, name="0")


def gateway_message(text: str, prompt: str = "", **body: Any) -> Message:
    """The message of a reply that came whole."""
    return reply_stream(prompt, **body).end([*text.encode(), END_OF_TURN])
