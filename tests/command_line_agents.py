"""The agents of the command line, Claude Code and Codex, and a small repository that they mend.

``ROLLOUT_BUFFER_TEST_NPM`` names a folder in which ``npm install @anthropic-ai/claude-code @openai/codex`` was run.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROGRAMS = Path(os.environ.get("ROLLOUT_BUFFER_TEST_NPM", "")).resolve() / "node_modules" / ".bin"
CLAUDE, CODEX = "claude", "codex"
TASK = "Mend add in calc.py."
MENDED = "def add(a, b):\n    return a + b\n"
LAST_WORDS = "It adds now."
"""How the engine ends the task."""


def mend(
    program: str, opened: Mapping[str, Any], home: Path, more: Mapping[str, str] | None = None, *, timeout_s: float
) -> str:
    """Lets an agent mend a new repository below ``home`` through a session; returns why it did not, "" if it did.

    ``more`` is added to the agent's environment.
    """
    repository = home / "repository"
    repository.mkdir(parents=True)
    (repository / "calc.py").write_text(MENDED.replace("+", "-"), encoding="utf-8")
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "ANTHROPIC_BASE_URL": opened["anthropic_base_url"],
        "ANTHROPIC_API_KEY": opened["api_key"],
        "OPENAI_API_KEY": opened["api_key"],
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        **(more or {}),
    }
    try:
        ended = subprocess.run(
            [str(PROGRAMS / program), *_arguments(program, opened)],
            cwd=repository, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"it did not end within {timeout_s:.0f} s"
    if ended.returncode != 0 or LAST_WORDS not in ended.stdout:
        return f"it ended with {ended.returncode}: {(ended.stdout + ended.stderr)[-300:]}"
    is_mended = (repository / "calc.py").read_text(encoding="utf-8") == MENDED
    return "" if is_mended else "it did not mend the repository"


def _arguments(program: str, opened: Mapping[str, Any]) -> list[str]:
    if program == CLAUDE:
        return ["-p", TASK, "--model", "policy", "--allowedTools", "Bash", "Edit", "Read"]
    provider = f'{{name="rb",base_url="{opened["base_url"]}",wire_api="responses",env_key="OPENAI_API_KEY"}}'
    settings = ["-c", 'model_provider="rb"', "-c", f"model_providers.rb={provider}"]
    return ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", "policy",
            *settings, TASK]  # fmt: skip
