"""slime's arguments become the settings and payloads that the buffer understands."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_buffer_lab.mock_trainer import trainer_args
from slime.rollout.agent_rollout_settings import (
    buffer_attributes,
    engine_url,
    eval_payload,
    eval_sets,
    read_image_settings,
    read_row_settings,
    read_settings,
    start_payload,
)
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.wire.job_settings import DEFAULT_MAX_NEW_TOKENS
from slime_plugins.rollout_buffer.wire.request_fields import parse
from slime_plugins.rollout_buffer.wire.start_request import StartPayload


def arguments(**changes: Any) -> Any:
    values = {"prompt_data": "/data/tasks.jsonl", "hf_checkpoint": "/models/m", "save": "/runs/a"}
    return trainer_args(**{**values, **changes})


def payload_of(**changes: Any) -> dict[str, Any]:
    return start_payload(arguments(**changes), job_id="j", skip_instance_ids=["a", "a"], fresh=True, start_id="s")


def test_the_payload_is_the_documented_one() -> None:
    payload = payload_of(num_epoch=3, rollout_num_process=64, rollout_temperature=0.8, rollout_top_p=0.9)

    assert payload == {
        "num_process": 64,
        "num_epoch": 3,
        "remote_engine_url": "http://127.0.0.1:30000",
        "remote_buffer_url": "http://127.0.0.1:8889",
        "task_type": "math",
        "input_file": "/data/tasks.jsonl",
        "num_repeat_per_sample": "4",
        "max_tokens": 1024,
        "sampling_params": {
            "max_tokens": 1024,
            "temperature": 0.8,
            "top_p": 0.9,
            "custom_params": {"return_top_p_token_ids": True},
        },
        "tokenizer_path": "/models/m",
        "skip_instance_ids": ["a", "a"],
        "job_id": "j",
        "fresh": True,
        "start_id": "s",
        "max_groups_ready": 4,
    }


def test_the_engine_is_asked_for_what_slime_replays_in_training_alone() -> None:
    args = arguments(rollout_top_p=0.9, use_rollout_routing_replay=True, eval_prompt_data=["e", "/e"])
    asked = start_payload(args, job_id="j", skip_instance_ids=[], fresh=True, start_id="s")["sampling_params"]
    assert (asked["return_routed_experts"], asked["custom_params"]) == (True, {"return_top_p_token_ids": True})
    (eval_set,) = eval_sets(args)
    measured = eval_payload(args, eval_set, job_id="e", start_id="s")["sampling_params"]
    assert not measured.keys() & {"return_routed_experts", "custom_params"}
    assert read_row_settings(args, 4).records == ("routed_experts", "top_p_tokens")
    assert read_row_settings(arguments(), 4).records == ()


def test_the_buffer_takes_the_payload() -> None:
    args = arguments(rollout_buffer_options={"group_timeout_seconds": 60, "max_turns": 9}, eval_prompt_data=["e", "/e"])
    (eval_set,) = eval_sets(args)
    training = parse(StartPayload, payload_of(rollout_buffer_options={"max_turns": 9}))
    evaluation = parse(StartPayload, eval_payload(args, eval_set, job_id="e", start_id="s"))

    assert training.options == {"max_turns": 9}
    assert (evaluation.evaluation, evaluation.num_epoch, evaluation.group_timeout_seconds) == (True, 1, 60)


def test_an_evaluation_samples_as_slimes_own_does() -> None:
    args = arguments(
        eval_prompt_data=["e", "/e"], rollout_top_k=20, eval_top_k=5, rollout_stop=["x"], eval_min_new_tokens=2
    )
    (eval_set,) = eval_sets(args)
    sampling = eval_payload(args, eval_set, job_id="e", start_id="s")["sampling_params"]
    assert sampling.items() >= {"top_k": 5, "min_new_tokens": 2, "stop": ["x"]}.items()
    assert "stop_token_ids" not in sampling
    dataset = SimpleNamespace(name="d", path="/d", top_k=-1, stop=["y"], repetition_penalty=1.1, temperature=0.1)
    (eval_set,) = eval_sets(arguments(eval_datasets=[dataset], rollout_stop=["x"]))
    assert eval_set.more_sampling == {"stop": ["y"], "repetition_penalty": 1.1}
    assert eval_set.temperature == 0.1


def test_without_a_limit_of_tokens_the_buffers_default_holds_in_evaluations_as_in_training() -> None:
    """slime has no default of --rollout-max-response-len."""
    args = arguments(eval_prompt_data=["e", "/e"], rollout_max_response_len=None)
    (eval_set,) = eval_sets(args)
    for payload in (payload_of(rollout_max_response_len=None), eval_payload(args, eval_set, job_id="e", start_id="s")):
        assert parse(StartPayload, payload).sampling().max_new_tokens == DEFAULT_MAX_NEW_TOKENS


def test_a_group_of_an_evaluation_is_measured_by_what_could_be_played_of_it() -> None:
    args = arguments(rollout_buffer_options={"min_timeout_group_size_ratio": 0.9}, eval_prompt_data=["e", "/e"])
    (eval_set,) = eval_sets(args)
    payload = parse(StartPayload, eval_payload(args, eval_set, job_id="e", start_id="s"))
    assert (payload.min_timeout_group_size_ratio, payload.min_valid_item_size_ratio) == (0, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"save": "/runs/b"},
        {"prompt_data": "/data/other.jsonl"},
        {"rollout_task_type": "android_world"},
        {"rollout_temperature": 0.5},
        {"n_samples_per_prompt": 8},
        {"num_epoch": 2},
    ],
)
def test_other_work_has_another_job_id(changes: dict[str, Any]) -> None:
    assert read_settings(arguments(**changes)).job_id != read_settings(arguments()).job_id


def test_what_may_change_between_starts_leaves_the_job_id_alone() -> None:
    assert payload_of(rollout_num_process="auto")["num_process"] == "auto"
    elsewhere = arguments(sglang_router_ip="10.0.0.9", rollout_num_process=7, rollout_batch_size=2)

    assert read_settings(elsewhere).job_id == read_settings(arguments()).job_id


def test_options_that_a_running_job_takes_over_leave_its_derived_id_alone() -> None:
    plain, work = arguments(), arguments(rollout_buffer_options={"max_turns": 9})
    taken_over = {"attempt_timeout_seconds": 90, "max_attempts": 5, "staleness_policy": "filter", "num_process_max": 8}

    assert read_settings(plain).job_id == "math-575d4d187210b81a", "trainers that run now would lose their job"
    assert read_settings(arguments(rollout_buffer_options=taken_over)).job_id == read_settings(plain).job_id
    assert read_settings(work).job_id != read_settings(plain).job_id


def test_a_configured_job_id_wins() -> None:
    assert read_settings(arguments(rollout_buffer_job_id="mine")).job_id == "mine"


def test_both_names_of_the_url_argument_are_understood() -> None:
    old = arguments(agent_rollout_buffer_url="http://old:1/", rollout_buffer_url=None)

    assert read_settings(old).buffer_url == "http://old:1"


FLAG = "--agent-rollout-buffer-url"


@pytest.mark.parametrize(
    "words",
    [
        [FLAG, "http://old:1/"],
        [f"{FLAG}=http://old:1"],
        ["train.py", "--save", "a folder", FLAG, "http://old:1", "--num-rollout", "3"],
        [FLAG, "http://older:1", FLAG, "http://old:1"],
    ],
)
def test_the_older_flag_that_slimes_parser_ignores_is_read_here(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", *words])

    assert read_settings(arguments(rollout_buffer_url=None)).buffer_url == "http://old:1"
    assert read_settings(arguments()).buffer_url == "http://127.0.0.1:8889"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"rollout_buffer_url": None},
            "set --rollout-buffer-url .* agent_rollout_buffer_url .*--agent-rollout-buffer-url",
        ),
        ({"rollout_buffer_url": "localhost:8889"}, "must start with http"),
        ({"reward_key": "score"}, "are numbers"),
        ({"rollout_buffer_lesae_s": 60}, "rollout_buffer_lesae_s is not known; did you mean rollout_buffer_lease_s"),
        ({"rollout_bufer_lease_s": 60}, "rollout_bufer_lease_s is not known; did you mean rollout_buffer_lease_s"),
        ({"rollout-buffer-lease-s": 60}, "rollout-buffer-lease-s is not known; did you mean rollout_buffer_lease_s"),
        ({"rollout_buffer_xyzzy": 1}, "rollout_buffer_xyzzy is not known; known are .*rollout_buffer_job_id, "),
    ],
)
def test_a_setting_that_means_nothing_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read_settings(arguments(**changes))


def read_everything(args: Any) -> None:
    read_settings(args)
    read_image_settings(args)
    read_row_settings(args, 4)
    start_payload(args, job_id="j", skip_instance_ids=(), fresh=False, start_id="s")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("rollout_batch_size", (0,)),
        ("fetch_trajectory_retry_times", ("x", -2)),
        ("rollout_buffer_on_exhausted", ("again",)),
        ("rollout_buffer_lease_s", (-1, 604801)),
        ("rollout_buffer_wait_s", (301, 0, math.nan, math.inf, "ten", [1], True)),
        ("rollout_buffer_timeout_s", (0, -1, math.inf)),
        ("rollout_buffer_image_cache_mb", (-5, math.nan, "big", True)),
        ("rollout_buffer_image_fetches", (0, -1, 1.5, "many", True)),
        ("rollout_buffer_image_threads", (0, -3, "big")),
        ("rollout_buffer_images", ("none", 0)),
        ("rollout_buffer_pixel_dtype", ("float16", 0)),
        ("rollout_buffer_report_drift", ("false", 0)),
        ("rollout_buffer_keep_images", ("false", 1)),
        ("rollout_buffer_on_policy", (0, "false")),
        ("rollout_buffer_max_row_tokens", ("x", -1, 1.5)),
        ("rollout_buffer_max_token_lag", (-1, 1.5, "2", True)),
        ("rollout_buffer_report_rows", (-1, "x", 1001)),
        ("rollout_buffer_turn_discount", (2, math.nan, "x", True)),
        ("rollout_buffer_job_id", (7,)),
        ("rollout_buffer_options", ("max_turns", 0, [])),
        ("rollout_num_process", (0, "many", True)),
        ("num_epoch", (0, "x")),
        ("n_samples_per_prompt", (0, "x", None)),
    ],
)
def test_a_value_that_an_attribute_cannot_have_is_refused_by_its_name(name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=rf"^{name}\b.* must be |^{name} is "):
            read_everything(arguments(**{name: value}))


def test_an_attribute_that_is_null_or_empty_has_its_default() -> None:
    args = arguments(rollout_buffer_report_drift=None, rollout_buffer_image_cache_mb=None, rollout_buffer_wait_s=None)
    images = read_image_settings(args)
    assert images is not None
    assert images.cache_bytes == 512_000_000
    assert (read_settings(args).wait_s, read_row_settings(args, 4).report_drift) == (20, True)
    assert buffer_attributes(arguments(rollout_buffer_images="")).rollout_buffer_images == "pixels"


def test_zero_is_taken_where_it_means_something() -> None:
    args = arguments(rollout_buffer_image_cache_mb=0, rollout_buffer_report_rows=0, rollout_buffer_turn_discount=0)
    images = read_image_settings(args)
    assert images is not None
    report_rows, discount = buffer_attributes(args).rollout_buffer_report_rows, read_row_settings(args, 4).turn_discount
    assert (images.cache_bytes, report_rows, discount) == (0, 0, 0)


def test_a_token_of_another_type_is_refused_without_showing_it() -> None:
    with pytest.raises(ConfigError, match=r"^rollout_buffer_token must be a text$") as refusal:
        read_settings(arguments(rollout_buffer_token=8_675_309))
    assert "8675309" not in str(refusal.value)


def test_a_router_without_a_port_is_refused() -> None:
    with pytest.raises(ConfigError, match="sglang_router_port"):
        engine_url(arguments(sglang_router_ip="1.2.3.4", sglang_router_port=None))


def test_the_token_comes_from_the_arguments_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_BUFFER_TOKEN", "from-the-environment")

    assert read_settings(arguments()).token == "from-the-environment"
    assert read_settings(arguments(rollout_buffer_token="given")).token == "given"


def test_eval_sets_come_from_slimes_pairs() -> None:
    sets = eval_sets(arguments(eval_prompt_data=["a", "/a", "b", "/b"], n_samples_per_eval_prompt=2))

    assert [(entry.name, entry.path, entry.samples_per_group) for entry in sets] == [("a", "/a", 2), ("b", "/b", 2)]


def test_eval_settings_of_a_set_come_before_those_of_all() -> None:
    dataset = SimpleNamespace(name="a", path="/a", n_samples_per_eval_prompt=3, temperature=0.0)
    (entry,) = eval_sets(arguments(eval_datasets=[dataset], eval_temperature=0.7, eval_top_p=0.5))

    assert (entry.samples_per_group, entry.temperature, entry.top_p, entry.max_tokens) == (3, 0.0, 0.5, 1024)
