"""What vendors' own clients make of the events of any reply, and send back: the recorded message, in every dialect."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_plugins.rollout_buffer.gateway.dialects.chat_completions import ChatReply, Piece
from slime_plugins.rollout_buffer.gateway.dialects.dialect import CHAT_COMPLETIONS, MESSAGES, RESPONSES, Dialect
from slime_plugins.rollout_buffer.recording.message_matching import Thinking, fingerprint, is_same
from slime_plugins.rollout_buffer.recording.messages import digest, read_conversation
from slime_plugins.rollout_buffer.types import Message, MessageMatching
from tests.example_counts import examples
from tests.reply_streams import BEGUN, END_OF_TURN, TOOLS, reply_stream, texts

if TYPE_CHECKING:
    import anthropic
    import openai

QUESTION: Any = {"role": "user", "content": "What is there?"}
FUNCTION: Any = TOOLS[0]["function"]
USAGE = {
    "prompt_tokens": 1,
    "completion_tokens": 1,
    "total_tokens": 2,
    "prompt_tokens_details": {"cached_tokens": 0},
}


class Wire:
    """Answers requests of a client with ``events``, and keeps the last body."""

    def __init__(self) -> None:
        self.events = b""
        self.body: dict[str, Any] = {}

    def client(self, library: Any) -> Any:
        """Returns the HTTP client of a library, for a vendor's client."""

        def answer(request: Any) -> Any:
            self.body = json.loads(request.content)
            return library.Response(200, headers={"content-type": "text/event-stream"}, content=self.events)

        return library.Client(transport=library.MockTransport(answer))


WIRE = Wire()


@functools.cache
def openai_client() -> openai.OpenAI:
    import httpx
    import openai

    return openai.OpenAI(api_key="k", base_url="http://gateway/v1", http_client=WIRE.client(httpx), max_retries=0)


@functools.cache
def anthropic_client() -> anthropic.Anthropic:
    import anthropic
    import httpx2

    return anthropic.Anthropic(api_key="k", base_url="http://gateway", http_client=WIRE.client(httpx2), max_retries=0)


def chat_echo() -> None:
    asked: Any = {"model": "p", "tools": TOOLS, "extra_body": {"separate_reasoning": True}}
    with openai_client().chat.completions.stream(messages=[QUESTION], **asked) as stream:
        stream.until_done()
        said: Any = stream.current_completion_snapshot.choices[0].message  # the final one is refused if it was cut
    with openai_client().chat.completions.stream(messages=[QUESTION, said], **asked):
        pass


def messages_echo() -> None:
    tool = {"name": "f", "input_schema": {"type": "object", **FUNCTION["parameters"]}}
    asked: Any = {"model": "p", "max_tokens": 9, "tools": [tool]}
    with anthropic_client().messages.stream(messages=[QUESTION], **asked) as stream:
        said: Any = {"role": "assistant", "content": stream.get_final_message().content}
    with anthropic_client().messages.stream(messages=[QUESTION, said, QUESTION], **asked):
        pass


def responses_echo() -> None:
    tools: Any = [{"type": "function", **FUNCTION}]
    items: Any = []
    for event in openai_client().responses.create(model="p", input=[QUESTION], tools=tools, stream=True):
        if event.type in ("response.completed", "response.incomplete"):
            items = event.response.output
    openai_client().responses.create(model="p", input=[QUESTION, *items], tools=tools, stream=True).close()


@examples(150)
@pytest.mark.parametrize(
    ("dialect", "echo"),
    [(CHAT_COMPLETIONS, chat_echo), (MESSAGES, messages_echo), (RESPONSES, responses_echo)],
    ids=["chat", "messages", "responses"],
)
@given(texts, st.sampled_from(["stop", "length"]), st.data())
def test_the_message_that_a_client_puts_together_and_sends_back_is_the_recorded_one(
    dialect: Dialect, echo: Callable[[], None], text: str, finish_reason: str, data: st.DataObject
) -> None:
    events, said = dialect.events({}), list[bytes]()

    def tell(one: ChatReply | Piece) -> None:
        said.extend(events.begin(one) if isinstance(one, ChatReply) else events.add(one))

    ids = [*text.encode(), *([END_OF_TURN] if finish_reason == "stop" else [])]
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))]
    stream = reply_stream("", tell, begun=replace(BEGUN, usage=USAGE), tools=TOOLS, separate_reasoning=True)
    for start, end in itertools.pairwise(cuts):
        stream.add(ids[start:end])
    message = stream.end(ids)
    stream.emit_rest()
    said.extend(events.end(replace(BEGUN, message=message, usage=USAGE, finish_reason=finish_reason)))
    WIRE.events = b"".join(said)
    echo()
    assert_recorded(message, dialect, WIRE.body)


def assert_recorded(message: Message, dialect: Dialect, body: Mapping[str, Any]) -> None:
    sent = read_conversation(dialect.read(body, [])[0]["messages"])
    if not any((message["content"], message.get("tool_calls"), message.get("reasoning_content"))):
        return  # a reply of nothing is no message in all dialects
    held = fingerprint(message, digest(message), Thinking.APART)
    assert is_same(MessageMatching.STRICT, held, fingerprint(sent.messages[1], sent.digests[1]))
