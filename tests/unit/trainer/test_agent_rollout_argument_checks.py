"""What would stop slime's training code later is refused before the first episode, with the flag to change."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rollout_buffer_lab.mock_trainer import CheckpointDataSource, trainer_args
from slime.rollout import agent_rollout_argument_checks
from slime.rollout.agent_rollout import generate_rollout
from slime.rollout.agent_rollout_argument_checks import (
    check_arguments,
    is_tokenizer_alone,
    log_probs_come_with_the_loss,
    refusals,
)
from slime.rollout.agent_rollout_data_postprocess import POSTPROCESS_PATH
from slime.rollout.agent_rollout_data_source import checked_data_source
from slime.rollout.agent_rollout_settings import ADVANTAGE_PATH
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.errors import ConfigError
from tests.loopback_buffer import LoopbackBuffer

RANKS = {"actor_num_nodes": 1, "actor_num_gpus_per_node": 8, "micro_batch_size": 1, "use_dynamic_batch_size": False}


OF_TURNS = {"custom_advantage_function_path": ADVANTAGE_PATH}


def slimes_args(**changes: Any) -> Namespace:
    """Arguments as slime's parser leaves them where nobody asks for anything special."""
    values = {
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 4,
        "global_batch_size": 16,
        "use_dynamic_batch_size": True,
        "advantage_estimator": "grpo",
        "loss_type": "policy_loss",
        "kl_coef": 0,
        "rollout_top_p": 1.0,
    }
    return trainer_args(**{**values, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        RANKS,
        {**RANKS, "global_batch_size": 8},
        {**RANKS, "tensor_model_parallel_size": 8, "global_batch_size": 1},
        {"log_correct_samples": True, "global_batch_size": 8},
        {"log_multi_turn": True, "log_passrate": False},
        {"advantage_estimator": "reinforce_plus_plus"},
        {"use_routing_replay": True},
        {"use_opd": True, "opd_type": "megatron"},
        {"rollout_sample_filter_path": None},
        {"rollout_data_postprocess_path": POSTPROCESS_PATH, "train_backend": "megatron"},
        {"rollout_data_postprocess_path": "own.hook", "train_backend": "fsdp"},
        OF_TURNS,
        {**OF_TURNS, "rollout_buffer_turn_discount": 0.9, "advantage_estimator": "gspo"},
        {"custom_advantage_function_path": "own.function", "advantage_estimator": "ppo"},
    ],
)
def test_arguments_that_slime_can_train_with_pass(changes: dict[str, Any]) -> None:
    check_arguments(slimes_args(**changes))


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"global_batch_size": 12}, "--global-batch-size 12 does not divide the 16"),
        ({"global_batch_size": 32}, "--global-batch-size 32 does not divide"),
        ({**RANKS, "global_batch_size": 4}, "set --use-dynamic-batch-size"),
        ({**RANKS, "micro_batch_size": 4}, "--micro-batch-size"),
        ({**RANKS, "use_dynamic_batch_size": True, "global_batch_size": 4}, "8 data-parallel ranks"),
        (
            {
                **RANKS,
                "pipeline_model_parallel_size": 2,
                "virtual_pipeline_model_parallel_size": 2,
                "global_batch_size": 4,
            },
            "--microbatch-group-size-per-vp-stage",
        ),
        (
            {"advantage_estimator": "reinforce_plus_plus", "rollout_buffer_short_groups": "keep"},
            "rollout_buffer_short_groups: refill",
        ),
        ({**RANKS, "advantage_estimator": "reinforce_plus_plus"}, "set --use-dynamic-batch-size"),
        (
            {
                **RANKS,
                "actor_num_gpus_per_node": 1,
                "micro_batch_size": 2,
                "advantage_estimator": "reinforce_plus_plus",
            },
            "untrained rows that fill up micro-batches",
        ),
        ({"log_passrate": True}, "--log-passrate"),
        ({"log_correct_samples": True}, "--log-correct-samples"),
        ({"log_correct_samples": True, "use_rollout_logprobs": True, "global_batch_size": 8}, "--log-correct-samples"),
        ({"log_reward_category": "kind"}, "--log-reward-category"),
        ({"rollout_sample_filter_path": "a.b"}, "--rollout-sample-filter-path"),
        ({"rollout_all_samples_process_path": "a.b"}, "--rollout-all-samples-process-path"),
        ({"dynamic_sampling_filter_path": "a.b"}, "--dynamic-sampling-filter-path"),
        ({"rollout_sample_hook_path": "a.b"}, "--rollout-sample-hook-path"),
        ({"custom_generate_function_path": "a.b"}, "--custom-generate-function-path"),
        ({"custom_rm_path": "a.b"}, "--custom-rm-path"),
        ({"rm_type": "math"}, "--rm-type"),
        ({"rollout_data_postprocess_path": POSTPROCESS_PATH, "train_backend": "fsdp"}, "Megatron backend, not by fsdp"),
        ({"rollout_buffer_turn_discount": 1.0}, "which this slime does not have"),
        (
            {"rollout_buffer_turn_discount": 1.0, "custom_advantage_function_path": None},
            f"set --custom-advantage-function-path {ADVANTAGE_PATH}",
        ),
        ({**OF_TURNS, "advantage_estimator": "reinforce_plus_plus"}, "compares returns within groups"),
        ({**OF_TURNS, "calculate_per_token_loss": True}, "--calculate-per-token-loss"),
        ({"use_rollout_routing_replay": True}, "--moe-router-topk"),
        ({"rollout_top_p": 0.9, "rollout_task_type": "remote_rollout"}, "--rollout-top-p 1"),
        ({"use_opd": True, "opd_type": "sglang"}, "--opd-type"),
    ],
)
def test_what_stops_a_step_later_is_refused_with_the_flag_to_change(changes: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        check_arguments(slimes_args(**changes))


def test_rewards_of_all_ranks_beside_the_rows_of_one_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """slime gives each rank its own rewards only from August 2026 on."""
    monkeypatch.setattr(agent_rollout_argument_checks, "_splits_rewards", lambda: False)
    args = slimes_args(log_correct_samples=True, global_batch_size=8, actor_num_nodes=1, actor_num_gpus_per_node=2)
    with pytest.raises(ConfigError, match="--log-correct-samples pairs the rewards of all"):
        check_arguments(args)

    args.actor_num_gpus_per_node = 1
    check_arguments(args)


def test_all_reasons_are_said_at_once() -> None:
    with pytest.raises(ConfigError) as refusal:
        check_arguments(slimes_args(log_passrate=True, rm_type="math"))

    assert len(refusal.value.detail["reasons"]) == 2


def test_a_vision_model_needs_the_files_of_its_processor(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", "vision_config": {}}))
    with pytest.raises(ConfigError, match="preprocessor_config"):
        check_arguments(slimes_args(hf_checkpoint=str(tmp_path)))
    check_arguments(slimes_args(hf_checkpoint=str(tmp_path), rollout_buffer_images="tokens"))

    (tmp_path / "preprocessor_config.json").write_text("{}")
    check_arguments(slimes_args(hf_checkpoint=str(tmp_path)))


@pytest.mark.parametrize(
    ("changes", "with_the_loss"),
    [
        ({}, True),
        ({"global_batch_size": 8}, False),
        ({"kl_coef": 0.1}, False),
        ({"get_mismatch_metrics": True}, False),
        ({"use_rollout_logprobs": True, "global_batch_size": 8}, True),
        ({"advantage_estimator": "gspo"}, False),
    ],
)
def test_it_is_known_when_slime_has_no_log_probs_before_the_loss(changes: dict[str, Any], with_the_loss: bool) -> None:
    assert log_probs_come_with_the_loss(slimes_args(**changes)) is with_the_loss


def test_the_refusal_comes_before_anything_is_started() -> None:
    with LoopbackBuffer(["task-0"]) as buffer:
        args = slimes_args(rollout_buffer_url=buffer.url, prompt_data="tasks.jsonl", log_passrate=True)
        with pytest.raises(ConfigError, match="--log-passrate"):
            generate_rollout(args, 0, CheckpointDataSource(args))
        assert buffer.requests == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout_buffer_shortgroups": "keep"}, "did you mean rollout_buffer_short_groups?"),
        ({**OF_TURNS, "rollout_buffer_turn_discount": 2}, "rollout_buffer_turn_discount must be a number"),
        ({"rollout_buffer_images": "none"}, "rollout_buffer_images must be 'pixels' or 'tokens'"),
        ({"rollout_buffer_example_interval": -1}, "example_interval must be a whole number of at least 0"),
        ({"rollout_buffer_loss_mask": "no_such_module:Mask"}, "no_such_module"),
        ({"rollout_buffer_options": {"num_epoch": 2}}, "rollout_buffer_options may not set num_epoch"),
        ({"eval_interval": 5, "eval_prompt_data": None}, "--eval-prompt-data"),
        ({"log_passrate": True}, "--log-passrate"),
    ],
)
def test_all_that_the_first_rollout_would_refuse_can_be_asked_without_one(changes: dict[str, Any], words: str) -> None:
    found = refusals(slimes_args(**changes))

    assert len(found) == 1
    assert words in found[0]


def test_slime_hears_a_refusal_when_it_makes_its_data_source(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("slime.rollout.data_source")
    module.RolloutDataSourceWithBuffer = CheckpointDataSource  # type: ignore[attr-defined]  # slime's own module
    monkeypatch.setitem(sys.modules, "slime.rollout.data_source", module)

    assert isinstance(checked_data_source(slimes_args(buffer_filter_path=None)), CheckpointDataSource)
    with pytest.raises(ConfigError, match="--log-passrate"):
        checked_data_source(slimes_args(log_passrate=True))


def test_the_demos_tokenizer_is_no_model_to_warn_about(tmp_path: Path) -> None:
    assert is_tokenizer_alone(slimes_args(hf_checkpoint=str(DEMO_TOKENIZER_PATH)))
    assert not is_tokenizer_alone(slimes_args(hf_checkpoint="Qwen/Qwen3-VL-8B-Instruct"))
    (tmp_path / "config.json").write_text("{}")
    assert not is_tokenizer_alone(slimes_args(hf_checkpoint=str(tmp_path)))
