"""The HTTP contract: what each route takes, says, and refuses with which sentence."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flask.testing import FlaskClient

from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.rules.groups import GROUP_TIMEOUT_NOTE
from slime_plugins.rollout_buffer.rules.heartbeats import SUPERVISOR
from slime_plugins.rollout_buffer.serve_settings import generator_files
from slime_plugins.rollout_buffer.server.http import ServerContext
from slime_plugins.rollout_buffer.server.routes import jobs as job_routes
from tests.asgi_client import post
from tests.support import PNG, PNG_HASH, written


def start(client: FlaskClient, **changes: Any) -> Any:
    return post(client, "/start_rollout", {"task_type": "external", "num_repeat_per_sample": "2", **changes})


def seed_payload(input_file: Path) -> dict[str, Any]:
    """The payload of slime's own trainer, numbers as the strings it sends."""
    return {
        "num_process": "100",
        "num_epoch": "3",
        "remote_engine_url": "http://127.0.0.1:3333",
        "remote_buffer_url": "http://127.0.0.1:8889",
        "task_type": "math",
        "input_file": str(input_file),
        "num_repeat_per_sample": "8",
        "max_tokens": "8192",
        "sampling_params": {"max_tokens": 8192, "temperature": 0.8, "top_p": 0.9},
        "tokenizer_path": str(input_file.parent),
        "skip_instance_ids": ["m1"],
    }


@pytest.fixture
def math_file(tmp_path: Path) -> Path:
    path = tmp_path / "math.jsonl"
    path.write_text("".join(json.dumps({"instance_id": f"m{i}", "prompt": []}) + "\n" for i in range(4)))
    return path


def test_the_trainers_own_payload_starts_a_job(client: FlaskClient, math_file: Path) -> None:
    status, reply = post(client, "/start_rollout", seed_payload(math_file))
    assert status == 200
    assert reply["message"] == "Rollout started"
    assert reply["groups"] == 12
    job = client.get(f"/jobs/{reply['job_id']}").get_json()
    assert {state: count for state, count in job["slots"].items() if count} == {
        "submitted": 96,
        "open": 88,
        "skipped": 8,
    }


def test_while_it_is_not_known_what_can_be_played_a_start_may_be_tried_again(client: FlaskClient) -> None:
    """As after a start of the service on a full disk, with no room to note the task types."""
    context: ServerContext = client.application.extensions["rollout_buffer"]
    context.buffer.beat(SUPERVISOR.name, os.getpid(), {})
    status, reply = start(client)
    assert (status, reply["error"]["code"]) == (503, "unavailable")
    assert "not known yet" in reply["error"]["message"]


def test_a_start_waits_until_the_generator_file_it_needs_is_listed_as_it_is_now(
    make_client: Callable[..., FlaskClient], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_routes, "LISTING_TIMEOUT_S", 0.0)
    mine = tmp_path / "generators" / "mine.py"
    mine.parent.mkdir()
    mine.write_text("")
    client = make_client(generator_dirs=[mine.parent])
    context: ServerContext = client.application.extensions["rollout_buffer"]

    def listed(broken: dict[str, str]) -> None:
        task_types = {"external": {"source": "/buffer/write"}, "mine": {"source": str(mine)}}
        found = {"task_types": task_types, "broken_generators": broken, "files": generator_files([mine.parent])}
        context.buffer.beat(SUPERVISOR.name, os.getpid(), found)

    def refusal(task_type: str) -> tuple[int, str]:
        status, reply = post(client, "/start_rollout", {"task_type": task_type, "instances": [{"instance_id": "a"}]})
        return status, "" if status == 200 else reply["error"]["message"]

    listed({})
    assert refusal("mine") == (
        400,
        "engine_url (remote_engine_url) is missing: the address of the SGLang router that samples",
    )
    mine.write_text("TASK_TYPE =")
    assert refusal("mine")[0] == 503
    assert "mine.py changed" in refusal("new")[1]
    assert refusal("external") == (200, "")
    listed({"mine.py": "mine.py, line 1: SyntaxError: invalid syntax\nTraceback"})
    status, message = refusal("new")
    assert status == 404
    assert message.endswith("\nmine.py does not load: mine.py, line 1: SyntaxError: invalid syntax\nTraceback")


def test_options_that_a_generator_declares_are_taken(client: FlaskClient, math_file: Path) -> None:
    declared = {**seed_payload(math_file), "task_type": "strict", "place": "a", "max_turns": 3}
    assert post(client, "/start_rollout", declared)[0] == 200


UNKNOWN_TASK_TYPES = [
    ({"task_type": "mth"}, "known: external, math, remote_rollout, strict; did you mean math?"),
    ({"task_type": "unheard_of"}, "no generator has task_type 'unheard_of'; known: external, math"),
]
WRONG_VALUES: dict[str, list[Any]] = {
    "task_type": [None, ["math"]],
    "input_file": ["x\x00y", "a" * 4000, 7],
    "num_epoch": ["three", 0, 1.5, True],
    "num_process": [-1, None, "automatic"],
    "num_repeat_per_sample": ["0", 10**30],
    "max_tokens": ["many"],
    "remote_engine_url": ["engine:3000", "file:///etc/passwd", "http://host:notaport"],
    "sampling_params": ["hot"],
    "skip_instance_ids": ["m1", [{}]],
    "job_id": ["", "x" * 300, "a\nb"],
    "group_timeout_seconds": [0],
    "min_valid_item_size_ratio": [1.5],
    "reward_range": [[1, 0]],
    "padding": ["zeros"],
}
STRICT = {"task_type": "strict", "place": "a"}
STATELM_IN_VERL = {"rollout": {"multi_turn": {"statelm_enable": False, "max_turns": 3}}}
WRONG_PAYLOADS: list[tuple[dict[str, Any], str]] = [
    *(({key: value}, key) for key, values in WRONG_VALUES.items() for value in values),
    ({"input_file": None}, "input_file is missing"),
    ({"input_file": "/etc/passwd"}, "start serve with --data-root /etc, or"),
    ({"input_file": "../../etc/passwd"}, "outside the data roots"),
    ({"input_file": "no_such.jsonl"}, "is not a file the buffer host can see"),
    ({"num_process": "auto", "num_process_min": 9, "num_process_max": 8}, "num_process_min"),
    ({"remote_engine_url": None}, "engine_url (remote_engine_url) is missing"),
    ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
    ({"sampling_params": {"top_p": 2}}, "sampling_params.top_p"),
    ({"tokenizer_path": "/no/such/folder"}, "tokenizer_path /no/such/folder is not a folder"),
    (
        {"task_type": "remote_rollout", "tokenizer_path": None},
        "tokenizer_path is missing: task_type remote_rollout needs the folder of",
    ),
    ({"task_type": "remote_rollout"}, "remote_rollout_url is missing: task_type remote_rollout needs the address"),
    ({**STRICT, "max_turn": 3}, "max_turn is not known to task_type strict: did you mean max_turns?"),
    ({**STRICT, "zebra": 3}, "zebra is not known to task_type strict: it takes max_turns, place"),
    ({**STRICT, "statelm": {"max_turn": 3}}, "statelm.max_turn is not known; did you mean statelm.max_turns?"),
    (
        {**STRICT, "actor_rollout_ref": STATELM_IN_VERL},
        "multi_turn.statelm_enable is not known; did you mean actor_rollout_ref.rollout.multi_turn.statelm_enabled?",
    ),
    ({"instances": [{"instance_id": "a"}]}, "not both"),
    ({"input_file": None, "instances": []}, "instances"),
    ({"input_file": None, "instances": ["a"]}, "instances"),
    ({"input_file": None, "instances": [{"prompt": 1}]}, "instances, line 1: instance_id is missing"),
    ({"input_file": None, "instances": [{"instance_id": "a"}, {"instance_id": "a"}]}, "is already on line 1"),
]


@pytest.mark.parametrize(
    ("changes", "sentence", "status"),
    [(*row, 400) for row in WRONG_PAYLOADS] + [(*row, 404) for row in UNKNOWN_TASK_TYPES],
)
def test_a_wrong_payload_gets_a_sentence_and_starts_nothing(
    client: FlaskClient, math_file: Path, changes: dict[str, Any], sentence: str, status: int
) -> None:
    got, reply = post(client, "/start_rollout", {**seed_payload(math_file), **changes})
    assert (got, sentence in reply["error"]["message"]) == (status, True), reply
    assert client.get("/jobs").get_json() == {"jobs": []}


def test_who_sets_a_limit_for_groups_that_are_played_here_is_told_that_it_bends_the_data(
    client: FlaskClient, math_file: Path
) -> None:
    payload = {**seed_payload(math_file), "job_id": "j"}
    _, reply = post(client, "/start_rollout", {**payload, "group_timeout_seconds": 60})
    assert reply["notes"] == [GROUP_TIMEOUT_NOTE]
    assert GROUP_TIMEOUT_NOTE in client.get("/jobs/j/explanation").get_data(as_text=True)
    _, reply = post(client, "/start_rollout", payload)
    assert (reply["attached"], reply["notes"]) == (True, [])
    assert GROUP_TIMEOUT_NOTE not in client.get("/jobs/j/explanation").get_data(as_text=True)
    external = {"task_type": "external", "num_repeat_per_sample": 2, "job_id": "e", "group_timeout_seconds": 60}
    assert post(client, "/start_rollout", external)[1]["notes"] == []


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"instance_id": "a"}\n{"broken\n', "line 2: not valid JSON (Invalid control character at: character 8)"),
        ('{"prompt": 1}\n', "line 1: instance_id is missing"),
        ('{"instance_id": "a"}\n{"instance_id": "a"}\n', "line 2: instance_id 'a' is already on line 1"),
        ('{"instance_id": "a"}\n\n{"prompt": 1}\n', "line 3: instance_id is missing"),
        ("[]\n", "must be a JSON object"),
        ("", "holds no instance"),
        ('{"instance_id": ""}\n', "instance_id must be a string"),
        ("\udcff", "cannot be read"),
    ],
)
def test_a_bad_input_file_is_refused_with_its_line(
    client: FlaskClient, math_file: Path, content: str, sentence: str
) -> None:
    math_file.write_bytes(content.encode("utf-8", "surrogateescape"))
    status, reply = post(client, "/start_rollout", seed_payload(math_file))
    assert (status, sentence in reply["error"]["message"]) == (400, True), reply


@pytest.mark.parametrize("body", [b"{nope", b"[]", b'"text"', b"\xff\xfe", b"[" * 100_000, b'{"a": NaN}', b"null"])
@pytest.mark.parametrize("path", ["/start_rollout", "/get_rollout_data", "/buffer/write", "/ack"])
def test_a_body_that_is_no_json_object_is_a_400(client: FlaskClient, path: str, body: bytes) -> None:
    status, reply = post(client, path, body)
    assert status in (400, 404)
    assert reply["error"]["message"]


def test_without_a_supervisor_no_work_is_accepted(client: FlaskClient) -> None:
    client.application.extensions["rollout_buffer"].buffer.remove_heartbeat("supervisor")
    status, reply = start(client)
    assert (status, reply["error"]["code"]) == (503, "unavailable")
    assert client.get("/health").status_code == 503


def test_a_start_while_the_supervisor_comes_up_is_told_to_come_again(client: FlaskClient) -> None:
    class ComingUp:
        def last(self) -> Any:
            return SimpleNamespace(age_s=0.0, detail={"starting": "generators are being listed"})

    client.application.extensions["rollout_buffer"].supervisor = ComingUp()
    status, reply = start(client)
    assert status == 503
    assert reply["error"]["message"] == "no job can be started yet: generators are being listed. Try again in a moment"


# --- writing ---------------------------------------------------------------------------------------------------------


def test_a_list_of_items_names_the_bad_one_and_keeps_none(client: FlaskClient) -> None:
    start(client)
    status, reply = post(client, "/buffer/write", {"items": [written("u"), {**written("v"), "reward": None}]})
    assert status == 400
    assert "items[1].reward" in reply["error"]["message"]
    assert client.get("/jobs").get_json()["jobs"][0]["slots"]["submitted"] == 0


def test_an_item_goes_in_and_comes_out_the_same(client: FlaskClient) -> None:
    start(client, num_repeat_per_sample=1)
    generations = [
        {"prompt_ids": [1, 2], "output_ids": [3], "output_log_probs": [-0.5], "finish_reason": "stop"},
        {"keep": 3, "prompt_ids": [4], "output_ids": [5, 6], "output_log_probs": [-1.0, -2.0]},
    ]
    item = written("u", extra_info={"k": [1, {"deep": None}], "finish_reason": "length"}, generations=generations)
    post(client, "/buffer/write", item)
    _, reply = post(client, "/get_rollout_data", {})
    data = wire.decode_rollout_data(reply)
    assert data.success
    (delivered,) = data.items
    assert delivered.messages == tuple(item["messages"])
    assert delivered.extra_info["k"] == [1, {"deep": None}]
    assert delivered.outcome == "truncated"
    assert [list(g.prompt_ids) for g in delivered.generations] == [[1, 2], [1, 2, 3, 4]]


def test_screenshots_come_back_by_hash_or_inline(client: FlaskClient) -> None:
    start(client, num_repeat_per_sample=1)
    text = {"type": "text", "text": 'a "url":"sha256:' + "0" * 64 + '"'}

    def showing(url: str) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, text]}]

    inline = showing(wire.encode_data_uri(PNG))
    for uid, asked, expected in (("a", {"images": "hash"}, showing(f"sha256:{PNG_HASH}")), ("b", {}, inline)):
        post(client, "/buffer/write", written(uid, uid, messages=inline))
        _, reply = post(client, "/get_rollout_data", asked)
        assert reply["data"]["data"][0]["messages"] == expected
    assert client.get(f"/images/{PNG_HASH}").data == PNG


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64,####",
        "data:image/png;base64,é",
        "data:text/html;base64,AAAA",
        "data:image/png;base64,AAAA",
    ],
)
def test_a_bad_inline_image_is_refused(client: FlaskClient, url: str) -> None:
    start(client)
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    status, reply = post(client, "/buffer/write", written("u", messages=[message]))
    assert status == 400
    assert "image" in reply["error"]["message"]


# --- polling ---------------------------------------------------------------------------------------------------------


def test_an_empty_poll_is_success_false_with_200(client: FlaskClient) -> None:
    status, reply = post(client, "/get_rollout_data", {})
    assert (status, reply["success"], reply["data"]["data"]) == (200, False, [])
    start(client)
    assert post(client, "/get_rollout_data", b"")[1]["data"]["meta_info"]["exhausted"] is False


def test_a_poll_of_a_job_whose_groups_were_all_dropped_is_told_so(client: FlaskClient) -> None:
    _, job = start(client)
    named = {"job_id": job["job_id"]}
    post(client, "/buffer/write", {**named, "items": [written("a1", "a", 1.0), written("a2", "a", 1.0)]})
    assert post(client, "/get_rollout_data", named)[1]["message"].startswith(
        "nothing is ready yet: every group that closed was dropped (1 filtered), 1 of them because all 2 members"
    )
    post(client, "/buffer/write", {**named, "items": [written("b1", "b", 1.0), written("b2", "b", 0.0)]})
    assert post(client, "/get_rollout_data", named)[1]["success"]
    assert post(client, "/get_rollout_data", named)[1]["message"] == "nothing is ready yet"


def test_a_poll_of_a_failed_job_is_told_why(client: FlaskClient) -> None:
    _, job = start(client)
    buffer = client.application.extensions["rollout_buffer"].buffer
    buffer.fail_job(buffer.job(job["job_id"]).key, "9 of 9 attempts failed: no label")
    _, reply = post(client, "/get_rollout_data", {"job_id": job["job_id"]})
    assert reply["message"] == (
        f"nothing is ready, and job {job['job_id']} is failed: 9 of 9 attempts failed: no label"
    )
    assert reply["data"]["meta_info"]["job_cause"] == "9 of 9 attempts failed: no label"


def test_an_ack_may_ride_on_the_next_poll(client: FlaskClient) -> None:
    start(client)
    post(client, "/buffer/write", {"items": [written("a", reward=0), written("b")]})
    _, reply = post(client, "/get_rollout_data", {"lease_s": 60})
    delivery = reply["data"]["meta_info"]["delivery_id"]
    _, reply = post(client, "/get_rollout_data", {"ack": [delivery]})
    assert reply["data"]["meta_info"]["acknowledged"]["acked"] == [delivery]
    assert post(client, "/ack", {"delivery_id": delivery})[1]["acked"] == [delivery]


@pytest.mark.parametrize(("body", "status"), [({"job_id": "nope"}, 404), ({}, 409)])
def test_a_poll_that_names_no_job_acknowledges_nothing(client: FlaskClient, body: dict[str, Any], status: int) -> None:
    _, job = start(client)
    start(client, job_id="another")
    named = {"job_id": job["job_id"]}
    post(client, "/buffer/write", {**named, "items": [written("a", reward=0), written("b")]})
    _, reply = post(client, "/get_rollout_data", {**named, "lease_s": 60})
    refused, _ = post(client, "/get_rollout_data", {**body, "ack": [reply["data"]["meta_info"]["delivery_id"]]})
    assert (refused, client.get(f"/jobs/{job['job_id']}").get_json()["slots"]["leased"]) == (status, 2)


@pytest.mark.parametrize(
    "body",
    [
        {"wait_s": 1e9},
        {"wait_s": -1},
        {"lease_s": 0},
        {"max_groups": 0},
        {"max_groups": 1, "batch_size": 1},
        {"poll_id": "1"},
        {"images": "jpg"},
        {"unknown_key": 1},
        {"ack": "x"},
        {"job_id": 5},
    ],
)
def test_a_wrong_poll_is_refused(client: FlaskClient, body: dict[str, Any]) -> None:
    assert post(client, "/get_rollout_data", body)[0] == 400


def test_unknown_ids_are_404(client: FlaskClient) -> None:
    assert post(client, "/get_rollout_data", {"job_id": "nope"})[0] == 404
    assert post(client, "/ack", {"delivery_id": "nope"})[0] == 404
    assert client.get("/jobs/nope").status_code == 404
    assert client.post("/jobs/nope/cancel").status_code == 404


def test_jobs_can_be_paused_resumed_and_cancelled(client: FlaskClient) -> None:
    _, reply = start(client, job_id="path/like/id")
    assert reply["job_id"] == "path/like/id"
    for verb, state in (("pause", "paused"), ("pause", "paused"), ("resume", "running"), ("cancel", "cancelled")):
        assert client.post(f"/jobs/path/like/id/{verb}").get_json()["state"] == state
    assert client.post("/jobs/path/like/id/resume").status_code == 409


def test_a_job_can_be_drained_also_when_it_is_over(client: FlaskClient) -> None:
    start(client, job_id="run")
    for _ in range(2):
        drained = client.post("/jobs/run/drain", json={"stop": True}).get_json()
        assert (drained["state"], drained["attempts"]) == ("paused", {})
    assert client.post("/jobs/run/resume").get_json()["state"] == "running"
    client.post("/jobs/run/cancel")
    assert client.post("/jobs/run/drain").get_json()["state"] == "cancelled"
    assert client.post("/jobs/run/drain", json={"stopp": True}).status_code == 400
    assert client.post("/jobs/nobody/drain").status_code == 404


# --- guarding --------------------------------------------------------------------------------------------------------


def test_a_body_over_the_limit_is_a_413_that_says_the_limit(make_client: Callable[..., FlaskClient]) -> None:
    client = make_client(max_body_bytes=2000)
    status, reply = post(client, "/buffer/write", written("u", messages=[{"role": "user", "content": "x" * 3000}]))
    assert (status, reply["error"]["code"]) == (413, "payload_too_large")
    assert "2000 bytes" in reply["error"]["message"]
