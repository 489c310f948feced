"""Composes slime's arguments, and the file of settings without a flag. Pure: settings in, arguments out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tools.launching.models import Kind, bridges, math_model, takes_weight_off_dummies, vision_model
from tools.launching.settings import LaunchSettings


def train_arguments(settings: LaunchSettings) -> list[str]:
    """Returns slime's arguments, without the shape of the model, which slime's own script adds."""
    return [
        *_checkpoint_arguments(settings),
        *_rollout_arguments(settings),
        *_algorithm_arguments(settings),
        *_device_arguments(settings),
        *_backend_arguments(settings),
        *_logging_arguments(settings),
    ]


def config_path(settings: LaunchSettings) -> Path:
    """Returns the path of the file for ``--custom-config-path``."""
    return settings.run_path / "custom_config.yaml"


def custom_config(settings: LaunchSettings) -> dict[str, Any]:
    """Returns the settings for which slime has no flag, for the trainer side and the episodes."""
    if settings.kind.is_android:
        return _android_config(settings)
    return {
        "rollout_buffer_job_id": settings.run_path.name,
        "rollout_num_process": 256,  # the samples of two rollouts
        "rollout_buffer_on_exhausted": "repeat",
        **_turn_discount(settings),
    }


def _turn_discount(settings: LaunchSettings) -> dict[str, Any]:
    discount = settings.turn_discount
    return {} if discount is None else {"rollout_buffer_turn_discount": discount}


def _android_config(settings: LaunchSettings) -> dict[str, Any]:
    """Returns the settings of an Android run. Of its episodes only the rollout mode: the pool's file has the others."""
    mode = "history" if settings.kind is Kind.ANDROID_WORLD_HISTORY else "incremental"
    if settings.without_buffer:
        return {"android_world": {"rollout_mode": mode}}
    return {
        "rollout_buffer_job_id": settings.run_path.name,
        "rollout_num_process": settings.farm.num_workers,
        "rollout_buffer_on_exhausted": "repeat",
        "rollout_buffer_options": {"android_world": {"rollout_mode": mode}},
        **_turn_discount(settings),
    }


def _checkpoint_arguments(settings: LaunchSettings) -> list[str]:
    save = str(settings.run_path / "checkpoints")
    model = str(settings.model_path)
    arguments = ["--hf-checkpoint", model, "--load", save, "--save", save, "--save-interval", "20"]
    if settings.backend == "megatron":
        # Older versions of slime need a converted checkpoint here, made by slime's tools/convert_hf_to_torch_dist.py.
        converted = settings.converted_path
        arguments += ["--ref-load", str(converted) if converted.is_dir() else model]
    return arguments


def _rollout_arguments(settings: LaunchSettings) -> list[str]:
    arguments = ["--prompt-data", str(settings.task_data), "--input-key", "prompt", "--label-key", "label"]
    arguments += ["--metadata-key", "metadata", "--rollout-shuffle"]
    arguments += ["--custom-config-path", str(config_path(settings))]
    arguments += [*_size_arguments(settings), *_evaluation_arguments(settings)]
    # Without it the rows of one trajectory would be normalised as if they were trajectories.
    arguments += ["--custom-reward-post-process-path", "slime.rollout.agent_rollout.post_process_rewards"]
    if settings.without_buffer:
        return [*arguments, "--custom-generate-function-path", _generate_path(settings)]
    return [
        *arguments,
        *("--rollout-function-path", "slime.rollout.agent_rollout.generate_rollout"),
        *("--rollout-buffer-url", settings.buffer_url),
        *("--rollout-task-type", "android_world" if settings.kind.is_android else "math"),
        *("--loss-mask-type", _loss_mask_type(settings)),
    ]


def _loss_mask_type(settings: LaunchSettings) -> str:
    model = vision_model(settings.model) if settings.kind.is_android else math_model(settings.model)
    return model.loss_mask_type


def _evaluation_arguments(settings: LaunchSettings) -> list[str]:
    if settings.eval_data is None:
        return []
    name = settings.eval_data.stem.replace("_instance_id", "")
    return ["--eval-interval", "20", "--eval-prompt-data", name, str(settings.eval_data)]


def _size_arguments(settings: LaunchSettings) -> list[str]:
    if not settings.kind.is_android:
        return [
            *("--num-rollout", "3000", "--rollout-batch-size", "16", "--n-samples-per-prompt", "8"),
            *("--rollout-max-response-len", "8192", "--rollout-temperature", "0.8", "--global-batch-size", "128"),
        ]
    return [
        *("--num-rollout", "16", "--rollout-batch-size", "8", "--n-samples-per-prompt", "8"),
        *("--rollout-max-response-len", "4096", "--rollout-temperature", "0.7", "--global-batch-size", "64"),
    ]


def _generate_path(settings: LaunchSettings) -> str:
    module = "rollout_history" if settings.kind is Kind.ANDROID_WORLD_HISTORY else "rollout"
    return f"examples.android_world.{module}.generate"


def _algorithm_arguments(settings: LaunchSettings) -> list[str]:
    arguments = ["--advantage-estimator", "grpo", "--kl-loss-coef", "0.00", "--kl-loss-type", "low_var_kl"]
    arguments += ["--entropy-coef", "0.00", "--eps-clip", "0.2", "--eps-clip-high", "0.28", "--use-rollout-logprobs"]
    arguments += ["--optimizer", "adam", "--lr", "1e-6", "--lr-decay-style", "constant", "--weight-decay", "0.1"]
    if settings.turn_discount is not None:
        arguments += ["--custom-advantage-function-path", "slime.rollout.agent_rollout.turn_advantages"]
    return [*arguments, "--adam-beta1", "0.9", "--adam-beta2", "0.98"]


def _device_arguments(settings: LaunchSettings) -> list[str]:
    if settings.colocate:
        total = settings.nodes * settings.gpus
        train = ["--actor-num-nodes", str(settings.nodes), "--actor-num-gpus-per-node", str(settings.gpus)]
        return [*train, "--rollout-num-gpus", str(total), "--colocate", *_engine_arguments(settings, total)]
    nodes, per_node, engines = shares(settings)
    train = ["--actor-num-nodes", str(nodes), "--actor-num-gpus-per-node", str(per_node)]
    return [*train, "--rollout-num-gpus", str(engines), *_engine_arguments(settings, engines)]


def shares(settings: LaunchSettings) -> tuple[int, int, int]:
    """Returns the trainer's nodes, its GPUs on each of them, and the engines' GPUs, of a run without shared GPUs."""
    nodes, gpus = settings.nodes, settings.gpus
    if nodes > 1:
        return nodes // 2, gpus, (nodes - nodes // 2) * gpus
    return 1, gpus // 2, gpus - gpus // 2


def _engine_arguments(settings: LaunchSettings, gpus: int) -> list[str]:
    model = vision_model(settings.model) if settings.kind.is_android else None
    per_engine = 1 if model is None else min(model.engine_gpus, gpus)
    experts = ["--sglang-ep-size", str(per_engine)] if model is not None and model.experts else []
    return ["--rollout-num-gpus-per-engine", str(per_engine), "--sglang-mem-fraction-static", "0.6", *experts]


def _backend_arguments(settings: LaunchSettings) -> list[str]:
    arguments = ["--train-backend", settings.backend]
    if settings.backend == "fsdp":
        return [*arguments, "--gradient-checkpointing", *_batch_arguments(settings)]
    # Context parallelism splits a sequence from its images: it stays 1, and longer sequences get more tensor ranks.
    arguments += ["--tensor-model-parallel-size", str(_tensor_ranks(settings)), "--sequence-parallel"]
    arguments += ["--pipeline-model-parallel-size", "1", "--context-parallel-size", "1"]
    arguments += _expert_arguments(settings)
    arguments += ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
    arguments += ["--attention-dropout", "0.0", "--hidden-dropout", "0.0", "--attention-backend", "flash"]
    arguments += ["--accumulate-allreduce-grads-in-fp32", "--attention-softmax-in-fp32"]
    if settings.kind.is_android and bridges(settings.slime):
        arguments += ["--megatron-to-hf-mode", "bridge"]
    if takes_weight_off_dummies(settings.slime):
        # Runs between advantages and step: removes dummies from the mean, and reports the rows' values to the buffer.
        arguments += ["--rollout-data-postprocess-path", "slime.rollout.agent_rollout.post_process_rollout_data"]
    return [*arguments, *_batch_arguments(settings)]


def _tensor_ranks(settings: LaunchSettings) -> int:
    """Returns the largest number of tensor ranks that the run's GPUs and the model's attention allow."""
    wanted = 8 if settings.kind is Kind.ANDROID_WORLD_OPT else 2
    trainers = settings.gpus if settings.colocate or settings.nodes > 1 else settings.gpus // 2
    groups = vision_model(settings.model).query_groups if settings.kind.is_android else wanted
    return min(wanted, trainers, groups)


def _expert_arguments(settings: LaunchSettings) -> list[str]:
    if not settings.kind.is_android or not vision_model(settings.model).experts:
        return []
    nodes, per_node, _ = (settings.nodes, settings.gpus, 0) if settings.colocate else shares(settings)
    return ["--expert-model-parallel-size", str(nodes * per_node), "--expert-tensor-parallel-size", "1"]


def _batch_arguments(settings: LaunchSettings) -> list[str]:
    """Packs rows into micro-batches by tokens: the number of rows varies, and a fixed size would have to divide it."""
    if not settings.kind.is_android:
        return ["--use-dynamic-batch-size", "--max-tokens-per-gpu", "9216"]
    if vision_model(settings.model).native:
        # slime's linear attention needs one row per micro-batch; the rollout function fills steps up to the ranks.
        return ["--micro-batch-size", "1"]
    # At most as many tokens as the longest row has.
    return ["--use-dynamic-batch-size", "--max-tokens-per-gpu", str(settings.farm.max_context_len)]


def _logging_arguments(settings: LaunchSettings) -> list[str]:
    if not settings.wandb_key:
        return []
    return ["--use-wandb", "--wandb-project", "slime-rollout-buffer", "--wandb-group", settings.kind.value]
