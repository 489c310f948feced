"""The engine of the crash test with agents: each sample has a name of its own in its text. It notes what it was asked.

    python -m tests.crash.agents_engine PLAN

It leads each agent through ``COMMANDS`` with the tool that the agent brought.
"""

from __future__ import annotations

import json
import re
import sys
import uuid
from typing import Any

from rollout_buffer_lab.scripted_engine.conversation import START_OF_TURN, Conversation
from rollout_buffer_lab.scripted_engine.rng import SessionRng
from rollout_buffer_lab.scripted_engine.scripted_backend import ASSISTANT_HEADER, ScriptedBackend
from rollout_buffer_lab.scripted_engine.settings import ScriptedEngineSettings
from rollout_buffer_lab.sglang_routes.app import sglang_app
from rollout_buffer_lab.sglang_routes.records import GenerateCall, Sampled
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.http_serving import serve_until_stopped, serving
from slime_plugins.rollout_buffer.tokenizer_loading import load_tokenizer
from tests.command_line_agents import LAST_WORDS
from tests.crash.workload import Journal, load_plan

COMMANDS = ("cat calc.py", "ls", "sed -i 's/a - b/a + b/' calc.py", "cat calc.py", "wc -l calc.py")
TURNS = len(COMMANDS) + 1
NAME = re.compile(r"sample-[0-9a-f]{12}")
BEGUN_NAME = re.compile(r"sample-([0-9a-f]*)")
TOOLS = {"exec_command": "cmd", "Bash": "command", "take_screenshot": "why"}
"""The tool of each agent, with the argument that takes the command. An agent without tools is only told."""
LATENCY_S, TOKEN_LATENCY_S = 0.2, 0.01


def name_of(text: str) -> str:
    """Returns the name of the sample that a text is of; "" without one."""
    found = NAME.search(text)
    return found[0] if found else ""


def reply(conversation: Conversation, *, skill: float, rng: SessionRng) -> str:
    """The policy: the step is the number of replies before."""
    step = len(conversation.replies)
    begun = BEGUN_NAME.search(conversation.begun_reply)
    name = f"sample-{begun[1] if begun else ''}{uuid.uuid4().hex}"[: len("sample-") + 12]
    if step >= TURNS - 1:
        return f"Step {step}, {name}. {LAST_WORDS}"
    said = f"Step {step}, {name}: {COMMANDS[step]}"
    tool = next((tool for tool in TOOLS if f'"name": "{tool}"' in conversation.turns[0].text), None)
    if tool is None:
        return said
    call = {"name": tool, "arguments": {TOOLS[tool]: COMMANDS[step]}}
    return f"{said}\n<tool_call>\n{json.dumps(call)}\n</tool_call>"


class NotingBackend(ScriptedBackend):
    """Notes the step of each request as it comes, and the ids of each reply that came to its end, its beginning too."""

    def __init__(self, settings: ScriptedEngineSettings, tokenizer: Any, journal: Journal) -> None:
        super().__init__(settings, tokenizer, reply)
        self._journal = journal

    async def generate(self, call: GenerateCall) -> Sampled:
        begun, step = self._begun(list(call.prompt))
        self._journal.note(session=call.session, asked=step)
        sampled = await super().generate(call)
        if sampled.finish_reason["type"] == "stop":
            self._journal.note(session=call.session, ids=[*begun, *sampled.output_ids])
        return sampled

    def _begun(self, prompt: list[Any]) -> tuple[list[int], int]:
        """Returns the ids of the reply that a prompt has begun, and the number of replies before."""
        start = len(prompt) - prompt[::-1].index(self._start_id) + len(self._encode(ASSISTANT_HEADER))
        return prompt[start:], self.tokenizer.decode(prompt).count(START_OF_TURN + ASSISTANT_HEADER) - 1


def main(plan_path: str) -> int:
    """Serves until it is ended."""
    plan = load_plan(plan_path)
    settings = ScriptedEngineSettings(
        port=plan.engine_port, latency_s=LATENCY_S, token_latency_s=TOKEN_LATENCY_S, skill=1.0
    )
    journal = Journal(plan.path("engine.jsonl"))
    backend = NotingBackend(settings, load_tokenizer(str(DEMO_TOKENIZER_PATH), download=False), journal)
    serve_until_stopped(serving(sglang_app(backend), settings.host, settings.port, handler_cancellation=True))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
