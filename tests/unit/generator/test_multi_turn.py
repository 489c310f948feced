"""A conversation of several turns: what is trained, what it earned, and how it ends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slime.utils.mask_utils import pack_training_rows
from slime_plugins.rollout_buffer.engine.base import GenerateReply, GenerateRequest
from slime_plugins.rollout_buffer.errors import EngineError, GeneratorError
from slime_plugins.rollout_buffer.generator.base_generator import Chat, MultiTurnGenerator, Score
from slime_plugins.rollout_buffer.generator.phase_timer import PhaseTimer
from slime_plugins.rollout_buffer.generator.registry import load_file
from slime_plugins.rollout_buffer.rules.trajectory_stats import facts_of
from slime_plugins.rollout_buffer.testing.episodes import episode_request, play_episode
from slime_plugins.rollout_buffer.testing.fake_engine import FakeEngine, ScriptedReply
from slime_plugins.rollout_buffer.types import Instance, Outcome, StopReason, Trajectory
from slime_plugins.rollout_buffer.wire import decode_generations, encode_generations
from tests.demo_tokens import tokenizer, trained_text

TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}


class Twice(MultiTurnGenerator):
    """Asks again, in two messages, and looks at the second reply."""

    async def converse(self, chat: Chat, instance: Instance) -> float | Score:
        chat.tools = [TOOL]
        first = await chat.sample({"role": "system", "content": "Be brief."}, "40 + 2?")
        with chat.timer.phase("act"):
            result = f"{first} is wrong."
        second = await chat.sample({"role": "tool", "content": result}, "Again?")
        return Score(reward=0.5, success=second == "It is 42.", parts={"right": 1.0}, turn_rewards=[0.0, 0.5])


async def played(generator: MultiTurnGenerator, *replies: ScriptedReply, max_new_tokens: int = 100) -> Trajectory:
    request = episode_request({"instance_id": "a"}, max_new_tokens=max_new_tokens)
    return await play_episode(generator, request, FakeEngine(replies, tokenizer=tokenizer), tokenizer=tokenizer)


async def test_replies_are_trained_and_what_is_said_between_them_is_context_of_one_row() -> None:
    trajectory = await played(Twice(), "It is 41.", "It is 42.")
    (row,) = pack_training_rows(trajectory.generations)
    assert trained_text(row.token_ids, row.loss_mask) == "It is 41.<|im_end|>It is 42.<|im_end|>"
    whole = tokenizer.apply_chat_template(trajectory.messages, tools=[TOOL], tokenize=False)
    assert tokenizer.decode(row.token_ids) == whole.rstrip("\n")
    assert [message["role"] for message in trajectory.messages] == [
        "system", "user", "assistant", "tool", "user", "assistant"
    ]  # fmt: skip


async def test_an_episode_reports_success_parts_and_seconds() -> None:
    trajectory = await played(Twice(), "It is 41.", "It is 42.")
    facts = facts_of(trajectory.extra_info, trajectory.timings_s, trajectory.generations)
    assert (trajectory.reward, facts.success, facts.turns) == (0.5, 1.0, 2)
    assert trajectory.extra_info["reward_breakdown"] == {"success": True, "right": 1.0}
    assert trajectory.turn_rewards == [0.0, 0.5]
    assert trajectory.timings_s.keys() == {"generate", "act"}


class Slow(FakeEngine):
    async def generate(self, request: GenerateRequest) -> GenerateReply:
        return replace(await super().generate(request), engine_s=3.0)


class Acts(MultiTurnGenerator):
    """Acts for 7 seconds after the first reply, and for 2 after the second."""

    async def converse(self, chat: Chat, instance: Instance) -> float:
        now = 100.0
        chat.timer = PhaseTimer(lambda: now)
        for seconds in (7, 2):
            await chat.sample("What now?")
            now += seconds
        return 1.0


async def test_each_turn_reports_the_engines_seconds_and_those_until_the_next_request_or_the_end() -> None:
    engine = Slow(["A.", "B."], tokenizer=tokenizer)
    trajectory = await play_episode(Acts(), episode_request({"instance_id": "a"}), engine, tokenizer=tokenizer)
    stored = decode_generations(encode_generations(trajectory.generations))
    assert [(one.engine_s, one.environment_s) for one in stored] == [(3.0, 7.0), (3.0, 2.0)]


async def test_a_reply_that_is_cut_ends_the_episode_without_reward() -> None:
    trajectory = await played(Twice(), "It is 41.", "It is 42.", max_new_tokens=2)
    assert (trajectory.outcome, trajectory.stop_reason) == (Outcome.TRUNCATED, StopReason.MAX_TOKENS)
    assert (trajectory.reward, len(trajectory.generations)) == (0.0, 1)
    assert "success" not in trajectory.extra_info


async def test_a_turn_without_a_token_is_a_failure_of_the_engine_and_earns_no_reward() -> None:
    with pytest.raises(EngineError, match="ended a turn without a token"):
        await played(Twice(), ())


async def test_an_episode_without_reply_or_without_question_breaks_the_contract() -> None:
    class Silent(MultiTurnGenerator):
        async def converse(self, chat: Chat, instance: Instance) -> float:
            return 1.0

    class Mute(MultiTurnGenerator):
        async def converse(self, chat: Chat, instance: Instance) -> float:
            await chat.sample()
            return 1.0

    for generator, sentence in ((Silent(), "Silent sampled no reply"), (Mute(), "needs a message")):
        with pytest.raises(GeneratorError, match=sentence):
            await played(generator, "It is 41.")


@pytest.mark.parametrize(("own", "required"), [("", ("tokenizer_path",)), ("REQUIRED_KEYS = ('place',)", ("place",))])
def test_a_module_requires_what_its_conversations_need_unless_it_says_so_itself(
    tmp_path: Path, own: str, required: tuple[str, ...]
) -> None:
    (tmp_path / "mine.py").write_text(
        "from slime_plugins.rollout_buffer import SingleTurnGenerator\n"
        f"TASK_TYPE = 'mine'\n{own}\ncreate_generator = SingleTurnGenerator\n"
    )
    plugin = load_file(tmp_path / "mine.py", "mine")
    assert plugin is not None
    assert plugin.required_keys == required
