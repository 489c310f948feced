"""Tools of a rollout server that are named by address: the calculator, the document tools, and anybody's."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.generator.context_editing.remote_tools import DOCUMENT_TOOLS, DocumentToolSession
from slime_plugins.rollout_buffer.remote_rollout.agent import AgentSide
from slime_plugins.rollout_buffer.remote_rollout.bodies import RolloutBody
from slime_plugins.rollout_buffer.remote_rollout.main import running
from slime_plugins.rollout_buffer.remote_rollout.routes import create_app
from slime_plugins.rollout_buffer.remote_rollout.settings import AgentSettings, RemoteRolloutSettings
from slime_plugins.rollout_buffer.remote_rollout.tools import CALCULATOR, load_provider
from tests.remote_rollout_serving import ANSWER, call, demo_tokenizer, rollout_body, served
from tests.third_party_rollout_sides import Said, ThirdPartyTrainer, rendered

ADDRESS = "slime_plugins.rollout_buffer.generator.context_editing.remote_tools:DOCUMENT_TOOLS"
DOCUMENT = " ".join(
    ["The sea was calm that day."] * 60 + ["The code of the lighthouse is KX-4471."] + ["Rain fell."] * 60
)
SETTINGS = RemoteRolloutSettings(port=0, tools=ADDRESS)
NAMES = [
    "analyzeText", "loadDocument", "buildIndex", "readChunk", "searchEngine", "note", "readNote", "updateNote",
    "checkBudget",
]  # fmt: skip


def tool_call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def play_on_document(*turns: str, **changes: Any) -> tuple[dict[str, Any], ThirdPartyTrainer]:
    """Plays a rollout with the document tools against a third party's trainer; returns its answer and the trainer."""
    trainer = ThirdPartyTrainer(demo_tokenizer(), [Said(turn) for turn in turns])
    async with served(trainer.app()) as trainer_url, running(SETTINGS) as url:
        body = {"document_content": DOCUMENT, **rollout_body(trainer_url, **changes)}
        status, final = await call("POST", f"{url}/rollout", body)
    assert (status, final.get("error_message")) == (200, None), final
    return final, trainer


def results(final: dict[str, Any]) -> list[str]:
    return [message["content"] for message in final["final_messages"] if message["role"] == "tool"]


def document_session(**changes: Any) -> DocumentToolSession:
    body = {"document_content": DOCUMENT, **rollout_body("http://127.0.0.1:1", **changes)}
    return DOCUMENT_TOOLS.open_session(RolloutBody.model_validate(body))


# --- the document tools ----------------------------------------------------------------------------------------------


async def test_a_rollout_searches_the_document_of_its_request_and_its_masks_are_exact() -> None:
    final, trainer = await play_on_document(
        tool_call("buildIndex", chunk_size=40),
        tool_call("searchEngine", query="code of the lighthouse", top_k=1),
        "KX-4471",
    )
    built, found = (json.loads(text) for text in results(final))
    assert built["chunk_size"] == 40
    assert built["chunks"] > 5
    assert [hit["chunk_id"] for hit in found["hits"]] == [360 // 40]  # sixty sentences of six words stand before it
    assert trainer.mismatches == []
    assert [call_["response_mask"] is None for call_ in trainer.calls] == [True, False, False]
    session = trainer.sessions["demo-1234"]
    sampled = [demo_tokenizer().encode(m["content"] + "<|im_end|>", add_special_tokens=False)
               for m in final["final_messages"] if m["role"] == "assistant"]  # fmt: skip
    assert sum(session.response_mask) == sum(map(len, sampled))
    trained = [one for one, bit in zip(session.response_ids, session.response_mask, strict=True) if bit]
    assert trained == [one for ids in sampled for one in ids]
    whole = rendered(demo_tokenizer(), trainer.calls[0]["messages"]) + session.response_ids
    assert len(whole) == final["metrics"]["prompt_tokens"] + final["metrics"]["response_tokens"]


async def test_the_budget_is_what_the_request_allows_less_what_the_sequence_holds() -> None:
    final, trainer = await play_on_document(tool_call("checkBudget"), "done", max_tokens_total=4096)
    told = json.loads(results(final)[0])
    first = len(rendered(demo_tokenizer(), trainer.calls[0]["messages"]))
    sampled = len(demo_tokenizer().encode(tool_call("checkBudget") + "<|im_end|>", add_special_tokens=False))
    assert told == {
        "tokens_used": first + sampled,
        "tokens_left": 4096 - 128 - first - sampled,
        "max_model_length": 4096,
        "kept_for_a_turn": 128,
    }


async def test_a_document_that_does_not_fit_is_not_loaded_and_a_second_copy_counts() -> None:
    box = document_session(max_tokens_total=2 * len(DOCUMENT.split()) + 200, sampling_params={})
    box.see_context(0, lambda text: len(text.split()))
    await box.call("loadDocument", {})
    told = json.loads(await box.call("checkBudget", {}))
    assert told["tokens_used"] == len(DOCUMENT.split())
    with pytest.raises(ValueError, match="the context has room for"):
        await box.call("loadDocument", {})


@pytest.mark.parametrize("document", [None, "", " \n", 7, ["text"]])
async def test_a_request_without_a_document_is_a_400_and_may_be_mended(document: Any) -> None:
    trainer = ThirdPartyTrainer(demo_tokenizer(), [Said("done")])
    async with served(trainer.app()) as trainer_url, running(SETTINGS) as url:
        body = rollout_body(trainer_url, document_content=document)
        status, answer = await call("POST", f"{url}/rollout", body)
        assert status == 400
        assert "give document_content, a text, in the request" in answer["error"]["message"]
        assert trainer.calls == []
        mended, _ = await call("POST", f"{url}/rollout", {**body, "document_content": DOCUMENT})
    assert mended == 200


# --- addresses -------------------------------------------------------------------------------------------------------


async def test_tools_are_listed_as_the_address_says() -> None:
    async with running(SETTINGS) as url:
        _, listed = await call("GET", f"{url}/tools")
    assert [tool["function"]["name"] for tool in listed["tools"]] == NAMES
    async with running(RemoteRolloutSettings(port=0)) as url:
        _, listed = await call("GET", f"{url}/tools")
    assert listed["tools"] == [dict(schema) for schema in CALCULATOR.schemas]


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("json", "must be MODULE:NAME"),
        (":x", "must be MODULE:NAME"),
        ("no_such_module_here:x", "cannot be loaded: ModuleNotFoundError"),
        (".relative:x", "cannot be loaded"),
        ("json:nothing", "the module json has no nothing"),
        ("json:JSONDecoder", "is a class"),
        ("json:dumps", "is no tool provider; it needs open_session"),
        ("third_party_tools:UNNAMED", "each with a name"),
        ("third_party_tools:EMPTY", "each with a name"),
        ("broken_third_party_tools:X", "cannot be loaded: ZeroDivisionError"),
    ],
)
def test_an_address_that_offers_no_tools_is_a_sentence(
    address: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "third_party_tools.py").write_text(
        "class Offer:\n    schemas = [{'type': 'function', 'function': {}}]\n    def open_session(self, request): ...\n"
        "UNNAMED = Offer()\nEMPTY = Offer()\nEMPTY.schemas = []\n"
    )
    (tmp_path / "broken_third_party_tools.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as raised:
        load_provider(address)
    assert raised.value.message.startswith(f"--tools {address!r}")
    assert sentence in raised.value.message


# --- how long rollouts last, and their results ------------------------------------------------------------------------


class SlowTrainer:
    """A trainer that does not answer as long as a test lasts."""

    def app(self) -> web.Application:
        application = web.Application()
        application.router.add_post("/v1/chat/completions", self._answer)
        return application

    async def _answer(self, request: web.Request) -> web.Response:
        await asyncio.sleep(30)
        return web.Response()


async def test_a_rollout_that_takes_too_long_ends_with_an_error_that_names_its_turn() -> None:
    agent = AgentSide(AgentSettings(rollout_timeout_s=0.3))
    async with served(SlowTrainer().app()) as trainer_url, served(create_app(agent=agent)) as url:
        status, final = await call("POST", f"{url}/rollout", rollout_body(trainer_url))
    assert (status, final["status"], final["finish_reason"]) == (200, "ERROR", "error")
    assert final["error_message"] == "turn 1: the rollout did not finish within 0.3 s"
    assert final["metrics"]["num_llm_calls"] == 0


async def finished(agent_url: str, trainer_url: str, *names: str) -> None:
    for name in names:
        status, final = await call("POST", f"{agent_url}/rollout", rollout_body(trainer_url, name))
        assert (status, final["status"]) == (200, "COMPLETED")


async def known(agent_url: str, *names: str) -> list[bool]:
    return [(await call("GET", f"{agent_url}/rollout/{name}"))[0] == 200 for name in names]


async def test_a_result_is_kept_for_its_time_and_then_the_id_is_free_again() -> None:
    now = [100.0]
    agent = AgentSide(AgentSettings(keep_result_s=60), clock=lambda: now[0])
    trainer = ThirdPartyTrainer(demo_tokenizer(), [Said(ANSWER), Said(ANSWER)])
    async with served(trainer.app()) as trainer_url, served(create_app(agent=agent)) as url:
        await finished(url, trainer_url, "r")
        now[0] += 60
        await finished(url, trainer_url, "r")
        assert len(trainer.calls) == 1  # attached to what was kept
        now[0] += 0.1
        assert await known(url, "r") == [False]
        trainer.sessions.clear()
        await finished(url, trainer_url, "r")
    assert len(trainer.calls) == 2


async def test_a_rollout_under_way_is_never_forgotten() -> None:
    now = [0.0]
    agent = AgentSide(AgentSettings(max_kept=1, keep_result_s=1), clock=lambda: now[0])
    quick = ThirdPartyTrainer(demo_tokenizer(), [Said(ANSWER)] * 2)
    async with (
        served(SlowTrainer().app()) as slow_url,
        served(quick.app()) as quick_url,
        served(create_app(agent=agent)) as url,
    ):
        waiting = asyncio.create_task(agent.rollout(rollout_body(slow_url, "slow")))
        await finished(url, quick_url, "a", "b")
        now[0] += 10
        assert await known(url, "slow", "a", "b") == [True, False, False]
        assert agent.state_of("slow")["state"] == "running"
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
