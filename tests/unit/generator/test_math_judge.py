"""The judge of math answers under what happens to processes: killed, frozen, out of memory, out of time."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from slime_plugins.rollout_buffer.errors import JudgeError
from slime_plugins.rollout_buffer.generator.base_generator import GeneratorContext
from slime_plugins.rollout_buffer.generator.math_generator import MathGenerator
from slime_plugins.rollout_buffer.generator.math_reward import judge as judge_module
from slime_plugins.rollout_buffer.generator.math_reward.judge import MathJudge
from slime_plugins.rollout_buffer.testing.fake_engine import FakeEngine
from tests.demo_tokens import tokenizer
from tests.episode_requests import episode_of
from tests.waiting import until

# What hangs is bounded by processor time, of which a crowded machine gives little; and asyncio never comes back from a
# start of a process that is cancelled with all else of its loop (3.11 to 3.13), as after pytest's own timeout.
pytestmark = pytest.mark.timeout(300)

SCRIPTED = """
import json, os, signal, sys, time
print('{"ready": true}', flush=True)
for line in sys.stdin:
    if os.path.exists(__file__ + ".kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05)
    print(json.dumps({"equal": json.loads(line)["answer"] != "wrong"}), flush=True)
"""


class KillSwitch:
    """While it is set, each scripted judge process is killed by the first question that it reads."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def set(self) -> None:
        self._file.touch()

    def clear(self) -> None:
        self._file.unlink()


@pytest.fixture
def kill_switch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> KillSwitch:
    """Scripts the judge: its process does not load the library, which takes seconds of processor time."""
    program = tmp_path / "judge_process.py"
    program.write_text(SCRIPTED, encoding="utf-8")
    monkeypatch.setattr(judge_module, "_PROGRAM", program)
    return KillSwitch(tmp_path / "judge_process.py.kill")


@pytest_asyncio.fixture
async def scripted_judge(kill_switch: KillSwitch) -> AsyncIterator[MathJudge]:
    math_judge = MathJudge(processes=2)
    await math_judge.start()
    yield math_judge
    await math_judge.close()


async def test_expressions_that_never_end_are_wrong_and_hold_up_nobody() -> None:
    judge = MathJudge(processes=2, timeout_s=1)
    await judge.start()
    try:
        hostile = [judge.are_equal("42", "9^{9^{9^{9}}}!") for _ in range(2)]
        assert await asyncio.gather(*hostile, judge.are_equal("1/2", "2/4")) == [False, False, True]
    finally:
        await judge.close()


def judge_pids() -> list[int]:
    """The judge processes of this test process that live."""
    found = []
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in map(int, children.read_text(encoding="ascii").split()):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if any(word.endswith(b"judge_process.py") for word in command):
                found.append(pid)
    return found


async def disturbed(judge: MathJudge, signal_number: int, questions: int = 80) -> list[bool]:
    """Verdicts of right answers, asked while every judge process that appears is disturbed, half a second apart."""

    async def disturb() -> None:
        for _ in range(3):
            await asyncio.sleep(0.5)
            for pid in judge_pids():
                os.kill(pid, signal_number)

    disturbing = asyncio.create_task(disturb())
    asked = [judge.are_equal(f"{n}", f"{n}.0") for n in range(questions)]
    verdicts = await asyncio.gather(*asked)
    await disturbing
    return list(verdicts)


async def test_a_judge_that_is_killed_turns_no_right_answer_into_a_wrong_one(scripted_judge: MathJudge) -> None:
    """As the kernel's out-of-memory killer does it, also to processes that wait for a question."""
    assert all(await disturbed(scripted_judge, signal.SIGKILL))
    assert await scripted_judge.are_equal("1/2", "3/6")  # by a process that lives: the last kills may have left none
    (killed,) = judge_pids()[:1]
    os.kill(killed, signal.SIGKILL)
    await until(lambda: killed not in judge_pids())
    assert await scripted_judge.are_equal("1/2", "2/4")


async def test_without_a_verdict_there_is_a_typed_failure_and_no_reward(
    scripted_judge: MathJudge, kill_switch: KillSwitch
) -> None:
    kill_switch.set()
    with pytest.raises(JudgeError, match="4 processes were tried") as failure:
        await scripted_judge.are_equal("1/2", "2/4")
    assert failure.value.code == "judge"
    kill_switch.clear()
    assert await scripted_judge.are_equal("1/2", "2/4"), "a judge that failed once judges again"


async def test_an_attempt_whose_judge_is_killed_has_no_reward(kill_switch: KillSwitch) -> None:
    generator = MathGenerator()
    engine = FakeEngine(lambda _: r"\boxed{\frac{84}{2}}", tokenizer=tokenizer)
    await generator.start(GeneratorContext(job_id="job", engine=engine, tokenizer=tokenizer, concurrency=1))
    request = episode_of("7", {"prompt": "What is 6 * 7?", "label": "42"}, max_new_tokens=200)
    try:
        kill_switch.set()
        with pytest.raises(JudgeError):
            await generator.play(request)
        kill_switch.clear()
        assert (await generator.play(request)).reward == 1.0
    finally:
        await generator.close()


@pytest.mark.usefixtures("kill_switch")
async def test_a_judge_killed_while_it_starts_is_started_again() -> None:
    math_judge = MathJudge(processes=1)
    starting = asyncio.create_task(math_judge.start())
    while not (pids := judge_pids()):  # noqa: ASYNC110 - another process is waited for
        await asyncio.sleep(0.001)
    os.kill(pids[0], signal.SIGKILL)
    try:
        await starting
        assert await math_judge.are_equal("1/2", "2/4")
    finally:
        await math_judge.close()
