"""The agents of the command line, Claude Code and Codex, mend a small repository at the gateway.

``ROLLOUT_BUFFER_TEST_NPM`` names a folder in which ``npm install @anthropic-ai/claude-code @openai/codex`` was run.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from slime.utils.mask_utils import pack_training_rows
from slime_plugins.rollout_buffer.engine.base import GenerateRequest
from slime_plugins.rollout_buffer.testing.fake_engine import FakeEngine
from tests.gateway_support import gateway_on, start_session_job, tokenizer

pytestmark = pytest.mark.timeout(180)

PROGRAMS = Path(os.environ.get("ROLLOUT_BUFFER_TEST_NPM", "")).resolve() / "node_modules" / ".bin"
TASK = "Mend add in calc.py."
MENDED = "def add(a, b):\n    return a + b\n"
CLAUDE = ["claude", "-p", TASK, "--model", "policy", "--allowedTools", "Bash", "Edit", "Read"]
CODEX = ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", "policy"]


def call(tool: str, **arguments: str) -> str:
    return f"\n<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


def codex_settings(opened: dict[str, Any]) -> list[str]:
    provider = f'{{name="rb",base_url="{opened["base_url"]}",wire_api="responses",env_key="OPENAI_API_KEY"}}'
    return ["-c", 'model_provider="rb"', "-c", f"model_providers.rb={provider}", TASK]


@pytest.mark.parametrize(
    ("command", "tool", "argument"),
    [(CLAUDE, "Bash", "command"), (CODEX, "exec_command", "cmd")],
    ids=["claude", "codex"],
)
async def test_an_agent_mends_a_repository_in_one_row(
    tmp_path: Path, command: list[str], tool: str, argument: str
) -> None:
    script = [
        "I look." + call(tool, **{argument: "cat calc.py"}) + call(tool, **{argument: "ls"}),
        "<think>\nA minus.\n</think>\n\nI mend it." + call(tool, **{argument: "sed -i 's/a - b/a + b/' calc.py"}),
        "It adds now.",
    ]
    async with gateway_on(tmp_path, FakeEngine(script, tokenizer=tokenizer)) as gateway:
        job = start_session_job(gateway.buffer, n=1)
        opened = await gateway.open(job)
        await mended(command, tmp_path / "home", opened)
        closed = await gateway.close(opened, reward=1.0)
        assert (closed.body["turns"], closed.body["branches"]) == (3, 1)
        (row,) = pack_training_rows(gateway.generations(job, opened["session_id"]))
        trained = [token for token, mask in zip(row.token_ids, row.loss_mask, strict=True) if mask]
        assert tokenizer.decode(trained) == "".join(f"{text}<|im_end|>" for text in script)


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


async def mended(command: list[str], home: Path, opened: dict[str, Any]) -> None:
    """Lets an agent mend a new repository at a session."""
    if not (PROGRAMS / command[0]).exists():
        pytest.skip(f"ROLLOUT_BUFFER_TEST_NPM names no folder with {command[0]}")
    repository = home / "repository"
    repository.mkdir(parents=True)
    (repository / "calc.py").write_text(MENDED.replace("+", "-"))
    process = await asyncio.create_subprocess_exec(
        PROGRAMS / command[0],
        *command[1:],
        *(codex_settings(opened) if command is CODEX else []),
        cwd=repository,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "ANTHROPIC_BASE_URL": opened["anthropic_base_url"],
            "ANTHROPIC_API_KEY": opened["api_key"],
            "OPENAI_API_KEY": opened["api_key"],
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    said, complaints = await process.communicate()
    assert "It adds now." in said.decode(), (said + complaints).decode()[-2000:]
    assert (repository / "calc.py").read_text() == MENDED
