"""Over random conversations: both sides count alike, what was sampled is trained once, wrong masks never pass.

The policy samples random text, split into tokens as the tokenizer does or letter by letter, with or without an end of
turn; the world answers with any number of tool results and questions; and the agent may edit its context. Templates:
plain ChatML, one with a default system text, hybrid thinking, the demo's own, and DeepSeek's markers.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from slime_plugins.rollout_buffer.chat_tokens import ChatTokens
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.engine.base import GenerateReply, GenerateRequest
from slime_plugins.rollout_buffer.remote_rollout.conversation import CountMethod
from slime_plugins.rollout_buffer.remote_rollout.errors import WrongMaskError
from slime_plugins.rollout_buffer.remote_rollout.token_counts import TokenCounter
from slime_plugins.rollout_buffer.remote_rollout.trainer_replies import TrainerReply, read_reply
from slime_plugins.rollout_buffer.remote_rollout.trainer_side.sessions import TrainerSession, TurnKind, plan_turn
from slime_plugins.rollout_buffer.remote_rollout.trainer_side.trainer import TrainerSide
from slime_plugins.rollout_buffer.testing.fake_engine import FakeEngine
from slime_plugins.rollout_buffer.wire.written_items import decode_written_item
from tests.chat_tokenizers import load
from tests.example_counts import examples
from tests.remote_rollout_serving import trainer_side
from tests.third_party_rollout_sides import rendered

NAMES = ["small-plain", "small-default-system", "small-hybrid", "small-deepseek", "demo"]
REAL_NAMES = ["qwen3-2507", "qwen3-hybrid", "qwen3.5"]  # skipped unless they were fetched
SETTINGS = examples(15, suppress_health_check=[HealthCheck.function_scoped_fixture])

WORDS = st.sampled_from(
    ["345", "the result", "\n\n", " ", "Über 😀", "<think>", "</think>", "assistant\n", ".", "a\n", "é"]
)
TEXT = st.lists(WORDS, min_size=1, max_size=6).map("".join)


@functools.cache
def tokens_of(name: str) -> ChatTokens:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_TOKENIZER_PATH) if name == "demo" else load(name)
    return ChatTokens(tokenizer)


@dataclass(frozen=True)
class Step:
    """What the policy says, how it is split, and what the world answers."""

    said: str
    letters: bool
    closed: bool
    answers: tuple[tuple[str, str], ...]

    def sampled(self, tokens: ChatTokens) -> tuple[int, ...]:
        """The ids of the reply."""
        pieces = list(self.said) if self.letters else [self.said]
        ids = [one for piece in pieces for one in tokens.tokenizer.encode(piece, add_special_tokens=False)]
        return (*ids, *([tokens.end_of_turn_id] if self.closed else []))

    def messages(self) -> list[dict[str, Any]]:
        """The world's answer."""
        return [{"role": role, "content": content} for role, content in self.answers]


ANSWERS = st.lists(st.tuples(st.sampled_from(["tool", "user"]), TEXT), min_size=0, max_size=3).map(tuple)
STEPS = st.lists(
    st.builds(Step, said=TEXT, letters=st.booleans(), closed=st.booleans(), answers=ANSWERS), min_size=1, max_size=5
)
QUESTIONS = st.lists(st.tuples(st.just("user"), TEXT), min_size=1, max_size=2).map(
    lambda pairs: [{"role": role, "content": content} for role, content in pairs]
)


def engine_of(tokens: ChatTokens, steps: list[Step]) -> FakeEngine:
    replies = iter(steps)

    def reply(request: GenerateRequest) -> GenerateReply:
        step = next(replies)
        ids = step.sampled(tokens)
        reason = "stop" if step.closed else "length"
        return GenerateReply(output_ids=ids, output_log_probs=(-0.5,) * len(ids), finish_reason=reason)

    return FakeEngine(reply)


def trainer_of(tokens: ChatTokens, steps: list[Step]) -> tuple[TrainerSide, FakeEngine]:
    engine = engine_of(tokens, steps)
    return trainer_side(engine, tokens.tokenizer), engine


def check_rows(session: TrainerSession, engine: FakeEngine, steps: list[Step]) -> None:
    """Checks the rows against what the session really sent and got."""
    places = [number - 1 for number in session.recording.numbers()]
    by_place = dict(zip(places, session.generations, strict=True))
    generations = [by_place[place] for place in range(len(places))]
    sampled = [list(step.sampled(session.tokens)) for step in steps[: len(generations)]]
    assert [list(one.prompt_ids) for one in generations] == [list(request.input_ids) for request in engine.requests]
    assert [list(one.output_ids) for one in generations] == sampled
    rows = session.rows()
    assert sum(sum(row.loss_mask) for row in rows) == sum(map(len, sampled)) == sum(session.response_mask)
    assert sorted(at for row in rows for at in row.generation_indices) == list(range(len(sampled)))
    assert len(rows) == session.recording.branches() <= 1 + sum(turn.kind is TurnKind.EDITED for turn in session.turns)
    for row in rows:
        assert len(row.token_ids) == len(row.loss_mask) == len(row.log_probs or [])
        for at in (places[index] for index in row.generation_indices):
            start = len(generations[at].prompt_ids)
            end = start + len(sampled[at])
            assert row.token_ids[:end] == [*generations[at].prompt_ids, *sampled[at]]
            assert row.loss_mask[start:end] == [1] * len(sampled[at])
    trained = [id_ for id_, value in zip(session.response_ids, session.response_mask, strict=True) if value]
    assert trained == [id_ for ids in sampled for id_ in ids]


@pytest.mark.parametrize("name", [*NAMES, *REAL_NAMES])
@SETTINGS
@given(question=QUESTIONS, steps=STEPS)
@example(  # qwen3-hybrid writes "<think>" before the last reply: its render begins with what is held, by chance
    question=[{"role": "user", "content": "345"}],
    steps=[Step("<think>", False, False, ()), Step("345", False, False, ())],
)
def test_our_two_sides_agree_by_ids_on_every_turn(name: str, question: list[dict[str, Any]], steps: list[Step]) -> None:
    asyncio.run(_play(tokens_of(name), question, steps))


async def _play(tokens: ChatTokens, question: list[dict[str, Any]], steps: list[Step]) -> None:
    trainer, engine = trainer_of(tokens, steps)
    count, messages = TokenCounter(tokens, (), ()), list(question)
    for turn, step in enumerate(steps, 1):
        expected = await count.expect(messages, turn)
        body = {"rollout_id": "r", "messages": messages, "response_mask": expected.mask(CountMethod.IDS)}
        completion = await trainer.complete(body, named_turn=turn)
        count.take(messages, expected, read_reply(orjson.dumps(completion), turn), turn)
        assert completion["entered_tokens"] == expected.entered[CountMethod.IDS]
        messages = [*messages, completion["choices"][0]["message"], *step.messages()]
    session = trainer.get_session("r")
    assert all(turn.counted_by is CountMethod.IDS for turn in session.turns)
    assert count.sequence_tokens == len(session.held_ids)
    check_rows(session, engine, steps)


@pytest.mark.parametrize("name", ["small-plain", "small-default-system", "small-hybrid", "demo"])
@SETTINGS
@given(question=QUESTIONS, steps=STEPS)
def test_the_agents_mask_is_the_guides_formula_where_a_trainer_renders_again(
    name: str, question: list[dict[str, Any]], steps: list[Step]
) -> None:
    tokens, messages = tokens_of(name), list(question)
    count, last_prompt_length = TokenCounter(tokens, (), ()), 0
    for turn, step in enumerate(steps, 1):
        prompt, expected = rendered(tokens.tokenizer, messages), asyncio.run(count.expect(messages, turn))
        by_formula = len(prompt) - last_prompt_length if turn > 1 else 0
        assert expected.entered[CountMethod.TEXT] == by_formula
        if expected.prompts[CountMethod.IDS] == prompt:
            assert expected.mask(expected.preferred) == ([0] * by_formula or None)
        ids = step.sampled(tokens)
        message = {"role": "assistant", "content": step.said}
        reply = TrainerReply(message=message, finish_reason="stop", token_ids=ids, prompt_ids=tuple(prompt))
        count.take(messages, expected, reply, turn)
        last_prompt_length = len(prompt) + len(ids)
        messages = [*messages, message, *step.messages()]


@pytest.mark.parametrize("name", NAMES)
@SETTINGS
@given(question=QUESTIONS, steps=STEPS, wrong=st.integers(-40, 40), ones=st.booleans())
def test_a_wrong_mask_never_passes_and_changes_nothing(
    name: str, question: list[dict[str, Any]], steps: list[Step], wrong: int, ones: bool
) -> None:
    asyncio.run(_plant(tokens_of(name), question, steps, wrong, ones))


async def _plant(tokens: ChatTokens, question: list[dict[str, Any]], steps: list[Step], wrong: int, ones: bool) -> None:
    trainer, engine = trainer_of(tokens, steps)
    completion = await trainer.complete({"rollout_id": "r", "messages": question})
    session = trainer.get_session("r")
    messages = [*question, completion["choices"][0]["message"], *steps[0].messages()]
    plan = await plan_turn(session, messages, (), text_counts=True)
    right = {
        plan.entered.count,
        *(count_tokens() for _, count_tokens in plan.entered.others),
    }
    length = max(0, plan.entered.count + wrong)
    mask: list[int] = [int(ones)] * length
    if length in right and not ones:
        return
    for planted in (mask, None):
        with pytest.raises(WrongMaskError, match=r"^turn 2: response_mask"):
            await trainer.complete({"rollout_id": "r", "messages": messages, "response_mask": planted})
    assert len(engine.requests) == len(session.turns) == 1


@dataclass(frozen=True)
class Edit:
    """What an agent does to its messages before a turn: nothing, drop, replace, or write the same again."""

    kind: str
    place: int

    def apply(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The edited messages; the last one stays, so that there is something to answer."""
        at = self.place % len(messages)
        if self.kind == "drop" and len(messages) > 1 and at < len(messages) - 1 and at > 0:
            return [*messages[:at], *messages[at + 1 :]]
        if self.kind == "stub":
            return [*messages[:at], {**messages[at], "content": "[deleted]"}, *messages[at + 1 :]]
        return [dict(message) for message in messages]


EDITS = st.lists(
    st.builds(Edit, kind=st.sampled_from(["none", "same", "drop", "stub"]), place=st.integers(0, 30)), min_size=5
)


@pytest.mark.parametrize("name", ["small-plain", "demo", "small-hybrid"])
@SETTINGS
@given(question=QUESTIONS, steps=STEPS, edits=EDITS)
@example(  # two replies that differ in spaces at their end only
    question=[{"role": "user", "content": "345"}],
    steps=[Step(reply, False, False, ()) for reply in ("345", "345", "345\n\n", "345")],
    edits=[Edit(kind, 0) for kind in ("none", "none", "none", "stub")],
)
def test_edited_contexts_open_rows_and_train_each_sampled_token_once(
    name: str, question: list[dict[str, Any]], steps: list[Step], edits: list[Edit]
) -> None:
    asyncio.run(_edit_and_play(tokens_of(name), question, steps, edits))


async def _edit_and_play(
    tokens: ChatTokens, question: list[dict[str, Any]], steps: list[Step], edits: list[Edit]
) -> None:
    trainer, engine = trainer_of(tokens, steps)
    messages = list(question)
    for turn, (step, edit) in enumerate(zip(steps, edits, strict=False), 1):
        messages = messages if turn == 1 else edit.apply(messages)
        mask: list[int] | None = None
        if turn > 1:
            mask = await _mask_by_prefix(trainer.get_session("r"), messages)
        completion = await trainer.complete(
            {"rollout_id": "r", "messages": messages, "response_mask": mask}, named_turn=turn
        )
        messages = [*messages, completion["choices"][0]["message"], *step.messages()]
    session = trainer.get_session("r")
    check_rows(session, engine, steps)
    ended = await trainer.end("r", {"reward": 1.0})
    assert ended["trained_tokens"] == sum(session.response_mask)


async def _mask_by_prefix(session: TrainerSession, messages: list[dict[str, Any]]) -> list[int] | None:
    """One 0 for each id of the next prompt behind what it shares with the ids that are held."""
    plan = await plan_turn(session, messages, (), text_counts=False)
    prompt, held = plan.prompt.ids, session.held_ids
    if plan.prompt.parent is None:
        assert prompt == rendered(session.tokens.tokenizer, messages)
    shared = next(
        (at for at, (a, b) in enumerate(zip(prompt, held, strict=False)) if a != b), min(len(prompt), len(held))
    )
    return [0] * (len(prompt) - shared) or None


@SETTINGS
@given(question=QUESTIONS, steps=STEPS)
def test_a_session_is_an_item_that_the_buffer_takes(question: list[dict[str, Any]], steps: list[Step]) -> None:
    asyncio.run(_write(question, steps))


async def _write(question: list[dict[str, Any]], steps: list[Step]) -> None:
    written: list[Mapping[str, Any]] = []

    class Sink:
        async def write(self, items: Any, *, job_id: str | None = None) -> dict[str, Any]:
            written.extend(items)
            return {}

    tokens = tokens_of("demo")
    trainer = trainer_side(engine_of(tokens, steps), tokens.tokenizer, sink=Sink())
    messages, mask = list(question), None
    for turn, step in enumerate(steps, 1):
        mask = None if turn == 1 else await _mask_by_prefix(trainer.get_session("r"), messages)
        completion = await trainer.complete(
            {"rollout_id": "r", "messages": messages, "response_mask": mask}, named_turn=turn
        )
        messages = [*messages, completion["choices"][0]["message"], *step.messages()]
    session = trainer.get_session("r")
    await trainer.end("r", {"reward": 0.25, "job_id": "j", "instance_id": "i"})
    item = decode_written_item(orjson.loads(orjson.dumps(written[0])))
    assert [list(one.output_ids) for one in item.generations] == [list(one.output_ids) for one in session.generations]
    assert [list(one.prompt_ids) for one in item.generations] == [list(one.prompt_ids) for one in session.generations]
    assert (item.uid, item.instance_id, item.reward) == ("r", "i", 0.25)
