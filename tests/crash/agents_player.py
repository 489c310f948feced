"""One user of the crash test with agents: lets agents of one kind play a session each, until it is calm.

    python -m tests.crash.agents_player PLAN KIND NUMBER

The agents are real clients with the retries that they bring: Claude Code, Codex, a loop over the ``openai`` package and
one over the ``anthropic`` package whose tool results are screenshots. They speak to the gateway through
``agents_proxy``. Only opening and closing are retried from here.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import requests

from tests.command_line_agents import CLAUDE, CODEX, TASK, mend
from tests.crash.agent import CutError, anthropic_part, noise, retried
from tests.crash.agents_engine import TURNS
from tests.crash.workload import MARK, SESSIONS_JOB, Journal, load_plan

SESSION_LIMIT_S = 300.0


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
        problem = PLAYERS[kind](opened, plan.path("homes", name))
        url = f"{plan.gateway_url}/sessions/{session}"
        try:
            if problem:
                status = retried(f"{url}/abandon", {"reason": "the agent failed"}, for_s=SESSION_LIMIT_S)["status"]
            else:
                status = retried(f"{url}/close", {"reward": 1.0}, for_s=SESSION_LIMIT_S)["status"]
        except (requests.RequestException, CutError) as error:
            status = f"{error}"[:300]
        journal.note(session=session, kind=kind, problem=problem, status=status)
    return 0


# --- the agents ------------------------------------------------------------------------------------------------------


def play_openai(opened: dict[str, Any], home: Path) -> str:
    """A loop of chat completions."""
    import openai  # here: the tests of this program read only the name of a folder

    messages: list[Any] = [{"role": "user", "content": TASK}]
    with openai.OpenAI(base_url=opened["base_url"], api_key=opened["api_key"]) as client:
        for _ in range(TURNS):
            try:
                said = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content
            except openai.OpenAIError as error:
                return f"{type(error).__name__}: {error}"[:300]
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Done."}]
    return ""


def play_screenshots(opened: dict[str, Any], home: Path) -> str:
    """A loop of Messages; each tool result is a new screenshot."""
    import anthropic  # here: the tests of this program read only the name of a folder

    rng = random.Random(opened["session_id"])
    schema = {"type": "object", "properties": {"why": {"type": "string"}}}
    tools: list[Any] = [{"name": "take_screenshot", "description": "Looks at the screen.", "input_schema": schema}]
    asked: list[Any] = [{"type": "text", "text": TASK}, anthropic_part(noise(rng, 96))]
    messages: list[Any] = [{"role": "user", "content": asked}]
    with anthropic.Anthropic(base_url=opened["anthropic_base_url"], api_key=opened["api_key"]) as client:
        for _ in range(TURNS):
            try:
                reply = client.messages.create(model="policy", max_tokens=300, tools=tools, messages=messages)
            except anthropic.AnthropicError as error:
                return f"{type(error).__name__}: {error}"[:300]
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": [anthropic_part(noise(rng, 96))]}
                for block in reply.content
                if block.type == "tool_use"
            ]
            messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": results}]
    return ""


def play_program(program: str, opened: dict[str, Any], home: Path) -> str:
    """An agent of the command line in an empty home."""
    shutil.rmtree(home, ignore_errors=True)
    return mend(program, opened, home, {MARK: os.environ[MARK]}, timeout_s=SESSION_LIMIT_S)


PLAYERS: dict[str, Callable[[dict[str, Any], Path], str]] = {
    "claude": partial(play_program, CLAUDE),
    "codex": partial(play_program, CODEX),
    "openai": play_openai,
    "screenshots": play_screenshots,
}
"""Each plays a session and returns why its agent did not succeed, "" if it did."""

if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
