"""Rewards are any finite numbers; a range that a payload sets refuses at the write, and says and counts it."""

from __future__ import annotations

from typing import Any

import pytest
from flask.testing import FlaskClient

from tests.asgi_client import post
from tests.support import written


def start(client: FlaskClient, **changes: Any) -> None:
    status, reply = post(
        client, "/start_rollout", {"task_type": "external", "num_repeat_per_sample": 2, "job_id": "j", **changes}
    )
    assert status == 200, reply


def explanation(client: FlaskClient) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.get("/jobs/j/explanation").get_json()["explanation"]
    return found


def test_a_reward_outside_of_a_set_range_is_refused_counted_and_explained(client: FlaskClient) -> None:
    start(client, reward_range=[0, 1])
    status, reply = post(client, "/buffer/write", written("a0", "a", reward=-1.0))
    assert (status, reply["error"]["code"]) == (422, "reward_out_of_range")
    assert reply["error"]["message"] == (
        "item 'a0' has the reward -1, outside of the reward_range of job j, 0 to 1: nothing of this request was stored"
    )
    job = client.get("/jobs/j").get_json()
    assert (job["refused_items"], job["outcomes"]) == (1, {})
    says = {one["code"]: one["message"] for one in explanation(client)}
    assert "1 item was refused. The last was answered 422 reward_out_of_range: item 'a0'" in says["refused_items"]
    assert "no item was stored yet: 1 item was refused" in says["external_waits"]


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_the_ends_of_a_range_belong_to_it(client: FlaskClient, reward: float) -> None:
    start(client, reward_range=[0, 1])
    assert post(client, "/buffer/write", written("a0", "a", reward=reward))[0] == 200


def test_one_request_is_stored_whole_or_not_and_all_its_items_count_as_refused(client: FlaskClient) -> None:
    start(client, reward_range=[0, 1])
    items = [written("a0", "a", reward=1.0), written("a1", "a", reward=2.0), written("a2", "a", reward=3.0)]
    assert post(client, "/buffer/write", {"items": items})[0] == 422
    assert post(client, "/buffer/write", items[0])[1]["results"] == [{"uid": "a0", "status": "stored"}]
    assert client.get("/jobs/j").get_json()["refused_items"] == 3


def test_items_are_refused_where_a_runner_fills_the_slots(client: FlaskClient) -> None:
    payload = {"task_type": "math", "instances": [{"instance_id": "a"}], "remote_engine_url": "http://e:1"}
    start(client, **payload)
    status, reply = post(client, "/buffer/write", written("a0", "a"))
    assert (status, reply["error"]["code"]) == (409, "conflict")
    assert "job j is played by its runner" in reply["error"]["message"]
    assert "task_type external" in reply["error"]["message"]
