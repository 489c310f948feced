"""The agents of the command line, Claude Code and Codex, mend a small repository through the gateway."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from slime_plugins.rollout_buffer.engine.base import GenerateRequest
from slime_plugins.rollout_buffer.testing.fake_engine import FakeEngine
from tests.command_line_agents import CLAUDE, CODEX, PROGRAMS, mend
from tests.gateway_support import gateway_on, start_session_job, tokenizer

pytestmark = pytest.mark.timeout(180)

TIMEOUT_S = 150.0


def call(tool: str, **arguments: str) -> str:
    return f"\n<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize(
    ("program", "tool", "argument"),
    [(CLAUDE, "Bash", "command"), (CODEX, "exec_command", "cmd")],
    ids=["claude", "codex"],
)
async def test_an_agent_mends_a_repository_in_one_row(tmp_path: Path, program: str, tool: str, argument: str) -> None:
    script = [
        "I look." + call(tool, **{argument: "cat calc.py"}) + call(tool, **{argument: "ls"}),
        "<think>\nA minus.\n</think>\n\nI mend it." + call(tool, **{argument: "sed -i 's/a - b/a + b/' calc.py"}),
        "It adds now.",
    ]
    async with gateway_on(tmp_path, FakeEngine(script, tokenizer=tokenizer)) as gateway:
        job = start_session_job(gateway.buffer, n=1)
        opened = await gateway.open(job)
        await mended(program, tmp_path / "home", opened)
        closed = await gateway.close(opened, reward=1.0)
        assert (closed.body["turns"], closed.body["branches"]) == (3, 1)
        assert gateway.trained_text(job, opened["session_id"]) == "".join(f"{text}<|im_end|>" for text in script)


async def test_eight_rollouts_of_an_agent_that_rewrites_its_history_are_eight_rows(tmp_path: Path) -> None:
    """Claude Code completes and shortens arguments, and leaves out a turn of thoughts: 4 rows each under strict."""
    thoughts = "<think>\nSo it is.\n</think>\n\n"
    script = [
        thoughts + "I look." + call("Read", file_path="calc.py"),
        thoughts + call("Edit", file_path="calc.py", old_string="a - b", new_string="a + b  "),
        thoughts,
        thoughts + call("Bash", command="cd . && cat calc.py", timeout="5000"),
        "It adds now.",
    ]
    said: Counter[str] = Counter()

    def reply(request: GenerateRequest) -> str:
        said[str(request.session_id)] += 1
        return script[said[str(request.session_id)] - 1]

    at_once = asyncio.Semaphore(2)
    async with gateway_on(tmp_path, FakeEngine(reply, tokenizer=tokenizer)) as gateway:
        job = start_session_job(gateway.buffer, n=8)

        async def play(number: int) -> None:
            async with at_once:
                opened = await gateway.open(job)
                await mended(CLAUDE, tmp_path / f"home{number}", opened)
                closed = await gateway.close(opened, reward=1.0)
                assert (closed.body["turns"], closed.body["branches"]) == (5, 1)
                about = gateway.item(job, opened["session_id"])["extra_info"]["gateway"]
                assert {"tool_calls", "empty_reply"} <= about["tolerated"].keys()

        await asyncio.gather(*map(play, range(8)))


async def mended(program: str, home: Path, opened: dict[str, Any]) -> None:
    """Lets an agent mend a new repository through a session; skips the test where the agent is not installed."""
    if not (PROGRAMS / program).exists():
        pytest.skip(f"ROLLOUT_BUFFER_TEST_NPM names no folder with {program}")
    assert await asyncio.to_thread(mend, program, opened, home, timeout_s=TIMEOUT_S) == ""
