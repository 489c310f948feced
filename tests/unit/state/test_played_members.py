"""Who does not know ``remove_sample`` members gets played ones alone; the trainer's documented loop runs on them."""

from __future__ import annotations

import asyncio
import json
import pickle
from typing import Any

import aiohttp
import pytest
from flask.testing import FlaskClient

from rollout_buffer_lab.mock_trainer import trainer_args
from slime.rollout.agent_rollout import get_rollout_data, start_rollout
from slime_plugins.rollout_buffer.client import AsyncRolloutBufferClient, RolloutBufferClient
from slime_plugins.rollout_buffer.errors import (
    ConflictError,
    InvalidPayloadError,
    NotFoundError,
    RolloutBufferError,
    UnavailableError,
)
from slime_plugins.rollout_buffer.reporting.job_description import describe_job
from slime_plugins.rollout_buffer.rules.causes import Shortfall
from slime_plugins.rollout_buffer.server.http import ServerContext
from slime_plugins.rollout_buffer.state.job_lookup import group_policy
from tests.loopback_buffer import LoopbackBuffer, ScriptedReply
from tests.support import written


def post(client: FlaskClient, path: str, body: Any) -> Any:
    reply = client.post(path, data=json.dumps(body))
    assert reply.status_code == 200, reply.get_data()
    return reply.get_json()


def start_padded(client: FlaskClient, **changes: Any) -> None:
    """A job whose one group is delivered with three played members of four."""
    job = {"task_type": "external", "num_repeat_per_sample": 4, "job_id": "j", "reward_range": [-1, 1], **changes}
    post(client, "/start_rollout", job)
    for i in range(3):
        post(client, "/buffer/write", written(f"a{i}", "a", reward=i % 2))
    context: ServerContext = client.application.extensions["rollout_buffer"]
    found = context.buffer.job("j")
    ((group, _),) = context.buffer.open_groups_with_items(found.key)
    context.buffer.judge_and_close(group, group_policy(found), shortfall=Shortfall.TIMED_OUT)


def items_of(reply: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = reply["data"]["data"]
    return found


def test_a_plain_poll_gets_played_members_and_is_told_that_the_group_is_short(client: FlaskClient) -> None:
    start_padded(client)
    reply = post(client, "/get_rollout_data", {})
    assert [item["uid"] for item in items_of(reply)] == ["a0", "a1", "a2"]
    assert not any(item["remove_sample"] for item in items_of(reply))
    (short,) = reply["data"]["meta_info"]["short_groups"]
    assert short == {
        "group_index": items_of(reply)[0]["group_index"],
        "instance_id": "a",
        "members": 3,
        "group_size": 4,
        "delivered": True,
    }


@pytest.mark.parametrize("asks", [{"lease_s": 60}, {"dummies": True}])
def test_who_leases_or_says_so_gets_the_dummies(client: FlaskClient, asks: dict[str, Any]) -> None:
    start_padded(client)
    reply = post(client, "/get_rollout_data", asks)
    assert [item["remove_sample"] for item in items_of(reply)] == [False, False, False, True]
    assert "short_groups" not in reply["data"]["meta_info"]


def test_who_leases_may_do_without_dummies(client: FlaskClient) -> None:
    start_padded(client)
    assert len(items_of(post(client, "/get_rollout_data", {"lease_s": 60, "dummies": False}))) == 3


@pytest.mark.parametrize(("damaged", "left", "delivered"), [(1, 2, True), (2, 0, False)])
def test_a_group_of_which_too_little_can_be_read_is_left_out_and_fails(
    client: FlaskClient, damaged: int, left: int, delivered: bool
) -> None:
    start_padded(client, min_valid_item_size_ratio=0.5, min_timeout_group_size_ratio=0.5)
    context: ServerContext = client.application.extensions["rollout_buffer"]
    with context.buffer.store.write() as connection:
        for i in range(damaged):
            query = "UPDATE trajectories SET body = NULL, body_place = '9:0:10:00' WHERE uid = ?"
            connection.execute(query, (f"a{i}",))
    reply = post(client, "/get_rollout_data", {})
    assert len(items_of(reply)) == left
    (short,) = reply["data"]["meta_info"]["short_groups"]
    assert (short["members"], short["delivered"]) == (3 - damaged, delivered)
    accounting = describe_job(context.buffer.store, context.buffer.job("j"))["groups"]
    assert (accounting["delivered"], accounting["failed"]) == ((1, 0) if delivered else (0, 1))


# --- the client and the trainer's documented functions ---------------------------------------------------------------


def refusal(status: int, code: str) -> ScriptedReply:
    error = {"error": {"code": code, "message": "says why", "detail": {"k": 1}}}
    return ScriptedReply(status=status, body=json.dumps(error).encode())


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [(400, "invalid_payload", InvalidPayloadError), (404, "not_found", NotFoundError), (409, "conflict", ConflictError),
     (503, "unavailable", UnavailableError), (502, "", RolloutBufferError)],
)  # fmt: skip
async def test_what_the_buffer_refuses_is_its_error_and_one_of_aiohttp(
    status: int, code: str, kind: type[RolloutBufferError]
) -> None:
    with LoopbackBuffer([]) as buffer:
        for _ in range(2):
            buffer.script("/get_rollout_data", refusal(status, code))
            with pytest.raises(aiohttp.ClientError) as raised:
                await get_rollout_data(buffer.url)
            error = raised.value
            assert isinstance(error, kind)
            again = pickle.loads(pickle.dumps(error))
            assert isinstance(again, kind)
            assert isinstance(again, aiohttp.ClientError)
            assert again.detail == error.detail


def started(buffer: LoopbackBuffer, metadata: dict[str, Any]) -> None:
    args = trainer_args(rollout_buffer_url=buffer.url, prompt_data="f", hf_checkpoint="none", n_samples_per_prompt=2)
    start_rollout(buffer.url, args, metadata)


async def test_our_own_clients_say_that_they_know_dummies_and_the_documented_function_wants_none() -> None:
    with LoopbackBuffer(["a", "b", "c"]) as buffer:
        started(buffer, {"finished_groups": ["a"]})
        assert buffer.bodies("/start_rollout")[0]["skip_instance_ids"] == ["a"]
        await get_rollout_data(buffer.url, num=2)
        await asyncio.to_thread(RolloutBufferClient(buffer.url).get_rollout_data)
        async with AsyncRolloutBufferClient(buffer.url) as client:
            await client.get_rollout_data(lease_s=60)
        assert [body.get("dummies") for body in buffer.bodies("/get_rollout_data")] == [False, True, None]
