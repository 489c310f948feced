"""The single-turn template and the math generator that fills it in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from slime.utils.mask_utils import pack_training_rows
from slime_plugins.rollout_buffer.errors import ConfigError, EngineError, EnvironmentSetupError
from slime_plugins.rollout_buffer.generator.base_generator import GeneratorContext, SingleTurnGenerator
from slime_plugins.rollout_buffer.generator.math_generator import MathGenerator
from slime_plugins.rollout_buffer.generator.math_reward import judge as judge_module
from slime_plugins.rollout_buffer.generator.math_reward.answers import MAX_ANSWER_CHARACTERS, final_answer
from slime_plugins.rollout_buffer.generator.math_reward.judge import MathJudge
from slime_plugins.rollout_buffer.testing.fake_engine import FakeEngine, ScriptedReply
from slime_plugins.rollout_buffer.types import EpisodeRequest, Instance, Outcome, StopReason, Trajectory
from tests.demo_tokens import chat_ids, tokenizer, trained_text
from tests.episode_requests import episode_of

PROBLEM = {"prompt": [{"role": "user", "content": "What is 6 * 7?"}], "label": "42"}


def request(data: dict[str, Any], max_new_tokens: int = 200) -> EpisodeRequest:
    return episode_of("7", data, uid="u1", max_new_tokens=max_new_tokens)


async def started(generator: SingleTurnGenerator, script: Sequence[ScriptedReply]) -> FakeEngine:
    engine = FakeEngine(script, tokenizer=tokenizer)
    await generator.start(GeneratorContext(job_id="job", engine=engine, tokenizer=tokenizer, concurrency=1))
    return engine


class FixedReward(SingleTurnGenerator):
    """What somebody writes who copies the template."""

    async def reward(self, instance: Instance, text: str) -> float:
        return 0.5


async def play(script: Sequence[ScriptedReply], data: dict[str, Any] | None = None, **keywords: Any) -> Trajectory:
    generator = FixedReward()
    await started(generator, script)
    return await generator.play(request(data or PROBLEM, **keywords))


# ---- the template ----------------------------------------------------------------------------------------------------


async def test_a_reply_is_recorded_with_its_reward_and_its_tokens() -> None:
    trajectory = await play(["It is 42."])
    assert (trajectory.uid, trajectory.instance_id, trajectory.reward) == ("u1", "7", 0.5)
    assert (trajectory.outcome, trajectory.stop_reason) == (Outcome.COMPLETED, StopReason.STOP)
    assert trajectory.messages[-1] == {"role": "assistant", "content": "It is 42."}
    (row,) = pack_training_rows(trajectory.generations)
    assert trained_text(row.token_ids, row.loss_mask) == "It is 42.<|im_end|>"
    assert row.token_ids[: -row.response_length] == chat_ids("What is 6 * 7?")


async def test_a_prompt_may_be_a_plain_string() -> None:
    trajectory = await play(["Hi."], {"prompt": "Say hi."})
    assert trajectory.messages[0] == {"role": "user", "content": "Say hi."}


async def test_a_broken_engine_is_an_error_and_no_reward() -> None:
    with pytest.raises(EngineError):
        await play([EngineError("away")])


async def test_the_template_alone_says_what_to_override() -> None:
    generator = SingleTurnGenerator()
    await started(generator, ["Hi."])
    with pytest.raises(NotImplementedError, match="must override reward"):
        await generator.play(request(PROBLEM))


async def test_a_job_without_tokenizer_is_refused_at_start() -> None:
    context = GeneratorContext(job_id="job", engine=FakeEngine([]), tokenizer=None, concurrency=1)
    with pytest.raises(ConfigError, match="tokenizer_path"):
        await FixedReward().start(context)


# ---- finding the answer ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"first \boxed{1}, no: \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{ x = {3} }", "x = {3}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{a\boxed{b}}", r"a\boxed{b}"),
        (r"\boxed{4} and then \boxed{never closed", "4"),
        ("between 3 and 1,234.5 apples.", "1,234.5"),
        ("it is -7.", "-7"),
        ("so 3/4, of 2 cakes", "2"),
        ("half is 1/2", "1/2"),
        ("version v2 has no number", None),
        ("no number", None),
        (r"\boxed{}", None),
        (r"\boxed{" + "9" * (MAX_ANSWER_CHARACTERS + 1) + "}", None),
    ],
)
def test_the_last_box_counts_and_without_one_the_last_number(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize("text", [r"\boxed{" * 100_000, "{" * 300_000 + "}" * 300_000, "1," * 300_000, "-" * 500_000])
def test_hostile_text_is_read_in_no_time(text: str) -> None:
    start = time.process_time()
    final_answer(text)
    assert time.process_time() - start < 2


@given(st.text(max_size=200))
def test_any_text_has_an_answer_or_none(text: str) -> None:
    answer = final_answer(text)
    assert answer is None or 0 < len(answer) <= MAX_ANSWER_CHARACTERS


# ---- the judge -------------------------------------------------------------------------------------------------------


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def judge() -> AsyncIterator[MathJudge]:
    math_judge = MathJudge(processes=2, timeout_s=30)
    await math_judge.start()
    yield math_judge
    await math_judge.close()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("label", "answer", "equal"),
    [
        ("1/2", r"\frac{1}{2}", True),
        ("0.5", r"\frac12", True),
        (r"\boxed{4}", "2^2", True),
        ("x=3", "3", True),
        ("(x+1)^2", "x^2+2x+1", True),
        ("42", "41", False),
        ("42", r"\frac{", False),
        ("42", "", False),
    ],
)
async def test_equal_means_mathematically_equal(judge: MathJudge, label: str, answer: str, equal: bool) -> None:
    assert await judge.are_equal(label, answer) is equal


@pytest.mark.asyncio(loop_scope="module")
async def test_a_question_that_was_given_up_does_not_answer_the_next(judge: MathJudge) -> None:
    for _ in range(3):
        asking = asyncio.create_task(judge.are_equal("1", "1.0"))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert await judge.are_equal("1", "2") is False


async def test_a_missing_library_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    program = tmp_path / "judge.py"
    program.write_text('print(\'{"error": "No module named math_verify"}\')', encoding="utf-8")
    monkeypatch.setattr(judge_module, "_PROGRAM", program)
    math_judge = MathJudge()
    with pytest.raises(ConfigError, match=r"pip install .*\[math\]"):
        await math_judge.start()
    await math_judge.close()


# ---- the generator ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        (r"So the answer is \boxed{42}.", 1.0),
        (r"\boxed{\frac{84}{2}}", 1.0),
        ("The answer is 42.", 1.0),
        (r"\boxed{41}", 0.0),
        ("I do not know.", 0.0),
    ],
)
async def test_the_right_answer_earns_one(reply: str, reward: float) -> None:
    generator = MathGenerator()
    await started(generator, [reply])
    try:
        trajectory = await generator.play(request(PROBLEM))
    finally:
        await generator.close()
    assert trajectory.reward == reward


async def test_a_line_without_a_label_fails_before_anything_is_sampled() -> None:
    generator = MathGenerator()
    engine = await started(generator, ["42"])
    with pytest.raises(EnvironmentSetupError, match="instance 7 needs a label"):
        await generator.play(request({"prompt": "What is 6 * 7?"}))
    await generator.close()
    assert engine.requests == []
