"""Broken and hostile input: a 4xx with a sentence each time, and whatever else is in the buffer goes on."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from flask.testing import FlaskClient

from rollout_buffer_lab.scripted_engine.math_policy import read_question
from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.cli.transcript_view import tagged_parts
from slime_plugins.rollout_buffer.credentials import redacted
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.engine.tool_call_parser import read_segments
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.generator.math_reward.answers import final_answer
from slime_plugins.rollout_buffer.serve_settings import read_token
from tests.support import written

START = {"task_type": "external", "num_repeat_per_sample": 1, "job_id": "j"}


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


def send(client: FlaskClient, path: str, body: Any, **options: Any) -> tuple[int, Any]:
    content = body if isinstance(body, bytes | str) else json.dumps(body)
    reply = client.post(path, data=content, **options)
    return reply.status_code, reply.get_json()


def refused(client: FlaskClient, path: str, body: Any, sentence: str, status: int = 400, **options: Any) -> None:
    got, reply = send(client, path, body, **options)
    assert got == status, reply
    assert set(reply["error"]) == {"code", "message", "detail"}
    assert sentence in reply["error"]["message"], reply


def the_rest_goes_on(client: FlaskClient) -> None:
    """Writing, polling and looking still work."""
    assert send(client, "/start_rollout", START)[0] == 200
    assert send(client, "/buffer/write", {**written("good", "good"), "job_id": "j"})[0] == 200
    assert client.get("/jobs").status_code == 200
    assert client.get("/metrics").status_code == 200
    status, reply = send(client, "/get_rollout_data", {"job_id": "j"})
    assert status == 200
    assert "good" in [item["uid"] for item in reply["data"]["data"]]


# --- nesting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [300, 1000, 100_000])
@pytest.mark.parametrize("where", ["extra_info", "messages", "timings_s", "generations"])
def test_an_item_that_is_nested_too_deeply_is_refused(client: FlaskClient, where: str, depth: int) -> None:
    send(client, "/start_rollout", START)
    parts = {
        "extra_info": '"DEEP"',
        "timings_s": '"DEEP"',
        "messages": '[{"role": "user", "content": [{"x": "DEEP"}]}]',
        "generations": '[{"prompt_ids": [1], "output_ids": [2], "weight_version": "DEEP"}]',
    }
    item = json.dumps({**written("u"), where: "PART"}).replace('"PART"', parts[where]).replace('"DEEP"', nested(depth))
    status, reply = send(client, "/buffer/write", item)
    assert status == 400 or (where == "generations" and depth == 300), reply
    the_rest_goes_on(client)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("option", "x" * 300_000, "more than 256 KB"),
        ("option", "é" * 140_000, "more than 256 KB"),
        ("option", [1.2345678901] * 9_990 + ["x" * 150_000], "more than 256 KB"),
        ("o" * 300_000, 1, "more than 256 KB"),
        ("option", [0] * 10_001, "more than 10000 elements"),
        ("option", {str(number): 0 for number in range(10_001)}, "more than 10000 elements"),
        ("option", [[[]] * 99] * 101, "more than 10000 elements"),
        ("sampling_params", {"regex": "x" * 300_000}, "more than 256 KB"),
    ],
)
def test_options_without_a_size_are_refused_at_the_door(client: FlaskClient, key: str, value: Any, reason: str) -> None:
    refused(client, "/start_rollout", {**START, key: value}, f"settings and options have {reason}")
    assert client.get("/jobs").get_json()["jobs"] == []
    the_rest_goes_on(client)


def test_of_thousands_of_keys_some_are_compared_with_the_known_ones(client: FlaskClient) -> None:
    many = {f"option{number}": 0 for number in range(5000)}
    assert send(client, "/start_rollout", {**START, **many, "num_epochs": 1})[0] == 200, "it comes after so many"
    refused(client, "/start_rollout", {**START, "num_epochs": 1, **many}, "did you mean num_epoch?")


@pytest.mark.parametrize("depth", [250, 254, 300, 1000])
@pytest.mark.parametrize("where", ["option", "sampling_params", "instances"])
def test_a_start_that_is_nested_too_deeply_is_refused_and_no_job_list_breaks(
    client: FlaskClient, where: str, depth: int
) -> None:
    changes = {"option": "DEEP", "sampling_params": {"x": "DEEP"}, "instances": [{"instance_id": "a", "x": "DEEP"}]}
    body = json.dumps({**START, "job_id": "deep", where: changes[where]}).replace('"DEEP"', nested(depth))
    status, reply = send(client, "/start_rollout", body)
    assert status == 400 or (where == "instances" and depth < 254), reply
    the_rest_goes_on(client)


# --- text ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "text"),
    [
        *(("uid", text) for text in ('"\\ud800"', '"\\udc00\\ud800"', '"\\ud800x"')),
        *((field, '"\\ud800"') for field in ("instance_id", "messages", "extra_info", "key")),
    ],
)
def test_half_a_character_is_refused(client: FlaskClient, field: str, text: str) -> None:
    send(client, "/start_rollout", START)
    item = written("u")
    item.update({"uid": "X"} if field == "uid" else {"instance_id": "X"} if field == "instance_id" else {})
    item.update({"messages": [{"role": "user", "content": "X"}]} if field == "messages" else {})
    item.update(
        {"extra_info": {"k": "X"} if field == "extra_info" else {"X": 1}} if field in ("extra_info", "key") else {}
    )
    refused(client, "/buffer/write", json.dumps(item).replace('"X"', text), "not valid JSON")
    the_rest_goes_on(client)


@pytest.mark.parametrize(
    "text", ["\x00", "a\x00b", "\u2028", "\ufeff", "\U0001f600", "e\u0301", "</script>", "\x7f", '"']
)
def test_odd_text_comes_out_as_it_went_in(client: FlaskClient, text: str) -> None:
    send(client, "/start_rollout", START)
    item = written("u", messages=[{"role": "user", "content": text}], extra_info={text: [text]})
    assert send(client, "/buffer/write", item)[0] == 200
    reply = client.post("/get_rollout_data", data=b"{}")
    (delivered,) = json.loads(reply.data)["data"]["data"]
    assert (delivered["messages"][0]["content"], delivered["extra_info"][text]) == (text, [text])


def sampled(**changes: Any) -> dict[str, Any]:
    return written("u", generations=[{"prompt_ids": [1], "output_ids": [2], "output_log_probs": [-0.5], **changes}])


@pytest.mark.parametrize(
    ("generation", "sentence"),
    [
        ({"output_ids": [10**12]}, "generations[0].output_ids[0] must be a token id"),
        ({"output_ids": [2**24]}, "must be a token id"),
        ({"prompt_ids": [2**31]}, "generations[0].prompt_ids[0] must be a token id"),
        ({"output_ids": [-1]}, "must be a token id"),
        ({"output_ids": [2.0]}, "must be a token id"),
        ({"output_log_probs": [0.5]}, "output_log_probs[0] must be a finite number of at most 0, not 0.5"),
        ({"output_log_probs": [-1e39]}, "must be a finite number"),
        ({"output_log_probs": ["-0.5"]}, "must be a finite number"),
        ({"output_log_probs": [None]}, "must be a finite number"),
        ({"output_log_probs": [-0.5, -0.5]}, "2 entries for 1 output ids"),
        ({"output_ids": [], "output_log_probs": []}, "generations[0].output_ids is empty: nothing was sampled"),
        ({"output_ids": [12_288]}, "holds the token id 12288, and the model of job j has 12288"),
        ({"prompt_ids": [1, 50_000]}, "holds the token id 50000"),
        (
            {"output_ids": [2] * 301, "output_log_probs": None},
            "a generation of 301 tokens, and the cap of job j is 300",
        ),
    ],
)
def test_tokens_that_nobody_can_have_sampled_are_refused(
    client: FlaskClient, generation: dict[str, Any], sentence: str
) -> None:
    model = {"tokenizer_path": str(DEMO_TOKENIZER_PATH), "sampling_params": {"max_tokens": 300}}
    assert send(client, "/start_rollout", {**START, **model})[0] == 200
    refused(client, "/buffer/write", sampled(**generation), sentence)
    refused(client, "/buffer/write", {"items": [written("fine"), sampled(**generation)]}, sentence.split("[0]")[-1])
    assert client.get("/jobs/j").get_json()["outcomes"] == {}
    assert send(client, "/buffer/write", sampled(output_ids=[12_287]))[0] == 200


def test_extra_info_cannot_pose_as_what_the_buffer_says(client: FlaskClient) -> None:
    send(client, "/start_rollout", START)
    posing = {"uid": "x", "reward": 99, "outcome": "won", "stop_reason": 5, "group_index": -1, "remove_sample": True}
    send(client, "/buffer/write", written("u", extra_info=posing))
    data = wire.decode_rollout_data(send(client, "/get_rollout_data", {})[1])
    (item,) = data.items
    assert (item.uid, item.reward, item.outcome, item.stop_reason, item.remove_sample, item.error) == (
        "u", 1.0, "completed", "stop", False, None,
    )  # fmt: skip
    assert item.extra_info["reward"] == 99
    assert item.extra_info["outcome"] == "completed"


@pytest.mark.parametrize("job_id", [".", "..", "../x", "a/../b", "a/./b", "a/cancel", "a/deliveries", "a/b/pause"])
def test_a_job_id_that_no_url_can_name_is_refused(client: FlaskClient, job_id: str) -> None:
    refused(client, "/start_rollout", {**START, "job_id": job_id}, "job_id")


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "number"),
    [
        *(("reward", number) for number in ("1e400", "-1e400", "NaN", "Infinity", "-Infinity", "0x10", "1_000", "01")),
        *((where, number) for where in ("raw_reward", "extra_info") for number in ("1e400", "NaN")),
    ],
)
def test_what_is_no_json_number_is_refused(client: FlaskClient, where: str, number: str) -> None:
    send(client, "/start_rollout", START)
    item = {**written("u"), where: {"k": "X"} if where == "extra_info" else "X"}
    refused(client, "/buffer/write", json.dumps(item).replace('"X"', number), "not valid JSON")
    the_rest_goes_on(client)


@pytest.mark.parametrize("changes", [{"normalize_rewards": True}, {"padding": "copy"}, {}])
def test_rewards_whose_sum_no_float_of_32_bits_holds_stop_nothing(client: FlaskClient, changes: dict[str, Any]) -> None:
    extreme = {**START, "num_repeat_per_sample": 4, "reward_range": [-3.4e38, 3.4e38], **changes}
    assert send(client, "/start_rollout", {**extreme, "job_id": "big"})[0] == 200
    for name, rewards in {
        "a": (3.4e38, 3.2e38, 3.1e38, 3.4e38),
        "b": (-3.1e38, 3.4e38, -3.2e38, 3.4e38),
    }.items():
        items = [written(f"{name}{at}", name, reward=reward) for at, reward in enumerate(rewards)]
        assert send(client, "/buffer/write", {"job_id": "big", "items": items})[0] == 200
    reply = client.post("/get_rollout_data", data=b'{"job_id": "big"}')
    assert reply.status_code == 200
    assert all(item["reward"] is not None for item in orjson.loads(reply.data)["data"]["data"])
    wire.decode_rollout_data(json.loads(reply.data))
    slots = client.get("/jobs/big").get_json()["slots"]
    assert slots["delivered"] + slots["failed"] + slots["filtered"] == 8
    the_rest_goes_on(client)


@pytest.mark.parametrize(
    "field", ["num_epoch", "max_groups_ahead", "max_attempts", "num_process", "max_tokens", "max_weight_version_lag"]
)
@pytest.mark.parametrize("number", ["1e308", "9" * 30, "9223372036854775808", '"' + "9" * 5000 + '"'])
def test_a_start_with_an_impossible_number_is_refused(client: FlaskClient, field: str, number: str) -> None:
    body = json.dumps({**START, field: "X"}).replace('"X"', number)
    refused(client, "/start_rollout", body, field)
    assert client.get("/jobs").get_json() == {"jobs": []}


# --- sizes -----------------------------------------------------------------------------------------------------------


def test_more_groups_than_a_job_can_have_are_refused(client: FlaskClient) -> None:
    body = {**START, "instances": [{"instance_id": i} for i in range(10)], "num_epoch": 1_000_000}
    refused(client, "/start_rollout", body, "10000000 groups")


def test_more_items_than_one_write_takes_are_a_413_that_says_the_limit(client: FlaskClient) -> None:
    send(client, "/start_rollout", START)
    body = {"items": [written("u")] * (wire.MAX_ITEMS + 1)}
    refused(client, "/buffer/write", body, "up to 100 items: send 101 in several", status=413)
    the_rest_goes_on(client)


def test_ids_that_would_fill_the_memory_are_refused(client: FlaskClient) -> None:
    send(client, "/start_rollout", START)
    first = {"prompt_ids": [1] * 100_000, "output_ids": []}
    again = {"keep": 100_000, "prompt_ids": [], "output_ids": []}
    body = {**written("u"), "generations": [first, *[again] * 20_000]}  # two billion ids in about a megabyte
    refused(client, "/buffer/write", body, "generations")
    the_rest_goes_on(client)


# --- shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"stop_reason": {"a": 1}},
        {"stop_reason": ["stop"]},
        {"outcome": {"a": 1}},
        {"outcome": ["completed"]},
        {"generations": [{"prompt_ids": [1], "output_ids": [2], "output_log_probs": [None]}]},
        {"generations": {"a": 1}},
        {"generations": [[1]]},
        {"generations": [{"keep": -1, "prompt_ids": [], "output_ids": []}]},
        {"generations": [{"prompt_ids": [1.5], "output_ids": []}]},
        {"generations": [{"prompt_ids": [], "output_ids": [], "weight_version_spans": [{"start": 1}]}]},
        {"timings_s": [1]},
        {"messages": {"role": "user"}},
        {"uid": True},
        {"uid": 1.5},
        {"instance_id": ""},
        {"raw_reward": False},
    ],
)
def test_a_wrong_shape_is_refused_and_its_neighbours_are_delivered(
    client: FlaskClient, changes: dict[str, Any]
) -> None:
    send(client, "/start_rollout", START)
    assert send(client, "/buffer/write", written("before", "before"))[0] == 200
    refused(client, "/buffer/write", {**written("u"), **changes}, next(iter(changes)))
    the_rest_goes_on(client)


@pytest.mark.parametrize(
    "content",
    [
        None,
        {"a": 1},
        [None, 1, "x", {"type": "image_url"}, {"type": "image_url", "image_url": None}],
        [{"type": "image_url", "image_url": {"url": ["x"]}}],
        [{"type": "image_url", "image_url": {"url": "sha256:../../etc/passwd"}}],
        [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}],
        [{"type": "image_url", "image_url": "data:image/png;base64,AAAA"}],
    ],
)
def test_odd_contents_of_a_message_are_kept_and_block_nothing(client: FlaskClient, content: Any) -> None:
    send(client, "/start_rollout", START)
    assert send(client, "/buffer/write", written("u", messages=[{"role": "user", "content": content}]))[0] in (200, 400)
    the_rest_goes_on(client)
    assert b"root:" not in client.get("/trajectories?limit=5").data


@pytest.mark.parametrize("line", ['{"instance_id": "a", "x": NaN}', '{"instance_id": "a", "x": "\\ud800"}',
    '{"instance_id": "a", "x": ' + "9" * 30 + "}", '{"instance_id": "a", "x": ' + nested(400) + "}"])  # fmt: skip
def test_a_line_of_an_input_file_that_cannot_be_kept_is_refused(client: FlaskClient, tmp_path: Path, line: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"instance_id": "good"}\n' + line + "\n")
    refused(client, "/start_rollout", {**START, "input_file": str(path)}, "line 2")


# --- the protocol ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/start_rollout", "/get_rollout_data", "/buffer/write", "/ack"])
def test_a_compressed_body_is_a_415_that_says_so(client: FlaskClient, path: str) -> None:
    body = gzip.compress(json.dumps(START).encode())
    refused(client, path, body, "uncompressed", status=415, headers={"Content-Encoding": "gzip"})


@pytest.mark.parametrize(
    "path",
    [
        "/images/..%2f..%2fbuffer.sqlite3",
        "/images/../buffer.sqlite3",
        "/images/%2e%2e/%2e%2e/etc/passwd",
        "/jobs/../../etc/passwd",
        "/jobs/%00",
        "/jobs/%ff%fe",
        "/jobs/" + "a" * 50_000,
        "/trajectories/..%2f..%2fetc%2fpasswd",
        "/trajectories/%ed%a0%80",
        "/deliveries/%0d%0aX-Evil:%201",
        "/static/../buffer.sqlite3",
        "/" + "a" * 50_000,
    ],
)
def test_paths_that_lead_nowhere_are_a_short_404(client: FlaskClient, path: str) -> None:
    reply = client.get(path)
    assert reply.status_code == 404
    assert len(reply.get_json()["error"]["message"]) < 2000
    assert "X-Evil" not in reply.headers


@pytest.mark.parametrize(
    "header",
    ["Bearer \xff\xfe", "Bearer ä", "Bearer", "", "bearer  ", "Bearer a-token-of-enough-lengtH", "Bearer " + "x" * 9000,
     "\xff", "Bearer a-token-of-enough-length x", "Basic YTpi"],
)  # fmt: skip
def test_a_wrong_token_is_a_401_whatever_its_bytes_but_for_health(
    make_client: Callable[..., FlaskClient], tmp_path: Path, header: str
) -> None:
    (tmp_path / "token").write_text("a-token-of-enough-length\n")
    client = make_client(token_file=tmp_path / "token")
    for path in ("/jobs", "/nowhere", "/metrics", "/openapi.json", "/images/x", "/trajectories/x"):
        reply = client.get(path, headers={"Authorization": header})
        assert (reply.status_code, reply.get_json()["error"]["code"]) == (401, "unauthorized")
    assert client.get("/health", headers={"Authorization": header}).status_code == 200
    assert client.get("/jobs", headers={"Authorization": "Bearer a-token-of-enough-length"}).status_code == 200


def test_a_token_that_headers_cannot_carry_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("pässwörd-of-enough-length\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="ASCII"):
        read_token(tmp_path / "token")


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "piece",
    [
        *("<tool_call>", "<tool_call><function=a><parameter=b>", "<think>"),
        *("://:", '\\"', "\\boxed{", "1/", "((", "a ", "\n"),
    ],
)
def test_a_text_of_400_kb_that_closes_nothing_is_read_in_seconds(piece: str) -> None:
    """Readers of models' and users' texts once took minutes for one or another of them."""
    text = piece * (400_000 // len(piece))
    assert redacted(f"@{text} http://user:pass@host/").endswith(" http://***@host/")
    assert "".join(segment.text for segment in read_segments(text)) == text
    assert list(tagged_parts(text)) == []
    for read in (final_answer, read_question):
        read(text)
