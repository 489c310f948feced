"""Well-known agent frameworks against the gateway, each with its defaults and nothing but two environment variables.

``ROLLOUT_BUFFER_TEST_AGENTS_PYTHON`` names a Python with ``openai-agents`` 0.24; LangGraph (``langgraph``,
``langchain-openai``, ``langchain-anthropic``) and ``smolagents[openai]`` are skipped where they are missing.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from slime_plugins.rollout_buffer.testing.fake_engine import FakeEngine
from tests.gateway_support import gateway_on, start_session_job, tokenizer

PYTHON = os.environ.get("ROLLOUT_BUFFER_TEST_AGENTS_PYTHON", "")
pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(not PYTHON, reason="ROLLOUT_BUFFER_TEST_AGENTS_PYTHON is not set"),
]

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "proxy" / "openai_agents.py"
CALL = 'I use the tool.\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'

THOUGHTS = "<think>\nSo it is.\n</think>\n\n"
CALLS = "".join(f'\n<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": 3.0}}}}\n</tool_call>' for a in (2, 4))
WHOLE = CALLS.replace("3.0", "3")
ADD = """
def add(a: int, b: int) -> int:
    \"\"\"Adds.

    Args:
        a: one number
        b: the other
    \"\"\"
    return a + int(b)
"""
AGENTS_SDK = """
from agents import Agent, Runner, function_tool, set_tracing_disabled
set_tracing_disabled(True)
agent = Agent(name="adder", instructions="You add.", tools=[function_tool(add)], model="policy")
first = Runner.run_sync(agent, "What is 2 + 3, and 4 + 3?")
print(Runner.run_sync(agent, [*first.to_input_list(), {"role": "user", "content": "Sure?"}]).final_output)
"""
LANGGRAPH = """
from langgraph.prebuilt import create_react_agent
agent = create_react_agent(MODEL, [add], prompt="You add.")
first = agent.invoke({"messages": [("user", "What is 2 + 3, and 4 + 3?")]})["messages"]
print(agent.invoke({"messages": [*first, ("user", "Sure?")]})["messages"][-1].text)
"""
OPENAI_MODEL = "from langchain_openai import ChatOpenAI\nMODEL = ChatOpenAI(model='policy')"
RESPONSES_MODEL = "from langchain_openai import ChatOpenAI\nMODEL = ChatOpenAI(model='policy', use_responses_api=True)"
ANTHROPIC_MODEL = "from langchain_anthropic import ChatAnthropic\nMODEL = ChatAnthropic(model='policy')"
SMOLAGENTS = """
from smolagents import OpenAIModel, ToolCallingAgent, tool
agent = ToolCallingAgent(tools=[tool(add)], model=OpenAIModel(model_id="policy"), verbosity_level=0)
print(agent.run("What is 2 + 3, and 4 + 3?"))
"""
END = '\n<tool_call>\n{"name": "final_answer", "arguments": {"answer": "I am."}}\n</tool_call>'


@pytest.mark.parametrize(
    ("program", "script", "matching"),
    [
        (AGENTS_SDK, [f"{THOUGHTS}I add.{CALLS}", "5 and 7.", f"{THOUGHTS}I am."], "loose_tool_call"),
        (OPENAI_MODEL + LANGGRAPH, [f"I add.{CALLS}", "5 and 7.", "I am."], "loose_tool_call"),
        (RESPONSES_MODEL + LANGGRAPH, [f"{THOUGHTS}I add.{CALLS}", "5 and 7.", "I am."], "loose_tool_call"),
        (ANTHROPIC_MODEL + LANGGRAPH, [f"{THOUGHTS}I add.{CALLS}", "5 and 7.", "I am."], "loose_tool_call"),
        (SMOLAGENTS, [f"I add.{WHOLE}", WHOLE, END], "role_content_only"),
    ],
    ids=["agents-sdk", "langgraph", "langgraph-responses", "langgraph-anthropic", "smolagents"],
)
async def test_a_framework_with_its_defaults_is_one_row(
    tmp_path: Path, program: str, script: list[str], matching: str
) -> None:
    async with gateway_on(tmp_path, FakeEngine(script, tokenizer=tokenizer)) as gateway:
        job = start_session_job(gateway.buffer, n=1, message_matching=matching)
        opened = await gateway.open(job)
        await play(program, opened, tmp_path)
        closed = await gateway.close(opened, reward=1.0)
        assert (closed.body["turns"], closed.body["branches"]) == (len(script), 1)
        assert gateway.trained_text(job, opened["session_id"]) == "".join(f"{text}<|im_end|>" for text in script)


async def play(program: str, opened: dict[str, Any], home: Path) -> None:
    """Runs a program of an agent framework through a session; its last reply must be "I am."."""
    variables = {f"{name}_API_KEY": opened["api_key"] for name in ("OPENAI", "ANTHROPIC")}
    variables |= {"OPENAI_BASE_URL": opened["base_url"], "ANTHROPIC_BASE_URL": opened["anthropic_base_url"]}
    (home / "program.py").write_text(ADD + program)  # smolagents reads the source of its tools
    process = await asyncio.create_subprocess_exec(
        PYTHON,
        home / "program.py",
        env={"PATH": os.environ["PATH"], "HOME": str(home), **variables},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    said, complaints = await process.communicate()
    if b"ModuleNotFoundError" in complaints:
        pytest.skip(f"ROLLOUT_BUFFER_TEST_AGENTS_PYTHON: {complaints.decode().splitlines()[-1]}")
    assert "I am." in said.decode(), complaints.decode()[-2000:]


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_tool_loop_of_the_example_is_one_row(tmp_path: Path, streamed: bool) -> None:
    engine = FakeEngine([CALL, "The answer is 5."], tokenizer=tokenizer)
    async with gateway_on(tmp_path, engine) as gateway:
        job = start_session_job(gateway.buffer, n=1)
        arguments = [str(EXAMPLE), "--gateway", gateway.url, "--job", job.job_id, *(["--stream"] if streamed else [])]
        process = await asyncio.create_subprocess_exec(
            PYTHON, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        said, complaints = await process.communicate()
        assert process.returncode == 0, complaints.decode()[-2000:]
        closed = json.loads(said.decode().splitlines()[-1])
        assert "The answer is 5." in said.decode()
        assert (closed["turns"], closed["branches"], closed["reward"]) == (2, 1, 1.0)
        sent = [str(tokenizer.decode(request.input_ids)) for request in engine.requests]
        assert '"name": "add"' in sent[0]
        assert f"{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\n5\n</tool_response>" in sent[1]
        assert gateway.trained_text(job, closed["session_id"]) == f"{CALL}<|im_end|>The answer is 5.<|im_end|>"
