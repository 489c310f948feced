"""Looking back: past deliveries again byte for byte, and trajectories by filter, page and uid. Nothing changes."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import pytest
from flask.testing import FlaskClient

from slime_plugins.rollout_buffer.buffer import Buffer
from tests.support import message_with_image, written


def post(client: FlaskClient, path: str, body: Any) -> Any:
    reply = client.post(path, data=json.dumps(body))
    assert reply.status_code == 200, reply.get_json()
    return reply


def start(client: FlaskClient, job_id: str = "j", n: int = 2) -> None:
    post(client, "/start_rollout", {"task_type": "external", "num_repeat_per_sample": n, "job_id": job_id})


def write(client: FlaskClient, *items: dict[str, Any], job_id: str = "j") -> None:
    post(client, "/buffer/write", {"job_id": job_id, "items": list(items)})


def poll(client: FlaskClient, **options: Any) -> bytes:
    content: bytes = post(client, "/get_rollout_data", {"job_id": "j", **options}).data
    return content


def delivery_id(content: bytes) -> str:
    found: str = json.loads(content)["data"]["meta_info"]["delivery_id"]
    return found


def get(client: FlaskClient, path: str) -> Any:
    reply = client.get(path)
    assert reply.status_code == 200, reply.get_json()
    return reply.get_json()


def everything(client: FlaskClient) -> list[Any]:
    """Every row of every table that delivering or looking could change."""
    buffer: Buffer = client.application.extensions["rollout_buffer"].buffer
    with buffer.store.read() as connection:
        tables = ("jobs", "groups", "attempts", "members", "deliveries", "delivery_groups", "portion_sums")
        rows = [tuple(row) for table in tables for row in connection.execute(f"SELECT * FROM {table}")]
        return [*rows, *(tuple(row) for row in connection.execute("SELECT uid, portion FROM trajectories"))]


# --- time travel -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("images", ["inline", "hash"])
def test_a_past_delivery_comes_again_byte_for_byte_and_nothing_changes(client: FlaskClient, images: str) -> None:
    start(client)
    write(client, written("a0", "a", reward=0.1, messages=[message_with_image()]), written("a1", "a", reward=1 / 3))
    first = poll(client, lease_s=600, images=images)
    write(client, written("b0", "b", reward=0), written("b1", "b"))
    post(client, "/ack", {"delivery_id": delivery_id(first)})
    second = poll(client, images=images)
    write(client, written("a2", "a"))
    post(client, "/jobs/j/cancel", {})
    before = everything(client)
    for original in (first, second, first):
        again = client.get(f"/deliveries/{delivery_id(original)}?images={images}")
        assert (again.status_code, again.data, again.mimetype) == (200, original, "application/json")
    assert everything(client) == before


def test_an_expired_delivery_can_still_be_looked_at_after_its_groups_were_delivered_apart(client: FlaskClient) -> None:
    start(client)
    write(client, written("a0", "a", reward=0), written("a1", "a"))
    write(client, written("b0", "b", reward=0), written("b1", "b"))
    first = poll(client, lease_s=0.001)
    one = poll(client, max_groups=1)
    other = poll(client, max_groups=1)
    assert client.get(f"/deliveries/{delivery_id(first)}").data == first
    assert [json.loads(content)["data"]["meta_info"]["num_groups"] for content in (one, other)] == [2, 0]


def test_deliveries_are_listed_newest_first_in_pages(client: FlaskClient) -> None:
    start(client, n=1)
    made = []
    for number in range(5):
        write(client, written(f"u{number}", f"i{number}"))
        made.append(delivery_id(poll(client, lease_s=600, consumer_id="c", poll_id=str(number))))
    post(client, "/ack", {"delivery_ids": made[:2]})
    found: list[Any] = []
    page = get(client, "/jobs/j/deliveries?limit=2")
    while page["next_cursor"] is not None:
        assert len(page["deliveries"]) == 2
        found += page["deliveries"]
        page = get(client, f"/jobs/j/deliveries?limit=2&cursor={page['next_cursor']}")
    found += page["deliveries"]
    assert [entry["delivery_id"] for entry in found] == made[::-1]
    assert [entry["state"] for entry in found] == ["leased", "leased", "leased", "acked", "acked"]
    assert {(entry["groups"], entry["samples"], entry["consumer_id"]) for entry in found} == {(1, 1, "c")}


# --- trajectories ----------------------------------------------------------------------------------------------------


@pytest.fixture
def filled(client: FlaskClient) -> FlaskClient:
    """Two jobs. The first has six trajectories of three instances, with rewards from 0 to 5; the last one is late."""
    start(client)
    start(client, "k")
    names = ("a", "a", "b", "b", "c", "a")
    items = [written(f"u{at}", name, reward=float(at)) for at, name in enumerate(names)]
    items[1]["extra_info"] = {"finish_reason": "length"}
    items[2]["stop_reason"] = "answered"
    write(client, *items)
    write(client, written("u0", "z", reward=0.5), job_id="k")
    return client


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        ("", ["u0", "u5", "u4", "u3", "u2", "u1", "u0"]),
        ("job_id=j", ["u5", "u4", "u3", "u2", "u1", "u0"]),
        ("job_id=k", ["u0"]),
        ("instance_id=a", ["u5", "u1", "u0"]),
        ("outcome=truncated", ["u1"]),
        ("stop_reason=answered", ["u2"]),
        ("min_reward=2&max_reward=4", ["u4", "u3", "u2"]),
        ("max_reward=0", ["u0"]),
        ("instance_id=a&min_reward=1&job_id=j", ["u5", "u1"]),
        ("instance_id=A", []),
        ("limit=2", ["u0", "u5"]),
    ],
)
def test_trajectories_are_found_by_what_is_asked(filled: FlaskClient, query: str, wanted: list[str]) -> None:
    page = get(filled, f"/trajectories?{query}")
    assert [entry["uid"] for entry in page["trajectories"]] == wanted


def test_one_trajectory_is_returned_as_it_is_stored(client: FlaskClient) -> None:
    start(client)
    generations = [{"keep": 0, "prompt_ids": [1, 2], "output_ids": [3], "output_log_probs": [-0.5]}]
    item = written("x/1 é?#%", "a", messages=[message_with_image()], generations=generations, extra_info={"k": "v"})
    write(client, item, written("plain", "a"))
    path = f"/trajectories/{quote('x/1 é?#%', safe='')}"
    found = get(client, path)
    assert (found["uid"], found["job_id"], found["reward"], found["extra_info"]["k"]) == ("x/1 é?#%", "j", 1.0, "v")
    assert found["generations"][0]["output_ids"] == [3]
    (sha256,) = found["images"]
    assert found["messages"][0]["content"][0]["image_url"]["url"] == f"sha256:{sha256}"
    assert get(client, f"{path}?images=inline")["messages"] == item["messages"]


@pytest.mark.parametrize(
    ("path", "status", "sentence"),
    [
        ("/deliveries/nope", 404, "there is no delivery 'nope'"),
        ("/deliveries/nope?images=jpg", 400, "images"),
        ("/deliveries/nope?limit=1", 400, "limit"),
        ("/jobs/nope/deliveries", 404, "there is no job 'nope'"),
        ("/jobs/nope/deliveries?limit=0", 400, "limit"),
        ("/jobs/nope/deliveries?cursor=-1", 400, "cursor"),
        ("/jobs/nope/deliveries?cursor=99999999999999999999", 400, "cursor"),
        ("/trajectories?limit=1001", 400, "limit"),
        ("/trajectories?limit=many", 400, "limit"),
        ("/trajectories?outcome=won", 400, "outcome"),
        ("/trajectories?stop_reason=tired", 400, "stop_reason"),
        ("/trajectories?min_reward=nan", 400, "min_reward"),
        ("/trajectories?max_reward=1e999", 400, "max_reward"),
        ("/trajectories?min_reward=2&max_reward=1", 400, "nothing can lie between"),
        ("/trajectories?min_version=2&max_version=1", 400, "nothing can lie between"),
        ("/trajectories?rewards=1", 400, "rewards"),
        ("/trajectories?job_id=nope", 404, "there is no job 'nope'"),
        ("/trajectories?job_id=", 400, "job_id"),
        ("/trajectories?instance_id=a%00b", 400, "instance_id"),
        ("/trajectories/nope", 404, "there is no trajectory 'nope'"),
        ("/trajectories/nope?job_id=nope", 404, "there is no job 'nope'"),
    ],
)
def test_a_wrong_question_gets_a_sentence(client: FlaskClient, path: str, status: int, sentence: str) -> None:
    reply = client.get(path)
    assert (reply.status_code, sentence in reply.get_json()["error"]["message"]) == (status, True), reply.get_json()
