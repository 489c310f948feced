"""Both sides of the remote rollout protocol over real sockets: against each other, and against third parties'."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime_plugins.rollout_buffer.errors import ConfigError, EngineError
from slime_plugins.rollout_buffer.remote_rollout.agent import AgentSide
from slime_plugins.rollout_buffer.remote_rollout.bodies import RolloutBody
from slime_plugins.rollout_buffer.remote_rollout.main import running
from slime_plugins.rollout_buffer.remote_rollout.routes import create_app
from slime_plugins.rollout_buffer.remote_rollout.settings import AgentSettings, RemoteRolloutSettings, TrainerSettings
from slime_plugins.rollout_buffer.remote_rollout.tools import FunctionToolSession
from slime_plugins.rollout_buffer.serve_settings import build_settings
from slime_plugins.rollout_buffer.testing.fake_engine import FakeEngine
from slime_plugins.rollout_buffer.wire.written_items import decode_written_item
from tests.remote_rollout_serving import (
    ANSWER,
    CALL,
    QUESTION,
    call,
    demo_tokenizer,
    rollout_body,
    served,
    trainer_side,
)
from tests.third_party_rollout_sides import Said, ThirdPartyRolloutServer, ThirdPartyTrainer, rendered
from tools.show_mask import page, sections_of

QUICK = AgentSettings(backoff_s=0.01, turn_timeout_s=5, tool_timeout_s=0.3)


def engine(*script: Any) -> FakeEngine:
    return FakeEngine(script, tokenizer=demo_tokenizer())


def agent_app(settings: AgentSettings = QUICK, **options: Any) -> web.Application:
    return create_app(agent=AgentSide(settings, **options))


class Functions:
    """A provider of functions that it does not describe."""

    schemas: Sequence[Mapping[str, Any]] = ()

    def __init__(self, functions: Mapping[str, Any]) -> None:
        self._functions = functions

    def open_session(self, request: RolloutBody) -> FunctionToolSession:
        return FunctionToolSession((), self._functions)


class KeptItems:
    def __init__(self) -> None:
        self.written: list[tuple[str | None, dict[str, Any]]] = []
        self.failures: list[Exception] = []

    async def write(self, items: Sequence[Mapping[str, Any]], *, job_id: str | None = None) -> dict[str, Any]:
        if self.failures:
            raise self.failures.pop(0)
        self.written += [(job_id, dict(item)) for item in items]
        return {"job_id": job_id, "items": len(items)}


# --- our sides against each other ------------------------------------------------------------------------------------


async def test_the_calculator_walk_through_ends_in_one_row_with_zeros_where_the_tool_spoke() -> None:
    sink = KeptItems()
    trainer = trainer_side(engine(CALL, ANSWER), sink=sink)
    async with served(create_app(trainer=trainer)) as trainer_url, served(agent_app()) as agent_url:
        await call("POST", f"{trainer_url}/rollouts", {"rollout_id": "r", "job_id": "j", "instance_id": "15x23"})
        status, final = await call("POST", f"{agent_url}/rollout", rollout_body(trainer_url, "r"))
        assert (status, final["status"], final["finish_reason"]) == (200, "COMPLETED", "stop")
        assert [m["role"] for m in final["final_messages"]] == ["system", "user", "assistant", "tool", "assistant"]
        assert final["final_messages"][3]["content"] == "345"
        session = trainer.get_session("r")
        status, ended = await call("POST", f"{trainer_url}/rollouts/r/end", {"reward": 1.0, "final_response": final})
    tokenizer = demo_tokenizer()
    first = tokenizer.encode(CALL + "<|im_end|>", add_special_tokens=False)
    last = tokenizer.encode(ANSWER + "<|im_end|>", add_special_tokens=False)
    entered = len(session.response_ids) - len(first) - len(last)
    assert session.response_mask == [1] * len(first) + [0] * entered + [1] * len(last)
    assert session.response_ids[: len(first)] == first
    assert session.response_ids[-len(last) :] == last
    assert tokenizer.decode(session.response_ids[len(first) : -len(last)]) == (
        "\n<|im_start|>user\n<tool_response>\n345\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert (ended["rows"], ended["trained_tokens"]) == (1, len(first) + len(last))
    ((job_id, item),) = sink.written
    assert (job_id, item["instance_id"], item["uid"], item["reward"]) == ("j", "15x23", "r", 1.0)
    written = decode_written_item(item)
    assert [list(g.output_ids) for g in written.generations] == [first, last]
    assert written.generations[0].output_log_probs is not None


async def test_a_turn_cut_by_its_cap_ends_with_max_tokens_and_its_trajectory_is_truncated() -> None:
    sink = KeptItems()
    trainer = trainer_side(engine(ANSWER * 20), sink=sink)
    async with served(create_app(trainer=trainer)) as trainer_url, served(agent_app()) as agent_url:
        body = rollout_body(trainer_url, "r", sampling_params={"max_tokens": 7})
        _, final = await call("POST", f"{agent_url}/rollout", body)
        ending = {"reward": 0.0, "job_id": "j", "instance_id": "i", "final_response": final}
        await call("POST", f"{trainer_url}/rollouts/r/end", ending)
    assert final["finish_reason"] == "max_tokens"
    assert (sink.written[0][1]["outcome"], sink.written[0][1]["stop_reason"]) == ("truncated", "max_context")


# --- the agent's side against a third party's trainer ----------------------------------------------------------------


async def play(script: Sequence[Said]) -> tuple[Any, ThirdPartyTrainer]:
    """Plays one rollout against a third party's trainer; returns the final answer and the trainer."""
    trainer = ThirdPartyTrainer(demo_tokenizer(), script)
    async with served(trainer.app()) as trainer_url, served(agent_app()) as agent_url:
        status, final = await call("POST", f"{agent_url}/rollout", rollout_body(trainer_url))
        assert status == 200, final
    return final, trainer


async def test_a_third_partys_trainer_gets_the_guides_bodies() -> None:
    final, trainer = await play([Said(CALL), Said(ANSWER)])
    assert (final["status"], final["finish_reason"], final["rollout_id"]) == ("COMPLETED", "stop", "demo-1234")
    assert trainer.mismatches == []
    first, second = trainer.calls
    assert first["response_mask"] is None
    assert set(second["response_mask"]) == {0}
    assert {key: first[key] for key in ("temperature", "top_p", "max_tokens", "logprobs")} == {
        "temperature": 0.7, "top_p": 0.9, "max_tokens": 128, "logprobs": True,
    }  # fmt: skip
    assert first["messages"] == QUESTION
    assert second["messages"][-1]["role"] == "tool"
    assert trainer.headers[0]["Authorization"] == "Bearer a-secret-of-the-trainer"
    session = trainer.sessions["demo-1234"]
    assert len(session.response_ids) == len(session.response_mask)


async def test_calls_that_the_trainer_parsed_are_counted_as_it_renders_them() -> None:
    """The guide's own mock: the ids hold the text alone, the template writes the call behind it."""
    function = {"name": "multiply", "arguments": '{"a": 15, "b": 23}'}
    calls = [{"id": "call_abcd1234", "type": "function", "function": function}]
    final, trainer = await play([Said("I'll calculate that for you.", tool_calls=calls, with_end=False), Said(ANSWER)])
    assert final["error_message"] is None
    assert trainer.mismatches == []
    assert final["final_messages"][3] == {"role": "tool", "tool_call_id": "call_abcd1234", "content": "345"}


@pytest.mark.parametrize("place", ["choice", "openai", "counts alone"])
async def test_ids_and_log_probs_are_found_where_others_put_them(place: str) -> None:
    tokenizer = demo_tokenizer()
    sampled = tokenizer.encode(ANSWER + "<|im_end|>", add_special_tokens=False)
    prompt = rendered(tokenizer, QUESTION)
    choice: dict[str, Any] = {"index": 0, "message": {"role": "assistant", "content": ANSWER}, "finish_reason": "stop"}
    changes: dict[str, Any] = {"token_ids": None, "prompt_token_ids": None, "logprobs": None}
    choice |= {"token_ids": sampled}
    if place == "choice":
        choice |= {"prompt_token_ids": prompt}
    if place == "openai":
        choice |= {"logprobs": {"content": [{"token": "x", "logprob": -0.1}] * len(sampled)}}
        changes |= {"prompt_token_ids": prompt}
    if place == "counts alone":
        changes |= {"usage": {"prompt_tokens": len(prompt), "completion_tokens": len(sampled)}}
    final, _ = await play([Said(ANSWER, changes={**changes, "choices": [choice]})])
    assert final["error_message"] is None
    assert final["metrics"]["response_tokens"] == len(sampled)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"prompt_token_ids": [1, 2, 3]},
            r"turn 1: the trainer's prompt has 3 tokens, our own .* another chat template",
        ),
        ({"prompt_token_ids": None, "usage": {"prompt_tokens": 3}}, r"turn 1: the trainer counted 3 .* count is \d+"),
        ({"token_ids": None}, "turn 1: the trainer's reply has no token_ids"),
        ({"token_ids": []}, "turn 1: the trainer's reply has an empty list"),
        ({"token_ids": ["1"]}, "turn 1: token_ids must be a list of token ids"),
        ({"token_ids": [10**6], "logprobs": None}, "turn 1: the trainer sampled token 1000000, our tokenizer has"),
        ({"token_ids": [10**12], "logprobs": None}, "turn 1: token_ids holds 1000000000000, which no vocabulary has"),
        ({"token_ids": [7], "logprobs": [0.5]}, "turn 1: the log-prob of sampled token 0 is no finite number of at"),
        ({"token_ids": [7], "logprobs": [-1e39]}, "turn 1: the log-prob of sampled token 0 is no finite number"),
        ({"logprobs": [0.5]}, r"turn 1: the trainer sent \d+ token_ids and 1 log-probs"),
        ({"choices": []}, "turn 1: the trainer's reply must have choices"),
        ({"choices": [{"message": None}]}, "turn 1: the trainer's reply has no message"),
    ],
)
async def test_a_reply_that_contradicts_our_count_ends_the_rollout_with_a_sentence(
    changes: dict[str, Any], sentence: str
) -> None:
    final, _ = await play([Said(ANSWER, changes=changes)])
    assert (final["status"], final["finish_reason"]) == ("ERROR", "error")
    assert re.match(sentence, final["error_message"]), final["error_message"]


async def test_a_trainer_that_is_down_is_tried_again_and_then_an_error() -> None:
    async with served(agent_app()) as agent_url:
        _, final = await call("POST", f"{agent_url}/rollout", rollout_body("http://127.0.0.1:1"))
    assert final["status"] == "ERROR"
    assert "turn 1: the trainer cannot be reached" in final["error_message"]
    assert "tried 4 times" in final["error_message"]


@pytest.mark.parametrize("status", [500, 502, 401, 302])
async def test_a_turn_that_may_have_been_sampled_or_was_refused_is_not_asked_again(status: int) -> None:
    final, trainer = await play([Said("", status=status), Said(ANSWER)])
    assert (final["status"], len(trainer.calls)) == ("ERROR", 1)
    assert final["error_message"].startswith("turn 1: the trainer answered")


async def test_a_trainer_that_recognises_turns_is_asked_again_after_a_broken_answer() -> None:
    trainer = trainer_side(engine(CALL, ANSWER))
    inner = create_app(trainer=trainer)
    broken: list[int] = []

    @web.middleware
    async def break_once(request: web.Request, handler: Any) -> web.StreamResponse:
        response: web.StreamResponse = await handler(request)
        if request.headers.get("X-Rollout-Turn") == "2" and not broken:
            broken.append(1)
            assert request.transport is not None
            request.transport.close()
        return response

    inner.middlewares.append(break_once)
    async with served(inner) as trainer_url, served(agent_app()) as agent_url:
        _, final = await call("POST", f"{agent_url}/rollout", rollout_body(trainer_url, "r"))
    assert (final["status"], final["error_message"]) == ("COMPLETED", None)
    assert broken
    assert len(trainer.get_session("r").turns) == 2  # sampled once, answered twice


async def test_a_trainer_that_answers_rubbish_or_nothing_ends_the_rollout_with_an_error() -> None:
    async def rubbish(request: web.Request) -> web.Response:
        return web.Response(text="<html>no</html>")

    async def silence(request: web.Request) -> web.Response:
        await asyncio.sleep(30)
        return web.Response()

    for handler, sentence in ((rubbish, "is not JSON"), (silence, "did not answer within 0.2 s")):
        app = web.Application()
        app.router.add_post("/v1/chat/completions", handler)
        async with served(app) as trainer_url, served(agent_app(AgentSettings(turn_timeout_s=0.2))) as agent_url:
            _, final = await call("POST", f"{agent_url}/rollout", rollout_body(trainer_url))
        assert final["status"] == "ERROR"
        assert sentence in final["error_message"]


async def test_a_tool_that_hangs_is_an_answer_to_the_model() -> None:
    async def never(**arguments: Any) -> str:
        await asyncio.sleep(30)
        return ""

    trainer = ThirdPartyTrainer(demo_tokenizer(), [Said(CALL), Said(ANSWER)])
    app = agent_app(tools=Functions({"multiply": never}))
    async with served(trainer.app()) as trainer_url, served(app) as agent_url:
        _, final = await call("POST", f"{agent_url}/rollout", rollout_body(trainer_url))
    assert final["final_messages"][3]["content"] == "Error: multiply did not answer within 0.3 s"


async def test_tools_that_cannot_be_closed_cost_no_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(_tools: FunctionToolSession) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(FunctionToolSession, "close", broken)
    final, _ = await play([Said(ANSWER)])
    assert final["status"] == "COMPLETED"


async def test_the_same_rollout_id_attaches_while_it_runs_and_afterwards() -> None:
    trainer = trainer_side(FakeEngine([CALL, ANSWER], tokenizer=demo_tokenizer(), delay_s=0.2))
    async with served(create_app(trainer=trainer)) as trainer_url, served(agent_app()) as agent_url:
        body = rollout_body(trainer_url, "r")
        answers = await asyncio.gather(*(call("POST", f"{agent_url}/rollout", body) for _ in range(3)))
        later = await call("POST", f"{agent_url}/rollout", body)
        other = await call("POST", f"{agent_url}/rollout", {**body, "max_turns": 3})
        _, state = await call("GET", f"{agent_url}/rollout/r")
    assert answers[0] == answers[1] == answers[2] == later
    assert len(trainer.get_session("r").turns) == 2
    assert other[0] == 409
    assert "with another request" in other[1]["error"]["message"]
    assert state["response"] == later[1]


@pytest.mark.parametrize(
    ("changes", "status", "sentence"),
    [
        ({"server_url": "http://169.254.169.254/latest"}, 403, "is not among the callback hosts"),
        ({"server_url": "file:///etc/passwd"}, 403, "must look like http://host:port"),
        ({"tokenizer_name": "no-such/tokenizer"}, 400, "'no-such/tokenizer'"),
        ({"tokenizer_name": "/etc"}, 400, "neither a name of a model hub nor a folder"),
        ({"tokenizer_name": None}, 400, "tokenizer_name is missing"),
        ({"tokenizer_revision": "v2"}, 400, "has no revision 'v2'"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "wizard", "content": "?"}]}, 400, "needs a role"),
        ({"max_turns": 0}, 400, "max_turns"),
        ({"rollout_id": ""}, 400, "rollout_id"),
        ({"callback_api_key": "two\nlines"}, 400, "callback_api_key"),
    ],
)
async def test_a_wrong_request_is_a_4xx_that_says_so_and_leaves_nothing(
    changes: dict[str, Any], status: int, sentence: str
) -> None:
    async with served(agent_app()) as agent_url:
        body = {**rollout_body("http://127.0.0.1:1"), **changes}
        refused, answer = await call("POST", f"{agent_url}/rollout", body)
        assert refused == status, answer
        assert sentence in answer["error"]["message"]
        assert (await call("GET", f"{agent_url}/rollout/demo-1234"))[0] == 404


# --- the trainer's side against a third party's rollout server -------------------------------------------------------


async def test_a_third_partys_rollout_server_is_answered_and_its_masks_are_in_the_session() -> None:
    trainer = trainer_side(engine(CALL, CALL, ANSWER))
    async with served(create_app(trainer=trainer)) as url:
        server = ThirdPartyRolloutServer(demo_tokenizer(), url)
        messages = await server.rollout("theirs", QUESTION)
    assert server.status == 200, server.reply
    assert messages[-1]["content"] == ANSWER
    session = trainer.get_session("theirs")
    assert session.response_mask.count(0) == sum(len(mask or []) for mask in server.masks)
    assert session.response_mask.count(1) == sum(len(turn.reply.output_ids) for turn in session.turns)
    assert len(session.response_ids) == len(session.response_mask) == len(session.response_log_probs)
    assert [turn.counted_by.value for turn in session.turns] == ["ids"] * 3


def without_mask(turn: int, body: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key != "response_mask"}


def with_mask(at: int, change: Any) -> Any:
    def spoil(turn: int, body: dict[str, Any]) -> dict[str, Any]:
        return {**body, "response_mask": change(body["response_mask"])} if turn == at else body

    return spoil


def cut_context(turn: int, body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "messages": body["messages"][-2:]} if turn == 2 else body


@pytest.mark.parametrize(
    ("spoil", "turn", "words"),
    [
        (without_mask, 2, ["response_mask is missing", "entered since turn 1"]),
        (with_mask(2, lambda mask: None), 2, ["response_mask is missing"]),
        (with_mask(2, lambda mask: [1] * len(mask)), 2, ["is 1 at", "none of them was sampled"]),
        (with_mask(2, lambda mask: [0.0] * len(mask)), 2, ["every value must be the integer 0"]),
        (with_mask(2, lambda mask: [False] * len(mask)), 2, ["every value must be the integer 0"]),
        (with_mask(1, lambda mask: [0, 0, 0]), 1, ["on the first turn nothing has entered"]),
        (cut_context, 2, ["the context was edited", "are left"]),
    ],
)
async def test_a_planted_error_is_refused_with_a_sentence_that_names_the_turn(
    spoil: Any, turn: int, words: list[str]
) -> None:
    trainer = trainer_side(fake := engine(CALL, ANSWER))
    async with served(create_app(trainer=trainer)) as url:
        server = ThirdPartyRolloutServer(demo_tokenizer(), url)
        server.spoil = spoil
        await server.rollout("r", QUESTION)
    assert server.status == 422, server.reply
    message = server.reply["error"]["message"]
    assert message.startswith(f"turn {turn}: "), message
    assert all(word in message for word in words), message
    assert server.reply["error"]["code"] == "wrong_response_mask"
    assert server.reply["error"]["detail"]["turn"] == turn
    assert len(fake.requests) == turn - 1  # nothing was sampled for it


async def test_a_repeated_call_gets_the_same_answer_and_samples_nothing() -> None:
    trainer = trainer_side(fake := engine(CALL, ANSWER))
    body = {"rollout_id": "r", "messages": QUESTION, "response_mask": None, "max_tokens": 64}
    async with served(create_app(trainer=trainer)) as url:
        address = f"{url}/v1/chat/completions"
        first = await call("POST", address, body)
        again = await call("POST", address, body, headers={"X-Rollout-Turn": "1"})
        both = await asyncio.gather(call("POST", address, body), call("POST", address, body))
        early = await call("POST", address, body, headers={"X-Rollout-Turn": "3"})
        zeroth = await call("POST", address, body, headers={"X-Rollout-Turn": "0"})
        packed = await call("POST", address, body, headers={"Content-Encoding": "gzip"})
        other = await call("POST", address, {**body, "messages": QUESTION[1:]}, headers={"X-Rollout-Turn": "1"})
    assert first == again == both[0] == both[1]
    assert len(fake.requests) == 1
    assert (early[0], other[0], zeroth[0], packed[0]) == (409, 409, 400, 415)
    assert "turn 2 is next" in early[1]["error"]["message"]
    assert "turn 1 had another body" in other[1]["error"]["message"]


async def test_a_turn_under_way_is_attached_to_and_another_is_refused() -> None:
    trainer = trainer_side(slow := FakeEngine([ANSWER], tokenizer=demo_tokenizer(), delay_s=0.3))
    body = {"rollout_id": "r", "messages": QUESTION, "response_mask": None}
    async with served(create_app(trainer=trainer)) as url:
        address = f"{url}/v1/chat/completions"
        calls = asyncio.gather(call("POST", address, body), call("POST", address, body))
        await asyncio.sleep(0.1)
        other = await call("POST", address, {**body, "messages": QUESTION[1:]})
        first, second = await calls
    assert first == second
    assert len(slow.requests) == 1
    assert other[0] == 409


async def test_keys_guard_turns_rewards_and_views() -> None:
    trainer = trainer_side(engine(ANSWER), settings=TrainerSettings(api_key="key-of-the-server"))
    body = {"rollout_id": "r", "messages": QUESTION, "response_mask": None}
    ours, theirs = {"Authorization": "Bearer key-of-the-server"}, {"Authorization": "Bearer key-of-session"}
    async with served(create_app(trainer=trainer)) as url:
        opening = {"rollout_id": "r", "api_key": "key-of-session"}
        assert (await call("POST", f"{url}/rollouts", opening))[0] == 401
        assert (await call("POST", f"{url}/rollouts", opening, headers=ours))[0] == 200
        assert (await call("POST", f"{url}/v1/chat/completions", body))[0] == 401
        assert (await call("POST", f"{url}/v1/chat/completions", body, headers=theirs))[0] == 200
        assert (await call("GET", f"{url}/rollouts/r", headers=theirs))[0] == 200
        assert (await call("GET", f"{url}/rollouts/other", headers=theirs))[0] == 401
        assert (await call("GET", f"{url}/rollouts/other", headers=ours))[0] == 404
        assert (await call("POST", f"{url}/rollouts/r/end", {"reward": 1}, headers=theirs))[0] == 401
        assert (await call("POST", f"{url}/rollouts/r/end", {"reward": 1}, headers=ours))[0] == 200


async def test_the_stored_form_of_a_key_is_refused_as_a_key() -> None:
    trainer = trainer_side(engine(ANSWER))
    body = {"rollout_id": "r", "messages": QUESTION, "response_mask": None}
    async with served(create_app(trainer=trainer)) as url:
        await call("POST", f"{url}/rollouts", {"rollout_id": "r", "api_key": "key-of-session"})
        for key, status in ((trainer.get_session("r").opened.api_key, 401), ("key-of-session", 200)):
            headers = {"Authorization": f"Bearer {key}"}
            assert (await call("POST", f"{url}/v1/chat/completions", body, headers=headers))[0] == status


async def test_a_request_that_the_engine_refuses_is_not_to_be_repeated() -> None:
    trainer = trainer_side(FakeEngine([EngineError("it is too long", {"status": 400}), EngineError("it is gone")]))
    body = {"rollout_id": "r", "messages": QUESTION, "response_mask": None}
    async with served(create_app(trainer=trainer)) as url:
        assert [(await call("POST", f"{url}/v1/chat/completions", body))[0] for _ in range(2)] == [400, 503]


async def test_a_rollout_ends_once_and_takes_no_turns_afterwards() -> None:
    sink = KeptItems()
    trainer = trainer_side(engine(ANSWER, ANSWER), sink=sink)
    sink.failures.append(OSError("no route"))
    body = {"rollout_id": "r", "messages": QUESTION, "response_mask": None}
    end = {"reward": 0.5, "job_id": "j", "instance_id": "i", "uid": "u"}
    async with served(create_app(trainer=trainer)) as url:
        assert (await call("POST", f"{url}/rollouts/r/end", end))[0] == 404
        await call("POST", f"{url}/v1/chat/completions", body)
        assert (await call("POST", f"{url}/rollouts/r/end", {"job_id": "j"}))[0] == 400
        assert (await call("POST", f"{url}/rollouts/r/end", end))[0] == 503  # stays open
        first = await call("POST", f"{url}/rollouts/r/end", end)
        again = await call("POST", f"{url}/rollouts/r/end", end)
        other = await call("POST", f"{url}/rollouts/r/end", {**end, "reward": 1})
        late = await call("POST", f"{url}/v1/chat/completions", {**body, "messages": QUESTION[1:]})
    assert first == again
    assert first[0] == 200
    assert [item["uid"] for _, item in sink.written] == ["u"]
    assert (other[0], late[0]) == (409, 409)
    assert "takes no more turns" in late[1]["error"]["message"]


async def test_the_session_shows_its_mask_and_show_mask_colours_it() -> None:
    trainer = trainer_side(engine(CALL, "<b>345</b>"))
    async with served(create_app(trainer=trainer)) as url:
        server = ThirdPartyRolloutServer(demo_tokenizer(), url)
        await server.rollout("r", QUESTION)
        _, shown = await call("GET", f"{url}/rollouts/r")
        _, listed = await call("GET", f"{url}/rollouts")
        assert (await call("GET", f"{url}/rollouts/other"))[0] == 404
    session = trainer.get_session("r")
    assert shown["response_mask"] == session.response_mask
    assert shown["response_ids"] == session.response_ids
    assert shown["rows"][0]["loss_mask"][len(shown["prompt_ids"]) :] == session.response_mask
    sections = sections_of(shown, MultiTurnLossMaskGenerator(demo_tokenizer()))
    assert sections[0].title.startswith("row 1, turns 1, 2: ")
    assert 'class="trained"' in page(sections)
    assert "<b>345" not in page(sections)
    assert [entry["rollout_id"] for entry in listed["rollouts"]] == ["r"]


async def test_sessions_expire_and_are_bounded() -> None:
    now = [0.0]
    settings = TrainerSettings(idle_s=10, keep_ended_s=5, max_sessions=2)
    trainer = trainer_side(engine(ANSWER, ANSWER, ANSWER, ANSWER), settings=settings, clock=lambda: now[0])
    turn = {"messages": QUESTION, "response_mask": None}
    for name in ("a", "b"):
        await trainer.complete({"rollout_id": name, **turn})
    async with served(create_app(trainer=trainer)) as url:
        assert (await call("POST", f"{url}/v1/chat/completions", {"rollout_id": "c", **turn}))[0] == 503
        now[0] = 11
        assert (await call("POST", f"{url}/v1/chat/completions", {"rollout_id": "c", **turn}))[0] == 200
        status, gone = await call("POST", f"{url}/v1/chat/completions", {"rollout_id": "a", **turn})
        assert (status, gone["error"]["code"]) == (409, "session_ended")
        assert "is expired (no call came for 10 s)" in gone["error"]["message"]
        now[0] = 17
        assert (await call("GET", f"{url}/rollouts/a"))[0] == 404


# --- the process -----------------------------------------------------------------------------------------------------


async def test_the_process_serves_both_sides_and_asks_for_its_token(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef-token\n")
    settings = RemoteRolloutSettings(port=0, engine_url="http://127.0.0.1:1", token_file=token)
    async with running(settings) as url:
        assert (await call("GET", f"{url}/health"))[0] == 200
        assert (await call("POST", f"{url}/rollout", rollout_body(url)))[0] == 401
        assert (await call("GET", f"{url}/rollouts"))[0] == 401
        headers = {"Authorization": "Bearer 0123456789abcdef-token"}
        assert (await call("GET", f"{url}/rollouts", headers=headers)) == (200, {"rollouts": []})


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"buffer_url": "http://127.0.0.1:1"}, "give --engine-url"),
        ({"tokenizer_roots": ["/no/such"]}, "is not a folder"),
        ({"tokenizers": ["qwen"]}, "NAME=FOLDER"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        build_settings(RemoteRolloutSettings, given)


def test_tokenizers_are_named_by_their_folders(tmp_path: Path) -> None:
    settings = RemoteRolloutSettings(tokenizers=(f"qwen={tmp_path}",))
    assert settings.tokenizer_settings().folders == {"qwen": tmp_path}
