"""``/jobs/ID/buffer/write``: where generators write that name no job; what a job says of items that were refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from flask.testing import FlaskClient

from slime_plugins.rollout_buffer.server.http import ServerContext
from slime_plugins.rollout_buffer.storage.tables import job_rows
from tests.asgi_client import post
from tests.support import written

TOKEN = "a-token-of-enough-length"


def start(client: FlaskClient, job_id: str, **headers: str) -> None:
    body = {"task_type": "external", "num_repeat_per_sample": 2, "job_id": job_id}
    assert post(client, "/start_rollout", body, **headers)[0] == 200


def test_a_job_says_whether_it_has_an_input_or_its_items_bring_its_instances(client: FlaskClient) -> None:
    start(client, "mine")
    body = {"task_type": "external", "job_id": "given", "instances": [{"instance_id": "a"}]}
    assert post(client, "/start_rollout", body)[0] == 200
    assert [client.get(f"/jobs/{name}").get_json()["has_input"] for name in ("mine", "given")] == [False, True]


def played_by_its_own_generator(client: FlaskClient, job_id: str) -> None:
    """Makes a job one that a runner plays whose generator writes its items over HTTP."""
    context: ServerContext = client.application.extensions["rollout_buffer"]
    with context.buffer.store.write() as connection:
        job = job_rows.find_job(connection, job_id)
        assert job is not None
        job_rows.update_job(connection, job.key, has_runner=True, takes_items=True)


def first_explanation(client: FlaskClient, job_id: str, **headers: str) -> dict[str, Any]:
    reply = client.get(f"/jobs/{quote(job_id, safe='')}/explanation", headers=headers)
    found: dict[str, Any] = reply.get_json()["explanation"][0]
    return found


@pytest.mark.parametrize("job_id", ["mine", "runs/7/buffer/writes", "100 % übung?#~1", "a//b/"])
def test_items_that_name_no_job_land_in_the_one_whose_address_they_are_posted_to(
    client: FlaskClient, job_id: str
) -> None:
    for name in (job_id, "another"):
        start(client, name)
    address = f"/jobs/{quote(job_id, safe='')}/buffer/write"
    status, reply = post(client, address, written("u1"))
    assert (status, reply["job_id"], reply["results"]) == (200, job_id, [{"uid": "u1", "status": "stored"}])
    assert post(client, address, {"items": [written("u2")]})[1]["job_id"] == job_id
    assert post(client, address, {**written("u3"), "job_id": "another"})[1]["job_id"] == "another"
    assert post(client, "/jobs/nobody/buffer/write", written("u4"))[0] == 404
    assert client.get(address).status_code == 404


def test_a_large_body_lands_in_its_job_too(client: FlaskClient) -> None:
    start(client, "mine")
    start(client, "another")
    items = [written(f"u{at}", messages=[{"role": "assistant", "content": "x" * 1_200_000}]) for at in (0, 1)]
    assert post(client, "/jobs/mine/buffer/write", {"items": items})[1]["job_id"] == "mine"


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/jobs/mine/buffer/write", b"{broken", "400 invalid_payload: the body is not valid JSON"),
        ("/jobs/mine/buffer/write", {"uid": "u"}, "400 invalid_payload: item"),
        ("/buffer/write", {"uid": "u", "job_id": "mine"}, "400 invalid_payload: item"),
        ("/jobs/mine/buffer/write", {"items": []}, "400 invalid_payload: items must be"),
        ("/buffer/write", written("u"), "409 conflict: 2 jobs are open: select one with job_id"),
    ],
)
def test_a_job_whose_generator_is_refused_says_so_with_status_and_reason(
    client: FlaskClient, path: str, body: Any, reason: str
) -> None:
    for name in ("mine", "another"):
        start(client, name)
    played_by_its_own_generator(client, "mine")
    assert post(client, path, body)[0] >= 400
    said = first_explanation(client, "mine")
    assert (said["code"], said["severity"]) == ("refused_items", "stopped")
    assert f"1 item was refused. The last was answered {reason}" in said["message"]
    assert said["advice"] == "Fix the program that writes the items."
    assert first_explanation(client, "another")["code"] == "external_waits"


def test_refusals_of_a_text_that_was_mended_are_not_said_again(client: FlaskClient) -> None:
    start(client, "mine")
    context: ServerContext = client.application.extensions["rollout_buffer"]
    assert post(client, "/jobs/mine/buffer/write", {"uid": "u"})[0] == 400
    context.buffer.fail_job(context.buffer.job("mine").key, "run_rollout raised")
    start(client, "mine")
    assert client.get("/jobs/mine").get_json()["refused_items"] == 0


def test_a_writer_without_the_token_is_told_by_its_job_and_changes_nothing_else(
    make_client: Callable[..., FlaskClient], tmp_path: Path
) -> None:
    (tmp_path / "token").write_text(TOKEN + "\n")
    client = make_client(token_file=tmp_path / "token")
    known = {"Authorization": f"Bearer {TOKEN}"}
    start(client, "mine", **known)
    for _ in range(3):
        assert post(client, "/jobs/mine/buffer/write", written("u"))[0] == 401
    job = client.get("/jobs/mine", headers=known).get_json()
    assert (job["refused_items"], job["outcomes"]) == (1, {}), "of those whom nobody knows one in a while is noted"
    said = client.get("/jobs/mine/explanation", headers=known).get_data(as_text=True)
    assert "401 unauthorized: no token was sent" in said
    assert post(client, "/jobs/mine/buffer/write", written("u"), **known)[0] == 200
