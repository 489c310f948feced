"""An agent of the OpenAI Agents SDK, with a tool, played into a slot. The SDK needs no change.

    pip install openai-agents==0.24.0
    rollout-buffer engine --port 30000
    rollout-buffer serve --gateway-port 8890
    python examples/proxy/openai_agents.py --job JOB_ID [--stream]

The job has task type ``external``, ``remote_engine_url`` and ``tokenizer_path``; each of its lines has a ``question``
and an ``answer``. ``openai_client.py`` starts such a job. The SDK uses a client with the session's ``base_url``; its
own tracing, which would upload the conversation, is off.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import urllib.request
from typing import Any

from agents import (  # type: ignore[import-not-found] # an optional framework
    Agent,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI


@function_tool  # type: ignore[untyped-decorator] # as above
def add(a: int, b: int) -> int:
    """Adds two integers."""
    return a + b


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as response:
        reply: dict[str, Any] = json.loads(response.read())
        return reply


async def play(session: dict[str, Any], *, streamed: bool) -> str:
    """Runs the agent on the session's question and returns its final answer."""
    client = AsyncOpenAI(base_url=session["base_url"], api_key=session["api_key"])
    model = OpenAIChatCompletionsModel(model=session["model"], openai_client=client)
    agent = Agent(name="adder", instructions="You add numbers. Use the tool.", model=model, tools=[add])
    question = session["instance"]["question"]
    if not streamed:
        return str((await Runner.run(agent, question, max_turns=6)).final_output)
    running = Runner.run_streamed(agent, question, max_turns=6)
    async for _ in running.stream_events():
        pass
    return str(running.final_output)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gateway", default="http://127.0.0.1:8890")
    parser.add_argument("--job", required=True)
    parser.add_argument("--stream", action="store_true")
    options = parser.parse_args()
    set_tracing_disabled(True)
    session = post(f"{options.gateway}/sessions", {"job_id": options.job})
    answer = await play(session, streamed=options.stream)
    sys.stdout.write(f"the agent said: {answer}\n")
    reward = float(session["instance"]["answer"] in answer)
    closed = post(f"{options.gateway}/sessions/{session['session_id']}/close", {"reward": reward})
    sys.stdout.write(json.dumps(closed) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
