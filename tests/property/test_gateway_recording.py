"""What a session recorded becomes rows that train each sampled token once, where it was sampled: for any client.

The client is drawn: it goes on, asks again, goes back, edits what was said, drops messages from the middle, changes
white space and tools, and rewrites its history as real ones do.
"""

from __future__ import annotations

import asyncio
import copy
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

from hypothesis import example, given
from hypothesis import strategies as st

from slime.utils.mask_utils import Generation, TrainingRow, pack_training_rows
from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.chat_tokens import ChatTokens
from slime_plugins.rollout_buffer.engine.base import GenerateReply
from slime_plugins.rollout_buffer.recording import turns
from slime_plugins.rollout_buffer.recording.messages import digest, read_conversation
from slime_plugins.rollout_buffer.recording.prompts import build_prompt
from slime_plugins.rollout_buffer.recording.turn_encoding import SessionTurns, View, encode_turn, replay
from slime_plugins.rollout_buffer.recording.turns import Recording, Turn, sampled_in
from slime_plugins.rollout_buffer.types import MessageMatching
from tests.example_counts import examples
from tests.gateway_support import tokenizer

chat = ChatTokens(tokenizer)
END = chat.end_of_turn_id
IMAGES = tuple(letter * 64 for letter in "ab")
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]

PLAIN = st.sampled_from(
    ["go on", "again", "more <b>text</b>", "你好", " spaced ", "0123456789 the last words of a turn 9876543210"]
)
MORE_MOVES = ("tools", "tool", "image", "two")
REWRITES = ("reminder", "ids", "arguments", "order", "merge", "reasoning", "empty")
MOVES = st.lists(
    st.tuples(
        st.sampled_from(
            ["on", "on", "on", "again", "back", "edit", "drop", "space", "name", "name", *MORE_MOVES, *REWRITES]
        ),
        st.integers(0, 2**16),
        PLAIN,
    ),
    min_size=1,
    max_size=10,
)


@dataclass(slots=True)
class Sent:
    """What the engine was asked and answered, in the order of the calls."""

    prompt_ids: list[int]
    output_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    images: tuple[str, ...]
    messages: list[dict[str, Any]]


@dataclass(slots=True)
class Client:
    """Plays moves against a recording, as the gateway does, with an engine that samples at random."""

    rng: random.Random
    recording: Recording = field(default_factory=Recording)
    sent: list[Sent] = field(default_factory=list)
    histories: list[list[dict[str, Any]]] = field(default_factory=lambda: [[]])
    tools: list[dict[str, Any]] = field(default_factory=list)
    view: View = field(default_factory=View)
    rows: list[dict[str, Any]] = field(default_factory=list)

    async def play(self, move: str, number: int, text: str) -> None:
        history = [dict(message) for message in self.histories[-1]]
        spoken = [at for at, message in enumerate(history) if message["role"] == "assistant"]
        if move == "again" and spoken:
            await self.ask(history[: spoken[-1]])
            return
        if move == "back":
            history = [dict(message) for message in self.histories[number % len(self.histories)]]
        if move == "edit" and history:
            history[number % len(history)]["content"] = text
        if move == "drop" and len(history) > 1:
            del history[number % len(history)]
        if move == "space" and spoken:
            at = spoken[number % len(spoken)]
            history[at]["content"] = f" {history[at]['content']}\n"
        if move == "name" and history:  # another message to the client, the same text to the template
            history[number % len(history)]["name"] = f"n{number}"
        if move == "tools":
            self.tools = [] if self.tools else TOOLS
        if move in REWRITES:
            history = rewritten(history, move, number)
        await self.ask([*history, *_new_messages(move, number, text)])

    async def ask(self, messages: list[dict[str, Any]]) -> None:
        conversation = read_conversation(messages)
        key = digest(self.tools)
        prompt = await build_prompt(self.recording, key, conversation, chat, self.tools)
        sampled = _sampled(self.rng)
        self.sent.append(Sent(prompt.ids, sampled.output_ids, sampled.output_log_probs, prompt.images, messages))
        message = _message(chat.text(sampled.output_ids), self.rng)
        turn = Turn(
            parent=prompt.parent,
            number=self.recording.last_number + 1,
            request=digest([messages, self.tools]),
            key=key,
            context=prompt.context,
            context_ids=array("i", prompt.ids[prompt.num_held_ids :]),
            images=prompt.images[prompt.num_held_images :],
            sampled=sampled_in(sampled),
            message=message,
            created=float(len(self.sent)),
            from_start=prompt.from_start,
            is_closed=chat.is_closed(sampled.output_ids),
            tolerated=tuple(sorted(prompt.tolerated)),
            difference=prompt.difference,
        )
        view = View((*conversation.messages, message), self.tools, sampled.finish_reason)
        self.rows.append(encode_turn(turn, view, self.view))
        self.recording.add(turn)
        self.view = view
        self.histories.append([*messages, message])


def _message(text: str, rng: random.Random) -> dict[str, Any]:
    """The message of a reply, with a tool call, reasoning or neither."""
    kind = rng.random()
    if kind < 0.3:
        call = {"id": f"c{rng.random()}", "type": "function", "function": {"name": "look", "arguments": {"at": 1.0}}}
        return {"role": "assistant", "content": text, "tool_calls": [call]}
    return {"role": "assistant", "content": "" if kind < 0.4 else text, "reasoning_content": "so it is"}


def rewritten(history: list[dict[str, Any]], how: str, number: int) -> list[dict[str, Any]]:
    """A history as a client sends it back that takes it for the same."""
    new = copy.deepcopy(history)
    heard = [one for one in new if one["role"] != "assistant" and isinstance(one["content"], str)]
    calls = [call for one in new for call in one.get("tool_calls", ())]
    pairs = [at for at in range(1, len(new)) if new[at - 1]["role"] == new[at]["role"] == "tool"]
    if how == "reminder" and heard:
        heard[number % len(heard)]["content"] += f"\n<system-reminder>\n{number}\n</system-reminder>"
    if how == "ids":
        for one in [*calls, *(one for one in new if one["role"] == "tool")]:
            key = "id" if "function" in one else "tool_call_id"
            one[key] = f"{one[key]}{number}"
    if how == "arguments" and calls:
        calls[number % len(calls)]["function"]["arguments"] = {"at": 1, "is_default": False}
    if how == "order" and pairs:
        at = pairs[number % len(pairs)]
        new[at - 1], new[at] = new[at], new[at - 1]
    if how == "merge" and pairs:
        at = pairs[number % len(pairs)]
        new[at - 1]["content"] += "\n" + new.pop(at)["content"]
    if how == "reasoning":
        for one in new:
            one.pop("reasoning_content", None)
    if how == "empty":
        new = [one for one in new if one["role"] != "assistant" or one["content"] or "tool_calls" in one]
    return new


def _new_messages(move: str, number: int, text: str) -> list[dict[str, Any]]:
    if move == "tool":
        return [{"role": "tool", "content": text, "tool_call_id": f"c{at}"} for at in range(1 + number % 2)]
    if move == "image":
        url = f"sha256:{IMAGES[number % 2]}"
        return [
            {
                "role": "user",
                "content": [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": url}}],
            }
        ]
    said = {"role": "user", "content": text}
    return [said, {"role": "assistant", "content": "made up"}, said] if move == "two" else [said]


def _sampled(rng: random.Random) -> GenerateReply:
    """Ids that no tokeniser would give for their text, or those that it gives; ended, or cut."""
    if rng.random() < 0.4:
        return _reply([*tokenizer.encode(rng.choice(["Very well.", "Answer one"]), add_special_tokens=False), END], rng)
    ids = [rng.randrange(300, 2000) for _ in range(rng.randrange(1, 6))]
    if rng.random() < 0.7:
        ids.append(END)
    return _reply(ids, rng)


def _reply(ids: list[int], rng: random.Random) -> GenerateReply:
    log_probs = tuple(-rng.random() for _ in ids)
    return GenerateReply(output_ids=tuple(ids), output_log_probs=log_probs, finish_reason="stop", weight_version="1")


def played(moves: Sequence[tuple[str, int, str]], seed: int, matching: MessageMatching | None = None) -> Client:
    """A client after its moves; the rule is drawn with the seed unless it is given."""

    async def play_all() -> Client:
        client = Client(random.Random(seed), recording=Recording(matching or [*MessageMatching][seed % 3]))
        for move in moves:
            await client.play(*move)
        return client

    return asyncio.run(play_all())


any_client = given(moves=MOVES, seed=st.integers(0, 1000))
bounded = examples(30)


def rows_of(client: Client) -> tuple[list[Generation], list[TrainingRow]]:
    """What a trainer gets: over the wire and through the packer."""
    generations = list(wire.decode_generations(wire.encode_generations(client.recording.generations())))
    return generations, pack_training_rows(generations)


@bounded
@any_client
def test_generations_are_what_was_sent_and_sampled(moves: Any, seed: int) -> None:
    client = played(moves, seed)
    generations = client.recording.generations()
    by_call = sorted(zip(client.recording.numbers(), generations, strict=True), key=lambda pair: pair[0])
    assert [list(g.prompt_ids) for _, g in by_call] == [sent.prompt_ids for sent in client.sent]
    assert [tuple(g.output_ids) for _, g in by_call] == [sent.output_ids for sent in client.sent]
    assert [tuple(g.output_log_probs or ()) for _, g in by_call] == [sent.log_probs for sent in client.sent]
    assert [g.images for _, g in by_call] == [sent.images for sent in client.sent]


@bounded
@any_client
def test_a_prompt_says_what_its_client_said_in_order(moves: Any, seed: int) -> None:
    for sent in played(moves, seed, MessageMatching.STRICT).sent:
        shown = str(tokenizer.decode(sent.prompt_ids, skip_special_tokens=False))
        at = 0
        for message in sent.messages:
            if message["role"] in ("user", "tool"):
                said = message["content"]
                text = said if isinstance(said, str) else said[0]["text"]
                at = shown.index(text, at) + len(text)
        wanted = sum(isinstance(message["content"], list) for message in sent.messages)
        assert len(sent.images) == sent.prompt_ids.count(chat.image_placeholder_id) == wanted
        assert ("# Tools" in shown) == ('{"type": "function"' in shown)


@bounded
@any_client
@example([("on", 0, "go on"), ("name", 0, "go on")], 0)  # other messages, but the same ids
def test_a_row_is_opened_exactly_where_no_exact_prefix_can_be_continued(moves: Any, seed: int) -> None:
    """There are as many rows as there are turns that no other turn continues."""
    client = played(moves, seed)
    _, rows = rows_of(client)
    held = [([*sent.prompt_ids, *sent.output_ids], sent.images) for sent in client.sent]
    continued: set[int] = set()
    for at, sent in enumerate(client.sent):
        earlier = [
            (len(ids), index)
            for index, (ids, images) in enumerate(held[:at])
            if sent.prompt_ids[: len(ids)] == ids and sent.images[: len(images)] == images
        ]
        if earlier:
            continued.add(max(earlier)[1])
    assert len(rows) == len(client.sent) - len(continued) == client.recording.branches()


@bounded
@any_client
def test_the_same_moves_give_the_same_rows_and_the_order_is_told(moves: Any, seed: int) -> None:
    """Turns are numbered from 1 without gaps, and each row names its turns in the order they were sampled."""
    first, second = played(moves, seed), played(moves, seed)
    assert rows_of(first)[1] == rows_of(second)[1]
    numbers = first.recording.numbers()
    assert sorted(numbers) == list(range(1, len(first.sent) + 1))
    for row in rows_of(first)[1]:
        in_row = [numbers[index] for index in row.generation_indices]
        assert in_row == sorted(in_row)


@bounded
@any_client
def test_a_turn_that_did_not_reach_its_client_leaves_what_was_before_until_it_is_asked_for_again(
    moves: Any, seed: int
) -> None:
    before, after = played(moves[:-1], seed), played(moves, seed)
    whole = after.recording.generations()
    youngest = max(_turns(after.recording), key=lambda turn: turn.number)
    after.recording.note_sent(youngest, sent=False)
    assert after.recording.generations() == before.recording.generations()
    assert (after.recording.num_turns, after.recording.num_ids) == (
        before.recording.num_turns,
        before.recording.num_ids,
    )
    conversation = read_conversation([*after.histories[-1], {"role": "user", "content": "and then?"}])
    keys = [digest([]), digest(TOOLS)]
    fingerprints = after.recording.fingerprints(conversation.messages, conversation.digests)
    found = [after.recording.find(key, fingerprints).turn for key in keys]
    assert youngest not in found, "a forgotten turn is not continued"
    assert after.recording.answered(youngest.request, is_retry=False) is youngest
    after.recording.note_sent(youngest, sent=True)
    assert after.recording.generations() == whole
    assert after.recording.answered(youngest.request, is_retry=False) is None, (
        "a client with the reply wants another one"
    )
    assert after.recording.answered(youngest.request, is_retry=True) is youngest


@bounded
@any_client
def test_a_turn_that_is_continued_has_reached_its_client_whatever_was_noted_meanwhile(moves: Any, seed: int) -> None:
    recording = played(moves, seed).recording
    youngest = max(_turns(recording), key=lambda turn: turn.number)
    later = replace(youngest, parent=youngest, number=youngest.number + 1, from_start=False, sent=None, children=[])
    recording.note_sent(youngest, sent=False)
    recording.add(later)
    assert sorted(recording.numbers()) == list(range(1, later.number + 1))


@bounded
@any_client
def test_rows_rebuild_what_the_memory_held_and_every_client_goes_on_alike(moves: Any, seed: int) -> None:
    held = played(moves, seed)
    rebuilt = replay([dict(row) for row in held.rows], SessionTurns(Recording(held.recording.matching)))
    assert rows_of(Client(random.Random(0), recording=rebuilt.recording)) == rows_of(held)
    assert rebuilt.recording.numbers() == held.recording.numbers()
    assert (rebuilt.view.messages, list(rebuilt.view.tools)) == (held.view.messages, list(held.view.tools))
    for history in held.histories:
        conversation = read_conversation([*history, {"role": "user", "content": "and then?"}])
        for key, tools in ((digest([]), []), (digest(TOOLS), TOOLS)):
            here, there = (
                asyncio.run(build_prompt(one, key, conversation, chat, tools))
                for one in (held.recording, rebuilt.recording)
            )
            assert here.ids == there.ids
            assert (here.parent and here.parent.number) == (there.parent and there.parent.number)


@examples(20)
@any_client
def test_the_index_finds_what_a_comparison_with_every_path_finds(moves: Any, seed: int) -> None:
    client = played(moves, seed)
    for turn in _turns(client.recording)[seed % 2 :: 2]:  # a retry brings it back, after later ones
        client.recording.note_sent(turn, sent=False)
        client.recording.note_sent(turn, sent=True)
    rewrites = [rewritten(history, how, seed) for history in client.histories[1:] for how in REWRITES]
    cuts = [history[: 1 + seed % len(history)] for history in client.histories[1:]]
    for history in [*client.histories[1:], *rewrites, *cuts]:
        for messages in (history, [*history, {"role": "user", "content": "and then?"}]):
            conversation = read_conversation(messages)
            sent = client.recording.fingerprints(conversation.messages, conversation.digests)
            for key in (digest([]), digest(TOOLS)):
                found = []
                for few in (-1, len(client.sent)):
                    with patch.object(turns, "MAX_COMPARED_TURNS", few):
                        found.append(client.recording.find(key, sent))
                assert found[0] == found[1]


def _turns(recording: Recording) -> list[Turn]:
    return [turn for turn, _ in recording._in_order()]


@given(count=st.integers(1, 40))
@examples(20)
def test_memory_is_linear_in_what_was_said(count: int) -> None:
    client = played([("on", 0, "go on")] * count, 1)
    assert client.recording.num_ids == len(client.sent[-1].prompt_ids) + len(client.sent[-1].output_ids)
    assert client.recording.branches() == 1
