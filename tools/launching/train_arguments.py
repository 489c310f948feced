"""The arguments that slime is called with, and the file with what it has no flag for. Pure: settings in, words out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tools.launching.models import Kind, math_model
from tools.launching.settings import LaunchSettings
from tools.launching.slime_checkout import has_flag

__all__ = ["config_path", "custom_config", "train_arguments"]


def train_arguments(settings: LaunchSettings) -> list[str]:
    """Returns slime's arguments, without the shape of the model, which slime's own script for it gives."""
    return [
        *_checkpoint_arguments(settings),
        *_rollout_arguments(settings),
        *_algorithm_arguments(settings),
        *_device_arguments(settings),
        *_backend_arguments(settings),
        *_logging_arguments(settings),
    ]


def config_path(settings: LaunchSettings) -> Path:
    """Returns where the file for ``--custom-config-path`` lies."""
    return settings.run_path / "custom_config.yaml"


def custom_config(settings: LaunchSettings) -> dict[str, Any]:
    """Returns what slime has no flag for, as the trainer side and the episodes read it."""
    mode = "history" if settings.kind is Kind.ANDROID_WORLD_HISTORY else "incremental"
    if settings.without_buffer:
        return {"android_world": {"rollout_mode": mode, "max_turns": 5, "max_context_len": 16384}}
    config: dict[str, Any] = {
        "rollout_buffer_job_id": settings.run_path.name,
        "rollout_num_process": 64 if settings.kind.is_android else 256,
        "rollout_buffer_on_exhausted": "repeat",
    }
    if settings.kind.is_android:
        options = {"rollout_mode": mode, "max_turns": 5, "max_context_len": 16384}
        config["rollout_buffer_options"] = {"android_world": options}
    return config


def _checkpoint_arguments(settings: LaunchSettings) -> list[str]:
    save = str(settings.run_path / "checkpoints")
    model = str(settings.model_path)
    arguments = ["--hf-checkpoint", model, "--load", save, "--save", save, "--save-interval", "20"]
    if settings.backend == "megatron":
        # Older slimes want a converted checkpoint here, which tools/convert_hf_to_torch_dist.py of slime makes.
        converted = settings.converted_path
        arguments += ["--ref-load", str(converted) if converted.is_dir() else model]
    return arguments


def _rollout_arguments(settings: LaunchSettings) -> list[str]:
    arguments = ["--prompt-data", str(settings.task_data), "--input-key", "prompt", "--label-key", "label"]
    arguments += ["--metadata-key", "metadata", "--rollout-shuffle"]
    arguments += ["--custom-config-path", str(config_path(settings))]
    if settings.without_buffer:
        return [*arguments, *_size_arguments(settings), "--custom-generate-function-path", _generate_path(settings)]
    return [
        *arguments,
        *_size_arguments(settings),
        *("--rollout-function-path", "slime.rollout.agent_rollout.generate_rollout"),
        *("--rollout-buffer-url", settings.buffer_url),
        *("--rollout-task-type", "android_world" if settings.kind.is_android else "math"),
        *("--loss-mask-type", "qwen3" if settings.kind.is_android else math_model(settings.model).loss_mask_type),
        *("--custom-reward-post-process-path", "slime.rollout.agent_rollout.post_process_rewards"),
    ]


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
    return [*arguments, "--adam-beta1", "0.9", "--adam-beta2", "0.98"]


def _device_arguments(settings: LaunchSettings) -> list[str]:
    nodes, gpus = settings.nodes, settings.gpus
    engine = ["--rollout-num-gpus-per-engine", "1", "--sglang-mem-fraction-static", "0.6"]
    if settings.colocate:
        total = str(nodes * gpus)
        train = ["--actor-num-nodes", str(nodes), "--actor-num-gpus-per-node", str(gpus), "--rollout-num-gpus", total]
        return [*train, "--colocate", *engine]
    if nodes > 1:
        trainers, per_node, engines = nodes // 2, gpus, (nodes - nodes // 2) * gpus
    else:
        trainers, per_node, engines = 1, gpus // 2, gpus - gpus // 2
    train = ["--actor-num-nodes", str(trainers), "--actor-num-gpus-per-node", str(per_node)]
    return [*train, "--rollout-num-gpus", str(engines), *engine]


def _backend_arguments(settings: LaunchSettings) -> list[str]:
    arguments = ["--train-backend", settings.backend]
    if settings.backend == "fsdp":
        return [*arguments, "--gradient-checkpointing"]
    parallel = 8 if settings.kind is Kind.ANDROID_WORLD_OPT else 2
    trainers = settings.gpus if settings.colocate or settings.nodes > 1 else settings.gpus // 2
    # Context parallelism cuts a sequence without its images: it stays 1, and longer sequences get more tensor ranks.
    arguments += ["--tensor-model-parallel-size", str(min(parallel, trainers)), "--sequence-parallel"]
    arguments += ["--pipeline-model-parallel-size", "1", "--context-parallel-size", "1"]
    arguments += ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
    arguments += ["--attention-dropout", "0.0", "--hidden-dropout", "0.0", "--attention-backend", "flash"]
    arguments += ["--accumulate-allreduce-grads-in-fp32", "--attention-softmax-in-fp32"]
    if settings.kind.is_android:
        arguments += ["--micro-batch-size", "1"]
        if has_flag(settings.slime, "--megatron-to-hf-mode"):
            arguments += ["--megatron-to-hf-mode", "bridge"]
        return arguments
    return [*arguments, "--use-dynamic-batch-size", "--max-tokens-per-gpu", "9216"]


def _logging_arguments(settings: LaunchSettings) -> list[str]:
    if not settings.wandb_key:
        return []
    return ["--use-wandb", "--wandb-project", "slime-rollout-buffer", "--wandb-group", settings.kind.value]
