"""The steps of a run, composed from its settings: every command, in order, exactly as it will be given."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from tools.launching.models import math_model, owner_of, shape_of
from tools.launching.settings import ROOT, LaunchSettings
from tools.launching.slime_checkout import trains_qwen3_vl
from tools.launching.train_arguments import config_path, custom_config, train_arguments

__all__ = ["Step", "compose", "obstacles", "repository_of", "show"]


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


def compose(settings: LaunchSettings, extra: Sequence[str] = (), *, only_train: bool = False) -> list[Step]:
    """Returns every step of a run in order: clean up, overlay, Ray, model, buffer, training."""
    config = yaml.safe_dump(custom_config(settings), sort_keys=False)
    wanted = [*_overlay(settings), Step(says="what slime has no flag for", writes=(config_path(settings), config))]
    if not only_train:
        wanted = [*_cleaning(settings), *wanted, *_ray(settings), *_download(settings)]
    if not settings.without_buffer:
        wanted += [*_ray_check(settings), _buffer(settings)]
    return [*wanted, _training(settings, extra)]


def obstacles(settings: LaunchSettings) -> list[str]:
    """Says what stands against the run on this slime: composed it can be, started it would fail."""
    into_megatron = settings.kind.is_android and settings.backend == "megatron"
    if not into_megatron or trains_qwen3_vl(settings.slime):
        return []
    return [f"the slime in {settings.slime} cannot load Qwen3-VL into Megatron: take a version that can"]


def repository_of(settings: LaunchSettings) -> str:
    """Returns where the model is downloaded from."""
    return settings.repository or f"{owner_of(settings.model)}/{settings.model}"


def show(steps: Sequence[Step], secrets: Sequence[str]) -> str:
    """Returns the run as a shell script, secrets left out."""
    text = "\n".join(f"# {step.says}\n{step.shown()}" for step in steps) + "\n"
    for secret in filter(None, secrets):
        text = text.replace(secret, "…")
    return text


def _overlay(settings: LaunchSettings) -> list[Step]:
    """Nothing where this program itself is a part of the overlay."""
    if settings.slime == ROOT:
        return []
    command = (sys.executable, str(ROOT / "tools" / "install_into_slime.py"), str(settings.slime))
    return [Step(says="put the rollout buffer into the slime checkout", command=command)]


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
    command = ("hf", "download", repository_of(settings), "--local-dir", str(settings.model_path))
    return [Step(says="fetch the model", command=command)]


def _joins_ray(settings: LaunchSettings) -> bool:
    return settings.kind.is_android and settings.external_ray


def _ray_check(settings: LaunchSettings) -> list[Step]:
    """The buffer's devices are to live on the trainer's cluster: Ray lets in only its own version, on one Python."""
    if not _joins_ray(settings):
        return []
    command = (sys.executable, "-m", "slime_plugins.rollout_buffer.devices.ray_cluster.probe", "auto")
    return [Step(says="see that the buffer may join the Ray that runs", command=command, folder=settings.slime)]


def _buffer(settings: LaunchSettings) -> Step:
    command = [sys.executable, "-m", "slime_plugins.rollout_buffer", "serve", "--port", str(settings.buffer_port)]
    command += ["--host", settings.master, "--data-dir", str(settings.run_path / "rollout_buffer")]
    command += ["--data-root", str(settings.task_data.parent), "--data-root", str(settings.model_path.parent)]
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
    script = settings.slime / "scripts" / "models" / f"{shape_of(settings.kind, settings.model)}.sh"
    rotary = "MODEL_ARGS_ROTARY_BASE=5000000 " if settings.kind.is_android else ""
    head, tail = shlex.join(train[:2]), shlex.join([*_other_rotary_base(settings), *train[2:]])
    line = f'{rotary}source {shlex.quote(str(script))} && exec {head} "${{MODEL_ARGS[@]}}" {tail}'
    return ["bash", "-c", line]


def _other_rotary_base(settings: LaunchSettings) -> list[str]:
    """What comes after slime's shape of the model, and so wins over it."""
    base = None if settings.kind.is_android else math_model(settings.model).rotary_base
    return [] if base is None else ["--rotary-base", str(base)]
