"""One user of the crash test with agents: lets agents of one kind play a session each, until it is calm.

    python -m tests.crash.agents_player PLAN KIND NUMBER

The agents are real clients with the retries that they bring: Claude Code, Codex, a loop over the ``openai`` package and
one over the ``anthropic`` package whose tool results are screenshots. Only opening and closing are retried from here.
"""

from __future__ import annotations

import base64
import io
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
from PIL import Image

from tests.crash.agent import CutError, retried
from tests.crash.agents_engine import LAST_WORDS, TURNS
from tests.crash.workload import SESSIONS_JOB, Journal, load_plan

TASK = "Mend add in calc.py."
MENDED = "def add(a, b):\n    return a + b\n"
SESSION_LIMIT_S = 300.0
PROGRAMS = Path(os.environ.get("ROLLOUT_BUFFER_TEST_NPM", "")).resolve() / "node_modules" / ".bin"


@dataclass(slots=True)
class Played:
    """What the agent was told, and why its run did not succeed, if it did not."""

    told: list[str] = field(default_factory=list)
    problem: str = ""


def main(plan_path: str, kind: str, number: str) -> int:
    """Plays until it is calm; returns 0."""
    plan = load_plan(plan_path)
    name = f"{kind}-{number}"
    journal = Journal(plan.path(f"agents-{name}.jsonl"))
    while not plan.is_calm:
        try:
            opened = retried(f"{plan.gateway_url}/sessions", {"job_id": SESSIONS_JOB})
        except (requests.RequestException, CutError) as error:
            journal.note(failed=f"{type(error).__name__}: {error}"[:300])
            continue
        session = opened["session_id"]
        journal.note(opened=session)
        played = Played()
        PLAYERS[kind](opened, plan.path("homes", name), played)
        url = f"{plan.gateway_url}/sessions/{session}"
        try:
            if played.problem:
                status = retried(f"{url}/abandon", {"reason": "the agent failed"})["status"]
            else:
                status = retried(f"{url}/close", {"reward": 1.0})["status"]
        except (requests.RequestException, CutError) as error:
            status = f"{error}"[:300]
        journal.note(session=session, kind=kind, told=played.told, problem=played.problem, status=status)
    return 0


# --- the agents ------------------------------------------------------------------------------------------------------


def play_openai(opened: dict[str, Any], home: Path, played: Played) -> None:
    """A loop of chat completions."""
    import openai  # here: the tests of this program read only the name of a folder

    messages: list[Any] = [{"role": "user", "content": TASK}]
    with openai.OpenAI(base_url=opened["base_url"], api_key=opened["api_key"]) as client:
        for _ in range(TURNS):
            try:
                said = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content
            except openai.OpenAIError as error:
                played.problem = f"{type(error).__name__}: {error}"[:300]
                return
            played.told.append(said or "")
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Done."}]


def play_screenshots(opened: dict[str, Any], home: Path, played: Played) -> None:
    """A loop of Messages; each tool result is a new screenshot."""
    import anthropic  # here: the tests of this program read only the name of a folder

    rng = random.Random(opened["session_id"])
    schema = {"type": "object", "properties": {"why": {"type": "string"}}}
    tools: list[Any] = [{"name": "take_screenshot", "description": "Looks at the screen.", "input_schema": schema}]
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": TASK}, screenshot(rng)]}]
    with anthropic.Anthropic(base_url=opened["anthropic_base_url"], api_key=opened["api_key"]) as client:
        for _ in range(TURNS):
            try:
                reply = client.messages.create(model="policy", max_tokens=300, tools=tools, messages=messages)
            except anthropic.AnthropicError as error:
                played.problem = f"{type(error).__name__}: {error}"[:300]
                return
            played.told.append("".join(block.text for block in reply.content if block.type == "text"))
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": [screenshot(rng)]}
                for block in reply.content
                if block.type == "tool_use"
            ]
            messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": results}]


def screenshot(rng: random.Random) -> dict[str, Any]:
    """Returns a picture of noise as a part of Anthropic's Messages."""
    file = io.BytesIO()
    Image.frombytes("RGB", (96, 96), rng.randbytes(96 * 96 * 3)).save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def play_claude(opened: dict[str, Any], home: Path, played: Played) -> None:
    """Claude Code in an empty home."""
    command = ["claude", "-p", TASK, "--model", "policy", "--allowedTools", "Bash", "Edit", "Read"]
    for event in run_program([*command, "--output-format", "stream-json", "--verbose"], opened, home, played):
        if event.get("type") == "assistant":
            played.told += [block["text"] for block in event["message"]["content"] if block["type"] == "text"]


def play_codex(opened: dict[str, Any], home: Path, played: Played) -> None:
    """Codex in an empty home."""
    provider = f'{{name="rb",base_url="{opened["base_url"]}",wire_api="responses",env_key="OPENAI_API_KEY"}}'
    command = ["codex", "exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    command += ["-m", "policy", "-c", 'model_provider="rb"', "-c", f"model_providers.rb={provider}", TASK]
    for event in run_program(command, opened, home, played):
        item = event.get("item", {})
        if event.get("type") == "item.completed" and item["type"] == "agent_message":
            played.told.append(item["text"])


def run_program(command: list[str], opened: dict[str, Any], home: Path, played: Played) -> list[dict[str, Any]]:
    """Lets an agent mend a new repository; returns the events that it printed."""
    shutil.rmtree(home, ignore_errors=True)
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
        **{name: value for name, value in os.environ.items() if name.startswith("ROLLOUT_BUFFER_CRASH")},
    }
    try:
        ended = subprocess.run(
            [str(PROGRAMS / command[0]), *command[1:]],
            cwd=repository, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=SESSION_LIMIT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        played.problem = f"it did not end within {SESSION_LIMIT_S:.0f} s"
        return []
    if ended.returncode != 0 or LAST_WORDS not in ended.stdout:
        played.problem = f"it ended with {ended.returncode}: {(ended.stdout + ended.stderr)[-300:]}"
    elif (repository / "calc.py").read_text(encoding="utf-8") != MENDED:
        played.problem = "it did not mend the repository"
    return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]


PLAYERS: dict[str, Callable[[dict[str, Any], Path, Played], None]] = {
    "claude": play_claude,
    "codex": play_codex,
    "openai": play_openai,
    "screenshots": play_screenshots,
}

if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
