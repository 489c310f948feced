"""A key of ``start_rollout`` that is nearly a known one is a slip and refused; any other is somebody's option."""

from __future__ import annotations

from typing import Any

import pytest

from slime_plugins.rollout_buffer.errors import InvalidPayloadError
from slime_plugins.rollout_buffer.wire.poll_requests import PollPayload
from slime_plugins.rollout_buffer.wire.request_fields import parse
from slime_plugins.rollout_buffer.wire.start_request import StartPayload

BODY: dict[str, Any] = {
    "task_type": "math",
    "input_file": "/data/problems.jsonl",
    "remote_engine_url": "http://127.0.0.1:30000",
    "tokenizer_path": "/models/m",
}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"sampling_params": {"temprature": 0.8}},
            "sampling_params.temprature is not known; did you mean .*temperature",
        ),
        ({"temperature": 0.7}, "temperature is not known here; did you mean sampling_params.temperature"),
        ({"temprature": 0.7}, "temprature is not known here; did you mean sampling_params.temperature"),
        ({"max_new_tokens": 7}, "did you mean sampling_params.max_new_tokens"),
        ({"sampling_params": {"max_token": 8}}, "did you mean sampling_params.max_tokens"),
        ({"sampling_params": {"topk": 8}}, "did you mean sampling_params.top_k"),
        ({"group_timeout_second": 8}, "group_timeout_second is not known; did you mean group_timeout_seconds"),
        ({"max_token": 8}, "did you mean max_tokens"),
        ({"mesage_matching": "strict"}, "did you mean message_matching"),
        ({"message_matching": "loose"}, "must be one of strict, loose_tool_call, role_content_only"),
        ({"message_matching": ["strict"]}, "must be one of strict"),
        ({"num_epochs": 8}, "did you mean num_epoch"),
        ({"skip_instance_id": ["a"]}, "did you mean skip_instance_ids"),
        ({"engine-url": "http://a:1"}, "engine-url is not known; did you mean engine_url"),
        ({"sample": 4}, "did you mean samples"),
        ({"engine_url": "http://a:1"}, "engine_url and remote_engine_url are the same: give one of them"),
        ({"max_attempt": 1, "sampling_params": {"topp": 1}}, "max_attempts.*top_p"),
    ],
)
def test_a_slip_is_refused_with_what_was_meant(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidPayloadError, match=says):
        parse(StartPayload, {**BODY, **changes})


def test_the_names_of_the_command_line_are_those_of_slime() -> None:
    short = {"task_type": "math", "input_file": "/data/problems.jsonl", "engine_url": "http://127.0.0.1:30000"}
    payload = parse(StartPayload, {**short, "tokenizer": "/models/m", "samples": 4})
    assert payload == parse(StartPayload, {**BODY, "num_repeat_per_sample": 4})
    assert payload.options == {}


def test_options_of_generators_and_parameters_of_engines_pass() -> None:
    sampling = {
        "temperature": 0.8,
        "top_k": 20,
        "min_p": 0.1,
        "stop": ["."],
        "repetition_penalty": 1.1,
        "lora_path": "x",
    }
    options = {
        "android_world": {}, "apply_chat_template_kwargs": {}, "max_tokens_total": 8192, "max_turns": 10,
        "pin_sampling_params": True,
        "remote_rollout_callback_host": "10.0.0.5", "remote_rollout_tokenizer": "m", "remote_rollout_url": "http://a:1",
        "statelm": {}, "max_context_len": 1, "rollout_mode": "history",
    }  # fmt: skip

    payload = parse(StartPayload, {**BODY, "sampling_params": sampling, **options})

    assert payload.options == options
    assert payload.sampling().extra["lora_path"] == "x"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_process": "a"}, r"num_process: Input should be .* integer, [^;]*; num_process: Input should be 'auto'"),
        ({"remote_engine_url": "http://a b"}, "remote_engine_url: must be a URL like http://host:port"),
        ({"remote_engine_url": "http://a\n"}, "remote_engine_url: must be a URL like http://host:port"),
    ],
)
def test_a_wrong_value_is_named_by_its_key_alone(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidPayloadError, match=f"^{says}$"):
        parse(StartPayload, {**BODY, **changes})


@pytest.mark.parametrize(
    ("key", "says"), [("lease", "lease is not known; did you mean lease_s?"), ("xyz", "xyz is not known$")]
)
def test_a_key_that_a_body_does_not_have_is_refused_with_the_nearest(key: str, says: str) -> None:
    with pytest.raises(InvalidPayloadError, match=says):
        parse(PollPayload, {"job_id": "j", key: 1})
    with pytest.raises(InvalidPayloadError, match=f"^{'k' * 100} is not known$"):
        parse(PollPayload, {"k" * 10_000: 1})
