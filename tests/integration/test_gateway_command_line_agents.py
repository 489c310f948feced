"""The agents of the command line, Claude Code and Codex, mend a small repository at the gateway.

``ROLLOUT_BUFFER_TEST_NPM`` names a folder in which ``npm install @anthropic-ai/claude-code @openai/codex`` was run.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from slime.utils.mask_utils import pack_training_rows
from slime_plugins.rollout_buffer.testing.fake_engine import FakeEngine
from tests.gateway_support import gateway_on, start_session_job, tokenizer

pytestmark = pytest.mark.timeout(180)

PROGRAMS = Path(os.environ.get("ROLLOUT_BUFFER_TEST_NPM", "")).resolve() / "node_modules" / ".bin"
TASK = "Mend add in calc.py."
MENDED = "def add(a, b):\n    return a + b\n"
CLAUDE = ["claude", "-p", TASK, "--model", "policy", "--allowedTools", "Bash"]
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
    if not (PROGRAMS / command[0]).exists():
        pytest.skip(f"ROLLOUT_BUFFER_TEST_NPM names no folder with {command[0]}")
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "calc.py").write_text(MENDED.replace("+", "-"))
    script = [
        "I look." + call(tool, **{argument: "cat calc.py"}) + call(tool, **{argument: "ls"}),
        "<think>\nA minus.\n</think>\n\nI mend it." + call(tool, **{argument: "sed -i 's/a - b/a + b/' calc.py"}),
        "It adds now.",
    ]
    async with gateway_on(tmp_path, FakeEngine(script, tokenizer=tokenizer)) as gateway:
        job = start_session_job(gateway.buffer, n=1)
        opened = await gateway.open(job)
        process = await asyncio.create_subprocess_exec(
            PROGRAMS / command[0],
            *command[1:],
            *(codex_settings(opened) if command is CODEX else []),
            cwd=repository,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(tmp_path),
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
        closed = await gateway.close(opened, reward=1.0)
        assert (closed.body["turns"], closed.body["branches"]) == (3, 1)
        (row,) = pack_training_rows(gateway.generations(job, opened["session_id"]))
        trained = [token for token, mask in zip(row.token_ids, row.loss_mask, strict=True) if mask]
        assert tokenizer.decode(trained) == "".join(f"{text}<|im_end|>" for text in script)
