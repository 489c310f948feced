"""Composes, shows and runs the commands that start a training: slime, its Ray cluster and the rollout buffer.

The scripts in ``scripts/`` are this program with a kind of run each:

    python tools/launch_training.py math --dry-run              # scripts/run_agent.sh
    python tools/launch_training.py android_world               # scripts/run_android_world.sh
    python tools/launch_training.py android_world --only-train  # scripts/run_android_world.py: Ray and model are there

Everything is set by environment variables (``SLIME_SCRIPT_…``, ``--help`` lists them) and by arguments after ``--``,
which go to slime as they are and win over those composed here. ``--dry-run`` prints the exact commands and runs none.
"""

from __future__ import annotations

import argparse
import difflib
import json
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

__all__ = ["Kind", "LaunchError", "LaunchSettings", "Step", "compose", "main", "train_arguments"]

ROOT = Path(__file__).resolve().parent.parent
HEALTH_PATIENCE_S = 60.0
SHORTEST_TOKEN = 16
"""What ``rollout-buffer serve`` asks of a token; said here before anything was started."""

VARIABLES: Mapping[str, tuple[str, str]] = {
    "SLIME_DIR": ("../slime", "the slime checkout to train with"),
    "SLIME_SCRIPT_MODEL_NAME": ("", "Qwen3-VL-2B-Instruct, or for math DeepSeek-R1-Distill-Qwen-7B, when left out"),
    "SLIME_SCRIPT_MODEL_REPOSITORY": (
        "",
        "where `hf download` finds it: Qwen/MODEL, or deepseek-ai/MODEL for a DeepSeek",
    ),
    "SLIME_SCRIPT_MODELS_DIR": ("~/models", "folder of models: they are downloaded into it, and looked for in it"),
    "SLIME_SCRIPT_SAVE_DIR": ("~/checkpoints", "folder of checkpoints: a run gets KIND-MODEL in it"),
    "SLIME_SCRIPT_NUM_NODES": ("1", "nodes of the training"),
    "SLIME_SCRIPT_NUM_GPUS": ("8", "GPUs of each node"),
    "SLIME_SCRIPT_TRAIN_BACKEND": ("fsdp", "fsdp or megatron; what this slime does not have is refused when named"),
    "SLIME_SCRIPT_TASK_DATA": ("data/tasks.jsonl", "input file; for math data/demo_math.jsonl"),
    "SLIME_SCRIPT_EXTERNAL_RAY": ("0", "1: Ray runs already; neither started nor stopped here"),
    "SLIME_SCRIPT_COLOCATE": (
        "0",
        "1: trainer and engine share the GPUs and take turns (train.py instead of train_async.py)",
    ),
    "SLIME_SCRIPT_WITHOUT_BUFFER": ("0", "1: slime plays the episodes itself (--custom-generate-function-path)"),
    "SLIME_SCRIPT_BUFFER_PORT": ("8889", "port of the rollout buffer"),
    "SLIME_SCRIPT_BUFFER_TOKEN_FILE": (
        "",
        "file with the buffer's token; needed as soon as MASTER_ADDR is not loopback",
    ),
    "SLIME_SCRIPT_MEGATRON_DIR": ("~/Megatron-LM", "Megatron's sources, for its backend"),
    "ROLLOUT_BUFFER_ANDROID_WORLD_CONFIG": ("", "the device farm's config.yaml; without it the phones are simulated"),
    "MASTER_ADDR": ("127.0.0.1", "address of the head node"),
    "WANDB_API_KEY": ("", "when set, W&B is used; the key stays in the environment and out of the command line"),
}
"""Every variable that is read, its default and its meaning."""

SIZES = {"2B": "qwen3-1.7B", "4B": "qwen3-4B", "8B": "qwen3-8B"}
"""Qwen3-VL's language model by size, as slime's ``scripts/models`` names its shape."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MathModel:
    """A model for mathematics: slime's script with its shape, its mask, and its rotary base where the script errs."""

    shape: str
    loss_mask_type: str
    rotary_base: int | None = None


MATH_MODELS: Mapping[str, MathModel] = {
    # Made from Qwen2.5-Math, whose rotary base is not that of Qwen2.5: slime compares it with the model's own config.
    "DeepSeek-R1-Distill-Qwen-7B": MathModel(shape="qwen2.5-7B", loss_mask_type="distill_qwen", rotary_base=10_000),
    "Qwen2.5-7B-Instruct": MathModel(shape="qwen2.5-7B", loss_mask_type="qwen"),
    "Qwen3-4B": MathModel(shape="qwen3-4B", loss_mask_type="qwen3"),
    "Qwen3-8B": MathModel(shape="qwen3-8B", loss_mask_type="qwen3"),
}
"""The models that ``run_agent.sh`` knows."""


class LaunchError(Exception):
    """The run cannot be composed or started. The message says why and what to do."""


class Kind(StrEnum):
    """What is trained, and how its rollouts are made."""

    MATH = "math"
    """Single-turn mathematics through the buffer: the shortest way to see everything work."""
    ANDROID_WORLD = "android_world"
    """Android World, each episode one growing conversation."""
    ANDROID_WORLD_OPT = "android_world_opt"
    """The same on several nodes with large GPUs."""
    ANDROID_WORLD_HISTORY = "android_world_history"
    """Android World, each turn a prompt and a training row of its own."""

    @property
    def is_android(self) -> bool:
        """Whether devices are needed."""
        return self is not Kind.MATH


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One command. ``background`` ones are ended when the run is over."""

    says: str
    command: tuple[str, ...] = ()
    background: bool = False
    folder: Path | None = None
    healthy_url: str | None = None
    writes: tuple[Path, str] | None = None

    def shown(self) -> str:
        """Returns the command as a shell would take it."""
        if self.writes is not None:
            path, content = self.writes
            return f"cat > {shlex.quote(str(path))} <<'END'\n{content}END"
        line = shlex.join(self.command) + (" &" if self.background else "")
        return f"(cd {shlex.quote(str(self.folder))} && {line})" if self.folder is not None else line


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSettings:
    """What the environment says, checked."""

    kind: Kind
    slime: Path
    model: str
    repository: str
    models: Path
    save: Path
    nodes: int
    gpus: int
    backend: str
    task_data: Path
    external_ray: bool
    colocate: bool
    without_buffer: bool
    buffer_port: int
    buffer_token_file: Path | None
    buffer_token: str
    megatron: Path
    master: str
    wandb_key: str
    android_config: Path | None

    @property
    def model_path(self) -> Path:
        """Where the model is, or will be."""
        return self.models / self.model

    @property
    def run_path(self) -> Path:
        """Where this run keeps what it writes."""
        return self.save / f"{self.kind.value}-{self.model}"

    @property
    def buffer_url(self) -> str:
        """Where the trainer finds the buffer."""
        return f"http://{self.master}:{self.buffer_port}"


def read_settings(kind: Kind, environment: Mapping[str, str]) -> LaunchSettings:
    """Reads the variables.

    Raises:
        LaunchError: one means nothing, or does not go with another.
    """
    values = {name: environment.get(name) or default for name, (default, _) in VARIABLES.items()}
    slime = _path(values["SLIME_DIR"])
    asked = environment.get("SLIME_SCRIPT_TRAIN_BACKEND")
    settings = LaunchSettings(
        kind=kind,
        slime=slime,
        model=values["SLIME_SCRIPT_MODEL_NAME"] or _default_model(kind),
        repository=values["SLIME_SCRIPT_MODEL_REPOSITORY"],
        models=_path(values["SLIME_SCRIPT_MODELS_DIR"]),
        save=_path(values["SLIME_SCRIPT_SAVE_DIR"]),
        nodes=_number("SLIME_SCRIPT_NUM_NODES", _nodes(kind, environment, values)),
        gpus=_number("SLIME_SCRIPT_NUM_GPUS", values["SLIME_SCRIPT_NUM_GPUS"]),
        backend=_backend(slime, asked),
        task_data=_task_data(kind, environment.get("SLIME_SCRIPT_TASK_DATA")),
        external_ray=_switch("SLIME_SCRIPT_EXTERNAL_RAY", values["SLIME_SCRIPT_EXTERNAL_RAY"]),
        colocate=_switch("SLIME_SCRIPT_COLOCATE", values["SLIME_SCRIPT_COLOCATE"]),
        without_buffer=_switch("SLIME_SCRIPT_WITHOUT_BUFFER", values["SLIME_SCRIPT_WITHOUT_BUFFER"]),
        buffer_port=_number("SLIME_SCRIPT_BUFFER_PORT", values["SLIME_SCRIPT_BUFFER_PORT"]),
        buffer_token_file=_path(token) if (token := values["SLIME_SCRIPT_BUFFER_TOKEN_FILE"]) else None,
        buffer_token=_first_line(values["SLIME_SCRIPT_BUFFER_TOKEN_FILE"]),
        megatron=_path(values["SLIME_SCRIPT_MEGATRON_DIR"]),
        master=values["MASTER_ADDR"],
        wandb_key=values["WANDB_API_KEY"],
        android_config=_path(farm) if (farm := values["ROLLOUT_BUFFER_ANDROID_WORLD_CONFIG"]) else None,
    )
    _check(settings)
    return settings


def _check(settings: LaunchSettings) -> None:
    if settings.nodes > 1 and not settings.external_ray:
        raise LaunchError(
            "several nodes need a Ray cluster that runs already: scripts/multi_node_ray_start.sh on the head, then "
            "SLIME_SCRIPT_EXTERNAL_RAY=1"
        )
    if settings.without_buffer and not settings.kind.is_android:
        raise LaunchError("SLIME_SCRIPT_WITHOUT_BUFFER is for Android World: math without the buffer is slime's own")
    if not settings.without_buffer and settings.master != "127.0.0.1" and settings.buffer_token_file is None:
        raise LaunchError(
            f"MASTER_ADDR is {settings.master}: the buffer will be open to the network. Put a token into a file and "
            "name it in SLIME_SCRIPT_BUFFER_TOKEN_FILE"
        )
    if not settings.colocate and settings.nodes * settings.gpus < 2:
        raise LaunchError("one GPU cannot be both trainer and engine at once: set SLIME_SCRIPT_COLOCATE=1")
    if settings.android_config is not None and not settings.android_config.is_file():
        raise LaunchError(f"ROLLOUT_BUFFER_ANDROID_WORLD_CONFIG is {settings.android_config}: there is no such file")
    if settings.buffer_port > 65535:
        raise LaunchError(f"SLIME_SCRIPT_BUFFER_PORT is {settings.buffer_port}: ports end at 65535")
    if not settings.kind.is_android:
        _math_model(settings)
    elif settings.backend == "megatron":
        _language_model(settings)


def obstacles(settings: LaunchSettings) -> list[str]:
    """Says what stands against the run on this slime: composed it can be, started it would fail."""
    if (
        not settings.kind.is_android
        or settings.backend != "megatron"
        or _has_flag(settings.slime, "--megatron-to-hf-mode")
    ):
        return []
    loaders = settings.slime / "slime" / "backends" / "megatron_utils" / "hf_to_megatron" / "__init__.py"
    if loaders.is_file() and '"qwen3_vl"' in loaders.read_text(encoding="utf-8"):
        return []
    return [f"the slime in {settings.slime} cannot load Qwen3-VL into Megatron: take a version that can"]


# --- the arguments of slime ------------------------------------------------------------------------------------------


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


def _checkpoint_arguments(settings: LaunchSettings) -> list[str]:
    save = str(settings.run_path / "checkpoints")
    model = str(settings.model_path)
    arguments = ["--hf-checkpoint", model, "--load", save, "--save", save, "--save-interval", "20"]
    if settings.backend == "megatron":
        # Older slimes want a converted checkpoint here, which tools/convert_hf_to_torch_dist.py of slime makes.
        converted = Path(f"{model}_torch_dist")
        arguments += ["--ref-load", str(converted) if converted.is_dir() else model]
    return arguments


def _rollout_arguments(settings: LaunchSettings) -> list[str]:
    arguments = ["--prompt-data", str(settings.task_data), "--input-key", "prompt", "--label-key", "label"]
    arguments += ["--metadata-key", "metadata", "--rollout-shuffle"]
    arguments += ["--custom-config-path", str(_config_path(settings))]
    if settings.without_buffer:
        return [*arguments, *_size_arguments(settings), "--custom-generate-function-path", _generate_path(settings)]
    return [
        *arguments,
        *_size_arguments(settings),
        *("--rollout-function-path", "slime.rollout.agent_rollout.generate_rollout"),
        *("--rollout-buffer-url", settings.buffer_url),
        *("--rollout-task-type", "android_world" if settings.kind.is_android else "math"),
        *("--loss-mask-type", "qwen3" if settings.kind.is_android else _math_model(settings).loss_mask_type),
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
        if _has_flag(settings.slime, "--megatron-to-hf-mode"):
            arguments += ["--megatron-to-hf-mode", "bridge"]
        return arguments
    return [*arguments, "--use-dynamic-batch-size", "--max-tokens-per-gpu", "9216"]


def _logging_arguments(settings: LaunchSettings) -> list[str]:
    if not settings.wandb_key:
        return []
    return ["--use-wandb", "--wandb-project", "slime-rollout-buffer", "--wandb-group", settings.kind.value]


def _custom_config(settings: LaunchSettings) -> dict[str, Any]:
    """What slime has no flag for, as the trainer side and the episodes read it."""
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


# --- the commands ----------------------------------------------------------------------------------------------------


def compose(settings: LaunchSettings, extra: Sequence[str] = (), *, only_train: bool = False) -> list[Step]:
    """Returns every step of a run in order: clean up, overlay, Ray, model, buffer, training."""
    overlay = Step(
        says="put the rollout buffer into the slime checkout",
        command=(sys.executable, str(ROOT / "tools" / "install_into_slime.py"), str(settings.slime)),
    )
    config = yaml.safe_dump(_custom_config(settings), sort_keys=False)
    wanted = [overlay, Step(says="what slime has no flag for", writes=(_config_path(settings), config))]
    if not only_train:
        wanted = [*_cleaning(settings), *wanted, *_ray(settings), *_download(settings)]
    if not settings.without_buffer:
        wanted += [*_ray_check(settings), _buffer(settings)]
    return [*wanted, _training(settings, extra)]


def _cleaning(settings: LaunchSettings) -> list[Step]:
    if not settings.kind.is_android:
        return []
    return [Step(says="end emulators that an earlier run left", command=("bash", str(ROOT / "scripts" / "cleanup.sh")))]


def _ray(settings: LaunchSettings) -> list[Step]:
    if settings.external_ray:
        return []
    command = ("ray", "start", "--head", "--node-ip-address", settings.master, "--num-gpus", str(settings.gpus))
    return [Step(says="start Ray", command=(*command, "--disable-usage-stats"), folder=settings.slime)]


def _download(settings: LaunchSettings) -> list[Step]:
    if settings.model_path.is_dir():
        return []
    owner = "deepseek-ai" if settings.model.startswith("DeepSeek") else "Qwen"
    repository = settings.repository or f"{owner}/{settings.model}"
    command = ("hf", "download", repository, "--local-dir", str(settings.model_path))
    return [Step(says="fetch the model", command=command)]


def _joins_ray(settings: LaunchSettings) -> bool:
    return settings.kind.is_android and settings.external_ray


def _ray_check(settings: LaunchSettings) -> list[Step]:
    """The buffer's devices are to live on the trainer's cluster: Ray lets in only its own version, on one Python."""
    if not _joins_ray(settings):
        return []
    command = (sys.executable, "-m", "slime_plugins.rollout_buffer.generator.android_world.ray_cluster", "auto")
    return [Step(says="see that the buffer may join the Ray that runs", command=command, folder=settings.slime)]


def _buffer(settings: LaunchSettings) -> Step:
    command = [sys.executable, "-m", "slime_plugins.rollout_buffer", "serve", "--port", str(settings.buffer_port)]
    command += ["--host", settings.master, "--data-dir", str(settings.run_path / "rollout_buffer")]
    command += ["--data-root", str(settings.task_data.parent), "--data-root", str(settings.models)]
    if settings.buffer_token_file is not None:
        command += ["--token-file", str(settings.buffer_token_file)]
    if _joins_ray(settings):
        command += ["--ray-address", "auto"]
    return Step(
        says="serve the rollout buffer",
        command=tuple(command),
        background=True,
        folder=settings.slime,
        healthy_url=f"{settings.buffer_url}/health",
    )


def _training(settings: LaunchSettings, extra: Sequence[str]) -> Step:
    variables = {
        "PYTHONPATH": f"{settings.slime}:{settings.megatron}"
        if settings.backend == "megatron"
        else str(settings.slime),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "MASTER_ADDR": settings.master,
        "no_proxy": f"127.0.0.1,{settings.master}",
    }
    if settings.buffer_token and not settings.without_buffer:
        variables["ROLLOUT_BUFFER_TOKEN"] = settings.buffer_token
    if settings.wandb_key:
        variables["WANDB_API_KEY"] = settings.wandb_key
    if settings.android_config is not None and settings.without_buffer:
        # A Ray that runs already does not see this environment.
        variables["ROLLOUT_BUFFER_ANDROID_WORLD_CONFIG"] = str(settings.android_config)
    program = settings.slime / ("train.py" if settings.colocate else "train_async.py")
    submit = ["ray", "job", "submit", "--address", f"http://{settings.master}:8265"]
    submit += ["--runtime-env-json", json.dumps({"env_vars": variables}), "--"]
    train = ["python3", str(program), *train_arguments(settings), *extra]
    return Step(says="train", command=(*submit, *_with_shape(settings, train)), folder=settings.slime)


def _with_shape(settings: LaunchSettings, train: Sequence[str]) -> list[str]:
    """Adds the shape of the model: slime's script for it sets the shell array ``MODEL_ARGS``."""
    if settings.backend != "megatron":
        return list(train)
    script = settings.slime / "scripts" / "models" / f"{_language_model(settings)}.sh"
    rotary = "MODEL_ARGS_ROTARY_BASE=5000000 " if settings.kind.is_android else ""
    head, tail = shlex.join(train[:2]), shlex.join([*_other_rotary_base(settings), *train[2:]])
    line = f'{rotary}source {shlex.quote(str(script))} && exec {head} "${{MODEL_ARGS[@]}}" {tail}'
    return ["bash", "-c", line]


def _other_rotary_base(settings: LaunchSettings) -> list[str]:
    """What comes after slime's shape of the model, and so wins over it."""
    base = None if settings.kind.is_android else _math_model(settings).rotary_base
    return [] if base is None else ["--rotary-base", str(base)]


def _math_model(settings: LaunchSettings) -> MathModel:
    found = MATH_MODELS.get(settings.model)
    if found is None:
        raise LaunchError(f"the shape of {settings.model!r} is not known here: {', '.join(MATH_MODELS)} are")
    return found


def _language_model(settings: LaunchSettings) -> str:
    if not settings.kind.is_android:
        return _math_model(settings).shape
    found = re.fullmatch(r"Qwen3-VL-(2B|4B|8B)-(Instruct|Thinking)", settings.model)
    if found is None:
        raise LaunchError(
            f"the shape of {settings.model!r} is not known here: Qwen3-VL-{{2B,4B,8B}}-{{Instruct,Thinking}} are"
        )
    return SIZES[found.group(1)]


def misspelt(environment: Mapping[str, str]) -> list[str]:
    """Says which ``SLIME_SCRIPT_`` variables are not read here, and what was probably meant."""
    remarks = []
    for name in sorted(environment):
        if name.startswith("SLIME_SCRIPT_") and name not in VARIABLES:
            near = difflib.get_close_matches(name, VARIABLES, n=1)
            remarks.append(f"{name} is not read here" + (f"; did you mean {near[0]}?" if near else ""))
    return remarks


# --- reading ---------------------------------------------------------------------------------------------------------


def _backend(slime: Path, asked: str | None) -> str:
    """Takes the backend that is asked for, or the first of fsdp and megatron that this slime has."""
    if asked not in (None, "", "fsdp", "megatron"):
        raise LaunchError(f"SLIME_SCRIPT_TRAIN_BACKEND is {asked!r}: say fsdp or megatron")
    file = slime / "slime" / "utils" / "arguments.py"
    if not file.is_file():
        raise LaunchError(f"{slime} is no slime checkout: name one in SLIME_DIR")
    found = re.search(r'"--train-backend"[^)]*?choices=\[([^\]]*)\]', file.read_text(encoding="utf-8"))
    known = re.findall(r"[\w-]+", found.group(1)) if found is not None else ["megatron"]
    if asked and asked not in known:
        raise LaunchError(f"this slime has no backend {asked}: it has {', '.join(known)}")
    return asked or next(name for name in ("fsdp", "megatron") if name in known)


def _has_flag(slime: Path, flag: str) -> bool:
    return f'"{flag}"' in (slime / "slime" / "utils" / "arguments.py").read_text(encoding="utf-8")


def _nodes(kind: Kind, environment: Mapping[str, str], values: Mapping[str, str]) -> str:
    if kind is Kind.ANDROID_WORLD_OPT and not environment.get("SLIME_SCRIPT_NUM_NODES"):
        return "2"
    return values["SLIME_SCRIPT_NUM_NODES"]


def _default_model(kind: Kind) -> str:
    return "Qwen3-VL-2B-Instruct" if kind.is_android else "DeepSeek-R1-Distill-Qwen-7B"


def _task_data(kind: Kind, given: str | None) -> Path:
    return _path(given) if given else ROOT / "data" / ("tasks.jsonl" if kind.is_android else "demo_math.jsonl")


def _config_path(settings: LaunchSettings) -> Path:
    return settings.run_path / "custom_config.yaml"


def _path(text: str) -> Path:
    return Path(text).expanduser().resolve()


def _first_line(path: str) -> str:
    if not path:
        return ""
    try:
        lines = _path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise LaunchError(
            f"SLIME_SCRIPT_BUFFER_TOKEN_FILE is {path}, which cannot be read: {error.strerror}"
        ) from error
    if not lines or not lines[0].strip():
        raise LaunchError(f"{path} (SLIME_SCRIPT_BUFFER_TOKEN_FILE) is empty: put a token into its first line")
    if len(lines[0].strip()) < SHORTEST_TOKEN:
        raise LaunchError(
            f"{path} (SLIME_SCRIPT_BUFFER_TOKEN_FILE) holds fewer than {SHORTEST_TOKEN} characters, which the buffer "
            "refuses: openssl rand -hex 24"
        )
    return lines[0].strip()


def _number(name: str, text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise LaunchError(f"{name} is {text!r}: say a number from 1 on")
    return int(text)


def _switch(name: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise LaunchError(f"{name} is {text!r}: say 0 or 1")
    return text == "1"


# --- running ---------------------------------------------------------------------------------------------------------


def show(steps: Sequence[Step], secrets: Sequence[str]) -> str:
    """Returns the run as a shell script, secrets left out."""
    text = "\n".join(f"# {step.says}\n{step.shown()}" for step in steps) + "\n"
    for secret in filter(None, secrets):
        text = text.replace(secret, "…")
    return text


def run(steps: Sequence[Step]) -> int:
    """Runs the steps one after the other, ends what runs in the background, and returns the last one's exit code.

    Raises:
        LaunchError: a step before the last one failed.
    """
    background: list[subprocess.Popen[bytes]] = []
    code = 0
    try:
        for at, step in enumerate(steps):
            logging.info("%s", step.says)
            code = _do(step, background)
            if code != 0 and at < len(steps) - 1:
                raise LaunchError(f"could not {step.says}: {step.command[0]} ended with {code}")
    finally:
        for process in background:
            process.send_signal(signal.SIGTERM)
            process.wait()
    return code


def _do(step: Step, background: list[subprocess.Popen[bytes]]) -> int:
    if step.writes is not None:
        path, content = step.writes
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
        return 0
    try:
        process = subprocess.Popen(step.command, cwd=step.folder)
    except FileNotFoundError as error:
        raise LaunchError(f"could not {step.says}: {error.filename} is not installed") from error
    if not step.background:
        return process.wait()
    background.append(process)
    if step.healthy_url is not None:
        _wait_until_healthy(step.healthy_url, process)
    return 0


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + HEALTH_PATIENCE_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise LaunchError(f"the rollout buffer ended with {process.returncode}: its words are above")
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (OSError, urllib.error.URLError):
            time.sleep(0.5)
    raise LaunchError(f"{url} does not answer after {HEALTH_PATIENCE_S:.0f} s")


def _parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    lines = [f"  {name}  {meaning} [{default or 'unset'}]" for name, (default, meaning) in VARIABLES.items()]
    parser = argparse.ArgumentParser(
        prog="launch_training",
        description=(__doc__ or "").splitlines()[0],
        epilog="environment variables:\n" + "\n".join(lines) + "\n\narguments after -- go to slime",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kind", choices=[kind.value for kind in Kind])
    parser.add_argument("--dry-run", action="store_true", help="print the exact commands and run none")
    parser.add_argument(
        "--only-train", action="store_true", help="neither clean up, nor start Ray, nor fetch the model"
    )
    given = list(sys.argv[1:] if arguments is None else arguments)
    cut = given.index("--") if "--" in given else len(given)
    return parser.parse_args(given[:cut]), given[cut + 1 :]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the training's exit code, or 2 after a sentence that says what to mend."""
    options, extra = _parse(arguments)
    logging.basicConfig(level=logging.INFO, format="launch_training: %(message)s")
    for remark in misspelt(os.environ):
        logging.warning("%s", remark)
    try:
        settings = read_settings(Kind(options.kind), os.environ)
        steps = compose(settings, extra, only_train=options.only_train)
        if options.dry_run:
            sys.stdout.write(show(steps, [settings.wandb_key, settings.buffer_token]))
            for obstacle in obstacles(settings):
                logging.warning("%s", obstacle)
            return 0
        for obstacle in obstacles(settings):
            raise LaunchError(obstacle)
        if not settings.task_data.is_file():
            raise LaunchError(f"there is no {settings.task_data}: name the input file in SLIME_SCRIPT_TASK_DATA")
        return run(steps)
    except (LaunchError, OSError) as error:
        sys.stderr.write(f"launch_training: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
