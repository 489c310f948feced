"""The invariants of edited contexts, over random scripts of an agent that calls its tools well and badly.

The agent's turns are tokenised in ways no tokenizer would choose, so that anything that is tokenised again shows.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from slime.utils.mask_utils import Generation, pack_training_rows
from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.engine.base import GenerateReply
from slime_plugins.rollout_buffer.generator.context_editing.history import stub_of
from slime_plugins.rollout_buffer.generator.context_editing.snapshots import (
    emission_views_of,
    full_history_of,
    snapshots_of,
    turn_boundaries_of,
)
from slime_plugins.rollout_buffer.generator.context_editing.tool_specs import schemas, tools_for
from slime_plugins.rollout_buffer.testing.fake_engine import END_OF_TURN
from slime_plugins.rollout_buffer.types import Trajectory
from slime_plugins.rollout_buffer.wire.written_items import encode_body
from tests.context_editing_player import Played, call, play, tokenizer
from tests.example_counts import examples

few = examples(40)

END = tokenizer.encode(END_OF_TURN, add_special_tokens=False)
ids = st.one_of(st.integers(1, 4), st.integers(1, 8), st.integers(0, 24), st.sampled_from([-1, 999]))
good_calls = st.one_of(
    st.just(call("buildIndex", chunk_size=40)),
    st.integers(0, 30).map(lambda chunk: call("readChunk", chunk_id=chunk)),
    st.sampled_from(["a", "b"]).map(lambda key: call("note", key=key, content="höre 你好")),
    st.just(call("readNote")),
    st.just(call("checkBudget")),
    st.just(call("searchEngine", query="gulls")),
)
deletions = st.one_of(
    st.lists(ids, min_size=1, max_size=5).map(lambda chosen: call("deleteContext", message_ids=chosen)),
    ids.map(lambda one: call("deleteContext", message_ids=one)),
)
bad_calls = st.sampled_from(
    ["<tool_call>{", call("noSuchTool"), call("readChunk", chunk_id="x"), call("deleteContext", message_ids=[])]
)
thoughts = st.sampled_from(["", "Hm. ", "Let me  see\n\n", "naïve 😀 "])


@st.composite
def turns(draw: st.DrawFn) -> GenerateReply:
    """Draws one turn: a thought and one or two calls, in odd tokens, perhaps without an end-of-turn token."""
    calls = draw(st.lists(st.one_of(good_calls, deletions, deletions, deletions, bad_calls), min_size=1, max_size=2))
    text = draw(thoughts) + "\n".join(calls)
    pieces = [text] if draw(st.booleans()) else list(text)
    output = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)]
    output += END if draw(st.integers(0, 3)) else []
    first = draw(st.floats(-5, -0.1))
    return GenerateReply(
        output_ids=tuple(output),
        output_log_probs=tuple(first - at / 64 for at in range(len(output))),
        finish_reason="stop",
        weight_version="1",
    )


scripts = st.lists(turns(), min_size=2, max_size=7).map(lambda drawn: [*drawn, call("finish", answer="21")])


def played(script: Sequence[Any], **options: Any) -> Played:
    return asyncio.run(play(list(script), system_prompt="", **options))


def starts_with(longer: Sequence[int], shorter: Sequence[int]) -> bool:
    return list(longer[: len(shorter)]) == list(shorter)


def whole(generation: Generation) -> list[int]:
    return [*generation.prompt_ids, *generation.output_ids]


@few
@given(scripts)
def test_every_token_is_trained_once_in_the_context_it_was_sampled_in(script: list[Any]) -> None:
    """Against what the engine was sent and what it replied."""
    game = played(script)
    generations = game.trajectory.generations
    rows = pack_training_rows(generations)
    assert [list(generation.prompt_ids) for generation in generations] == [
        list(sent.input_ids) for sent in game.requests
    ]
    assert [index for row in rows for index in row.generation_indices] == list(range(len(generations)))
    for row in rows:
        trained = [0] * len(row.token_ids)
        assert row.log_probs is not None
        for index in row.generation_indices:
            sent, reply = list(game.requests[index].input_ids), script[index]
            start = len(sent)
            assert row.token_ids[:start] == sent
            end = start + len(generations[index].output_ids)
            trained[start:end] = [1] * (end - start)
            if isinstance(reply, GenerateReply):
                assert row.token_ids[start:end] == list(reply.output_ids)
                assert row.log_probs[start:end] == list(reply.output_log_probs)
        assert row.loss_mask == trained
        assert sum(trained)
    assert sum(sum(row.loss_mask) for row in rows) == sum(len(one.output_ids) for one in generations)


@few
@given(scripts)
def test_a_row_begins_exactly_where_something_was_deleted(script: list[Any]) -> None:
    """A turn's prompt continues the sequence before it if and only if that turn deleted nothing."""
    game = played(script)
    generations = game.trajectory.generations
    deleting = {seen.turns - 1 for seen in game.deletions}
    for turn, (before, after) in enumerate(itertools.pairwise(generations)):
        assert starts_with(after.prompt_ids, whole(before)) == (turn not in deleting)
    assert len(pack_training_rows(generations)) == 1 + len(deleting)
    assert game.trajectory.extra_info["had_delete_operation"] == bool(deleting)


@few
@given(scripts)
def test_the_view_is_what_the_template_writes_for_kept_messages_and_stubs(script: list[Any]) -> None:
    """Each prompt, decoded, is the chat template's own text of the messages, deleted ones as stubs."""
    game = played(script)
    for turn, request in enumerate(game.requests):
        deleted = {
            msg_id
            for mark in game.trajectory.extra_info["deletions"]
            if mark["turn"] < turn
            for msg_id in mark["deleted_msg_ids"]
        }
        replies = [at for at, message in enumerate(game.trajectory.messages) if message["role"] == "assistant"]
        asked = replies[turn]
        view = [
            stub_of(message) if message["msg_id"] in deleted else message
            for message in game.trajectory.messages[:asked]
        ]
        rendered = tokenizer.apply_chat_template(
            view, tools=schemas(tools_for(editing=True)), tokenize=False, add_generation_prompt=True
        )
        assert tokenizer.decode(list(request.input_ids)) == rendered


@few
@given(scripts)
def test_snapshots_are_the_state_that_each_deletion_found(script: list[Any]) -> None:
    """Rebuilt from the stored form, after a way over the wire, against what was sent and seen."""
    game = played(script)
    delivered = over_the_wire(game.trajectory)
    snapshots = snapshots_of(delivered)
    assert len(snapshots) == len(game.deletions)
    assert emission_views_of(delivered) == [list(sent.input_ids) for sent in game.requests]
    began, masked_in = 0, -1  # the turn that the stretch began with; the turn whose deletion masked everything
    for snapshot, seen in zip(snapshots, game.deletions, strict=True):
        if masked_in not in (-1, seen.turns - 1):
            began = masked_in + 1
        prompts = [list(sent.input_ids) for sent in game.requests[: seen.turns]]
        replies = script[: seen.turns]
        assert snapshot.prompt_ids + snapshot.response_ids == prompts[-1] + list(replies[-1].output_ids)
        assert snapshot.prompt_ids == prompts[began]
        assert snapshot.emission_views == prompts
        assert snapshot.deleted_msg_ids == seen.deleted
        assert snapshot.full_history == in_seed_form(seen.messages)
        mask, log_probs = [0] * len(snapshot.response_ids), [0.0] * len(snapshot.response_ids)
        for turn in range(began, seen.turns):
            start, end = snapshot.assistant_turn_boundaries[turn]
            assert snapshot.response_ids[start:end] == list(replies[turn].output_ids)
            if masked_in != seen.turns - 1:
                mask[start:end] = [1] * (end - start)
                log_probs[start:end] = replies[turn].output_log_probs
        assert snapshot.response_mask == mask
        assert snapshot.response_logprobs == log_probs
        masked_in = seen.turns - 1
    assert len(turn_boundaries_of(delivered)) == len(game.requests)
    assert full_history_of(delivered) == in_seed_form(game.trajectory.messages)


def in_seed_form(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """StateLM's form of the messages, spelled out once more (but for the assistant's, which are compared loosely)."""
    formed = []
    for message in messages:
        if message["role"] == "tool":
            content = json.loads(message["content"])
            formed.append(
                {
                    "role": "tool",
                    "content": {"status": content["status"], "message": content["message"]},
                    "tool_name": message["tool_name"],
                    "msg_id": content["msg_id"],
                    "msg_id(invoking_assistant)": content["msg_id(invoking_assistant)"],
                }
            )
        elif message["role"] == "assistant":
            formed.append(full_history_of(record_of([message]))[0])
        else:
            formed.append(message)
    return formed


def record_of(messages: list[dict[str, Any]]) -> Any:
    return Namespace(messages=messages, generations=(), extra_info={})


def over_the_wire(trajectory: Trajectory) -> wire.RolloutItem:
    body = json.loads(json.dumps(encode_body(trajectory)))
    item = wire.decode_item(
        {**body, "uid": trajectory.uid, "instance_id": "i", "reward": trajectory.reward, "group_index": 0}
    )
    assert item.error is None
    return item


def without_seconds(trajectory: Trajectory) -> dict[str, Any]:
    body = encode_body(trajectory)
    generations = [one | {"engine_s": None, "environment_s": None} for one in body["generations"]]
    return body | {"timings_s": {}, "generations": generations}


@few
@given(scripts)
def test_the_same_script_gives_the_same_episode_and_ids_are_never_used_again(script: list[Any]) -> None:
    """A replay is equal, deletions are never undone, and ids are unique."""
    game, again = played(script), played(script)
    assert without_seconds(game.trajectory) == without_seconds(again.trajectory)
    assert [message["msg_id"] for message in game.trajectory.messages] == list(range(len(game.trajectory.messages)))
    gone: set[int] = set()
    for mark, seen in zip(game.trajectory.extra_info["deletions"], game.deletions, strict=True):
        assert seen.deleted == gone
        assert not gone & set(mark["deleted_msg_ids"])
        gone |= set(mark["deleted_msg_ids"])
    assert game.trajectory.extra_info["deleted_msg_ids"] == sorted(gone)


@few
@given(scripts)
def test_the_strict_form_trains_only_what_came_after_the_last_deletion(script: list[Any]) -> None:
    game = played(script, train_before_deletion=False)
    last = max((seen.turns - 1 for seen in game.deletions), default=-1)
    generations = game.trajectory.generations
    assert [one.trained for one in generations] == [turn > last for turn in range(len(generations))]
    rows = pack_training_rows(over_the_wire(game.trajectory).generations)
    assert all(1 in row.loss_mask for row in rows)
    assert sum(sum(row.loss_mask) for row in rows) == sum(len(one.output_ids) for one in generations[last + 1 :])
