"""What a guide to response masks tells people to do: its session, its log lines, its pitfalls, its tests as a file."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollout_buffer_lab.scripted_engine import server as scripted_engine
from rollout_buffer_lab.scripted_engine.settings import ScriptedEngineSettings
from slime_plugins.rollout_buffer.cli.app import app
from slime_plugins.rollout_buffer.engine.sglang import SglangEngine
from slime_plugins.rollout_buffer.errors import InvalidPayloadError
from slime_plugins.rollout_buffer.remote_rollout.agent import AgentSide
from slime_plugins.rollout_buffer.remote_rollout.routes import create_app
from slime_plugins.rollout_buffer.remote_rollout.session import RolloutSession
from slime_plugins.rollout_buffer.remote_rollout.trainer_side.trainer import TrainerSide
from tests.demo_tokens import tokenizer
from tests.remote_rollout_serving import call, rollout_body, served, trainer_side

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "remote_rollout.md").read_text(encoding="utf-8")
SAMPLING = {"temperature": 0.7, "max_tokens": 128}
SYSTEM = {"role": "system", "content": "You are a helpful calculator assistant."}
SUM = {"role": "user", "content": "Calculate 15*23"}
RESULT = {"role": "tool", "tool_call_id": "call_1_0", "content": "345"}


@asynccontextmanager
async def trainer_with_an_engine() -> AsyncIterator[tuple[TrainerSide, str]]:
    """A trainer on HTTP that samples with a scripted engine."""
    async with scripted_engine.running(ScriptedEngineSettings(port=0, skill=1.0)) as engine_url:
        engine = SglangEngine(engine_url)
        trainer = trainer_side(engine)
        async with served(create_app(trainer=trainer)) as url:
            yield trainer, url
        await engine.close()


# --- the session -----------------------------------------------------------------------------------------------------


async def test_our_rollout_server_plays_with_the_session(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="rollout_server")
    agent = AgentSide()
    async with trainer_with_an_engine() as (_, url):
        final = await agent.rollout(rollout_body(url, "r", callback_api_key=None))
    await agent.close()

    assert final["metrics"]["num_tool_calls"] == 1
    said = [record.getMessage() for record in caplog.records if record.name == "rollout_server"]
    assert [line[:7] for line in said if line.startswith("Turn")] == ["Turn 1:", "Turn 2:"]


async def test_a_turn_has_the_time_of_the_settings_and_no_less() -> None:
    async with RolloutSession("r", tokenizer, "http://127.0.0.1:1")._trainer() as calls:
        assert calls._session.timeout.total is None


@pytest.mark.parametrize("appends", ["nothing", "the reply, too"])
async def test_a_session_masks_the_tool_outputs_between_two_calls_and_logs_it_as_the_guide_says(
    appends: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="rollout_server")
    async with trainer_with_an_engine() as (trainer, url):
        session = RolloutSession("r", tokenizer, url)
        session.messages = [SYSTEM, SUM]
        assert session.last_prompt_length == 0
        first = await session.call_llm(SAMPLING)
        held = len(first["prompt_token_ids"]) + len(first["token_ids"])
        assert session.last_prompt_length == held
        if appends == "the reply, too":
            session.messages.append(first["choices"][0]["message"])
        session.append_tool_outputs([RESULT])
        assert session.last_prompt_length == held
        second = await session.call_llm(SAMPLING)
        at_trainer = trainer.get_session("r")

    entered = len(second["prompt_token_ids"]) - held
    assert entered > 1
    assert at_trainer.response_mask == [1] * len(first["token_ids"]) + [0] * entered + [1] * len(second["token_ids"])
    assert len(at_trainer.response_ids) == len(at_trainer.response_mask)
    assert [message["role"] for message in session.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert "345" in session.messages[-1]["content"]
    said = [record.getMessage() for record in caplog.records if record.name == "rollout_server"]
    assert said[0] == "Turn 1: response_mask=None, length=0"
    assert f"Turn 2: response_mask={[0] * entered}, length={entered}" in said
    assert f"Tool output tokens: {second['prompt_token_ids'][held:]}" in said
    assert f"Prompt length before: {held}, after: {held + entered}" in said


async def test_a_session_counts_what_an_edited_context_shares_with_the_old_one() -> None:
    """The right way to cut a context: the mask covers the new prompt from where it differs from the old one."""
    async with trainer_with_an_engine() as (trainer, url):
        session = RolloutSession("r", tokenizer, url)
        session.messages = [SYSTEM, {"role": "user", "content": "Say hello."}]
        await session.call_llm(SAMPLING)
        session.messages.append({"role": "user", "content": "And again."})
        await session.call_llm(SAMPLING)
        session.messages = [session.messages[0], *session.messages[-2:], {"role": "user", "content": "Once more."}]
        await session.call_llm(SAMPLING)
        at_trainer = trainer.get_session("r")

    assert [turn.kind.value for turn in at_trainer.turns] == ["first", "continued", "edited"]
    assert all(sum(row.loss_mask) > 0 for row in at_trainer.rows())


# --- what is refused, and its mended form ----------------------------------------------------------------------------


async def asked(url: str, messages: list[dict[str, Any]], mask: Any) -> tuple[int, Any]:
    body = {"rollout_id": "r", "messages": messages, "response_mask": mask, "max_tokens": 128}
    return await call("POST", f"{url}/v1/chat/completions", body)


async def test_a_mask_of_the_output_alone_is_refused_and_the_right_one_follows() -> None:
    """Nothing falls back to all ones: a refused turn samples nothing, and its mended form goes on."""
    async with trainer_with_an_engine() as (trainer, url):
        _, first = await asked(url, [SYSTEM, SUM], None)
        messages = [SYSTEM, SUM, first["choices"][0]["message"], RESULT]
        status, refusal = await asked(url, messages, [0] * len(tokenizer.encode("345")))
        assert (status, refusal["error"]["code"]) == (422, "wrong_response_mask")
        expected = refusal["error"]["detail"]["expected"]
        assert len(trainer.get_session("r").turns) == 1

        status, second = await asked(url, messages, [0] * expected)
        assert status == 200
        assert second["entered_tokens"] == expected
        assert trainer.get_session("r").response_mask.count(0) == expected


# --- the tests of the guide, as somebody's file ----------------------------------------------------------------------

TESTS = '''
"""Three tests that anybody would write who read about masks; bare dots stand where the request says nothing."""
import json
import logging
import re

logging.basicConfig(level=logging.DEBUG)


async def test_one_turn():
    await rollout_server.rollout({
        "rollout_id": "one-turn",
        "messages": [{"role": "user", "content": "Hello"}],
        ...
    })
    session = trainer.get_session("one-turn")
    assert session.response_mask
    assert set(session.response_mask) == {1}


async def test_two_turns_with_a_tool():
    response = await rollout_server.rollout({
        "rollout_id": "two-turns",
        "messages": [{"role": "user", "content": "Calculate 15*23"}],
        ...
    })
    mask = trainer.get_session("two-turns").response_mask
    assert 0 in mask, "no tool was called"
    assert (mask[0], mask[-1]) == (1, 1)
    assert mask.count(0) == count_tool_output_tokens(response.final_messages)


async def test_lengths():
    await rollout_server.rollout({...})
    session = trainer.get_session(rollout_id)
    assert len(session.response_ids) == len(session.response_mask)
'''


def test_a_file_of_mask_tests_runs_against_both_sides_and_a_stand_in(tmp_path: Path) -> None:
    file = tmp_path / "my_tests.py"
    file.write_text(TESTS)

    ended = CliRunner().invoke(app, ["mask-tests", str(file)])

    assert ended.exit_code == 0, ended.output
    assert [line.split()[0] for line in ended.output.splitlines() if "test_" in line] == ["passed"] * 3


def test_a_mask_test_that_fails_is_shown_and_fails_the_command(tmp_path: Path) -> None:
    file = tmp_path / "my_tests.py"
    wrong = "async def test_wrong():\n    assert trainer.get_session(rollout_id).response_mask == []\n"
    file.write_text(f"{TESTS}\n\n{wrong}\n\ntest_decorated = lambda: test_wrong()\n")

    ended = CliRunner().invoke(app, ["mask-tests", str(file)])

    assert ended.exit_code == 1
    assert "FAILED test_wrong" in ended.output
    assert "FAILED test_decorated" in ended.output
    assert "response_mask == []" in ended.output


async def test_the_request_of_the_page_is_one_that_is_taken() -> None:
    """The documented body, with an address and a tokenizer that are here; a key with spaces is refused by name."""
    (shown,) = re.findall(r"POST /rollout\n(\{.*?\n\})", PAGE, re.DOTALL)
    agent = AgentSide()
    async with trainer_with_an_engine() as (_, url):
        body = {**json.loads(shown), "server_url": url, "tokenizer_name": "demo"}
        final = await agent.rollout(body)
        with pytest.raises(InvalidPayloadError, match=r"callback_api_key.*ASCII without spaces"):
            await agent.rollout({**body, "callback_api_key": "a key"})
    await agent.close()

    assert final["status"] == "COMPLETED"
    assert final["metrics"]["num_tool_calls"] == 1
