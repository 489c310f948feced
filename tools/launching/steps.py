"""The steps of a run, composed from its settings: every command, in order. ``run`` runs them."""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from tools.launching.models import (
    TEXT_COMMIT,
    VISION_COMMIT,
    Kind,
    LaunchError,
    math_model,
    owner_of,
    rows_share_weight,
    shape_of,
    trains_qwen3_5_vl,
    trains_qwen3_vl,
    vision_model,
)
from tools.launching.settings import DEVICE_VARIABLES, ROOT, LaunchSettings
from tools.launching.train_arguments import config_path, custom_config, train_arguments

HEALTH_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One command, or a file to write. ``background`` commands are stopped at the end of the run; only their owner can
    read ``secret`` files."""

    title: str
    command: tuple[str, ...] = ()
    background: bool = False
    folder: Path | None = None
    healthy_url: str | None = None
    writes: tuple[Path, str] | None = None
    secret: bool = False

    def shown(self) -> str:
        """Returns the command as a shell command line."""
        if self.writes is not None:
            path, content = self.writes
            return f"cat > {shlex.quote(str(path))} <<'END'\n{content}END"
        line = shlex.join(self.command) + (" &" if self.background else "")
        return f"(cd {shlex.quote(str(self.folder))} && {line})" if self.folder is not None else line


def compose(settings: LaunchSettings, extra: Sequence[str] = (), *, only_train: bool = False) -> list[Step]:
    """Returns every step of a run in order: clean up, overlay, Ray, model, buffer, training."""
    config = yaml.safe_dump(custom_config(settings), sort_keys=False)
    steps = [*_overlay(settings), Step(title="write settings without a flag", writes=(config_path(settings), config))]
    if not only_train:
        steps = [*_cleaning(settings), *steps, *_ray(settings), *_download(settings)]
    if settings.serves_buffer:
        steps += [*_token(settings), *_ray_check(settings), _buffer(settings)]
    return [*steps, _training(settings, extra)]


def obstacles(settings: LaunchSettings) -> list[str]:
    """Returns reasons not to start: what this slime cannot train, and a real model on simulated phones."""
    if not settings.kind.is_android:
        return []
    reasons = [*_model_obstacles(settings), *_row_obstacles(settings)]
    if settings.farm.device == "simulated" and not settings.farm.simulated_phones and not settings.external_buffer:
        reasons.append(
            f"device: simulated is set in {settings.farm.path} or by its variable {DEVICE_VARIABLES}DEVICE: a real "
            "model would be trained on simulated phones. Name the file of a farm in "
            "ROLLOUT_BUFFER_ANDROID_WORLD_CONFIG, or set SLIME_SCRIPT_SIMULATED_PHONES=1 if that is meant"
        )
    return reasons


def _model_obstacles(settings: LaunchSettings) -> list[str]:
    slime, model = settings.slime, settings.model
    if vision_model(model).native:
        if settings.backend != "megatron":
            return [f"{model} with its vision tower needs the backend megatron, not {settings.backend}"]
        if trains_qwen3_5_vl(slime):
            return []
        return [f"the slime in {slime} cannot train {model} with its vision tower: take slime {TEXT_COMMIT}"]
    if trains_qwen3_vl(slime):
        return []
    other = " or a model that it can load: SLIME_SCRIPT_MODEL_NAME=Qwen3.5-4B" if trains_qwen3_5_vl(slime) else ""
    return [f"the slime in {slime} cannot load {model} into Megatron: take slime {VISION_COMMIT},{other}".rstrip(",")]


def _row_obstacles(settings: LaunchSettings) -> list[str]:
    if settings.kind is not Kind.ANDROID_WORLD_HISTORY:
        return []
    if not rows_share_weight(settings.slime):
        return [
            f"the slime in {settings.slime} counts each row as a whole trajectory, but mode history makes several rows "
            f"of one: take slime {VISION_COMMIT} or later, or run examples/android_world/run_android_world.sh"
        ]
    if settings.without_buffer and vision_model(settings.model).native:
        return [
            f"{settings.model} wants micro-batches of one size, which the rows of mode history do not fill without the "
            "buffer: leave SLIME_SCRIPT_WITHOUT_BUFFER out"
        ]
    return []


def repository_of(settings: LaunchSettings) -> str:
    """Returns where the model is downloaded from."""
    return settings.repository or f"{owner_of(settings.model)}/{settings.model}"


def show(steps: Sequence[Step], secrets: Sequence[str]) -> str:
    """Returns the run as a shell script, without secrets."""
    text = "\n".join(f"# {step.title}\n{step.shown()}" for step in steps) + "\n"
    for secret in filter(None, secrets):
        text = text.replace(secret, "…")
    return text


def _overlay(settings: LaunchSettings) -> list[Step]:
    """Returns no step if this program itself is part of the overlay."""
    if settings.slime == ROOT:
        return []
    command = (sys.executable, str(ROOT / "tools" / "install_into_slime.py"), str(settings.slime))
    return [Step(title="put the rollout buffer into the slime checkout", command=command)]


def _cleaning(settings: LaunchSettings) -> list[Step]:
    """Returns no step with an external buffer: the emulators are on its host."""
    if not settings.kind.is_android or settings.external_buffer:
        return []
    return [Step(title="stop emulators of an earlier run", command=("bash", str(ROOT / "scripts" / "cleanup.sh")))]


def _ray(settings: LaunchSettings) -> list[Step]:
    if settings.external_ray:
        return []
    command = ("ray", "start", "--head", "--node-ip-address", settings.master, "--num-gpus", str(settings.gpus))
    return [Step(title="start Ray", command=(*command, "--disable-usage-stats"), folder=settings.slime)]


def _download(settings: LaunchSettings) -> list[Step]:
    if settings.model_path.is_dir():
        return []
    command = ("hf", "download", repository_of(settings), "--local-dir", str(settings.model_path))
    return [Step(title="fetch the model", command=command)]


def _joins_ray(settings: LaunchSettings) -> bool:
    return settings.kind.is_android and settings.external_ray


def _ray_check(settings: LaunchSettings) -> list[Step]:
    """Checks that the buffer's devices can join the trainer's cluster: Ray requires equal versions of Ray and
    Python."""
    if not _joins_ray(settings):
        return []
    command = (sys.executable, "-m", "slime_plugins.rollout_buffer.devices.ray_cluster.probe", "auto")
    return [Step(title="check that the buffer can join the running Ray", command=command, folder=settings.slime)]


def _token(settings: LaunchSettings) -> list[Step]:
    """Writes a generated token; the user's own token file is never changed."""
    file = settings.buffer_token_file
    if file is None or file.exists():
        return []
    return [Step(title="keep the buffer's token", writes=(file, f"{settings.buffer_token}\n"), secret=True)]


def _buffer(settings: LaunchSettings) -> Step:
    command = [sys.executable, "-m", "slime_plugins.rollout_buffer", "serve", "--port", str(settings.buffer_port)]
    command += ["--host", settings.master, "--data-dir", str(settings.run_path / "rollout_buffer")]
    command += ["--data-root", str(settings.task_data.parent), "--data-root", str(settings.model_path.parent)]
    if settings.eval_data is not None:
        command += ["--data-root", str(settings.eval_data.parent)]
    if settings.kind.is_android:
        command += ["--android-config", str(settings.farm.path), *_simulation(settings)]
    if settings.buffer_token_file is not None:
        command += ["--token-file", str(settings.buffer_token_file)]
    if _joins_ray(settings):
        command += ["--ray-address", "auto"]
    return Step(
        title="serve the rollout buffer",
        command=tuple(command),
        background=True,
        folder=settings.slime,
        healthy_url=f"{settings.buffer_url}/health",
    )


SIMULATED = {"device": "simulated", "resources_per_worker.num_cpus": "0.1", "resources_per_worker.memory": "0"}
"""Settings that replace the devices of any pool by simulated phones."""


def _simulation(settings: LaunchSettings) -> list[str]:
    if not settings.farm.simulated_phones:
        return []
    return [word for key, value in SIMULATED.items() for word in ("--android", f"{key}={value}")]


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
    if settings.kind.is_android and settings.without_buffer:
        # A running Ray does not have this environment.
        variables |= {"ROLLOUT_BUFFER_ANDROID_WORLD_CONFIG": str(settings.farm.path), **settings.farm.variables}
        if settings.farm.simulated_phones:
            simulated = {key.upper().replace(".", "__"): value for key, value in SIMULATED.items()}
            variables |= {DEVICE_VARIABLES + key: value for key, value in simulated.items()}
    program = settings.slime / ("train.py" if settings.colocate else "train_async.py")
    submit = ["ray", "job", "submit", "--address", "http://127.0.0.1:8265"]
    submit += ["--runtime-env-json", json.dumps({"env_vars": variables}), "--"]
    # With several nodes Ray may place slime's rollout manager anywhere: it is pinned to the node of job and buffer.
    pinned = [str(ROOT / "tools" / "launching" / "pinned_train.py")] if settings.nodes > 1 else []
    train = ["python3", *pinned, str(program), *train_arguments(settings), *extra]
    return Step(title="train", command=(*submit, *_with_shape(settings, train)), folder=settings.slime)


def _with_shape(settings: LaunchSettings, train: Sequence[str]) -> list[str]:
    """Adds the shape of the model: slime's script sets the shell array ``MODEL_ARGS``."""
    if settings.backend != "megatron":
        return list(train)
    script = settings.slime / "scripts" / "models" / f"{shape_of(settings.kind, settings.model)}.sh"
    first_flag = next(index for index, word in enumerate(train) if word.startswith("--"))
    head, tail = shlex.join(train[:first_flag]), shlex.join([*_other_rotary_base(settings), *train[first_flag:]])
    line = f'source {shlex.quote(str(script))} && {_vision_tower(settings)}exec {head} "${{MODEL_ARGS[@]}}" {tail}'
    return ["bash", "-c", line]


def _vision_tower(settings: LaunchSettings) -> str:
    """Returns shell code that puts the vision model into ``--spec A B``, with which ``MODEL_ARGS`` begins."""
    if not settings.kind.is_android or not vision_model(settings.model).native:
        return ""
    return f"MODEL_ARGS[1]={NATIVE_SPEC[0]} && MODEL_ARGS[2]={NATIVE_SPEC[1]} && "


NATIVE_SPEC = ("slime_plugins.models.qwen3_5_vl", "get_qwen3_5_vl_model_provider")


def _other_rotary_base(settings: LaunchSettings) -> list[str]:
    """Returns arguments after slime's shape of the model, which override it."""
    model = vision_model(settings.model) if settings.kind.is_android else math_model(settings.model)
    return [] if model.rotary_base is None else ["--rotary-base", str(model.rotary_base)]


def run(steps: Sequence[Step]) -> int:
    """Runs the steps in sequence, stops background processes, and returns the last step's exit code.

    Raises:
        LaunchError: a step before the last one failed.
    """
    background: list[subprocess.Popen[bytes]] = []
    code = 0
    try:
        for number, step in enumerate(steps, start=1):
            logging.info("%s", step.title)
            code = _do(step, background)
            if code != 0 and number < len(steps):
                raise LaunchError(f"could not {step.title}: {step.command[0]} exited with {code}")
    finally:
        for process in background:
            process.send_signal(signal.SIGTERM)
            process.wait()
    return code


def _do(step: Step, background: list[subprocess.Popen[bytes]]) -> int:
    if step.writes is not None:
        path, content = step.writes
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w", encoding="utf-8", opener=_owners_alone if step.secret else None) as file:
            file.write(content)
        return 0
    try:
        process = subprocess.Popen(step.command, cwd=step.folder)
    except FileNotFoundError as error:
        raise LaunchError(f"could not {step.title}: {error.filename} is not installed") from error
    if not step.background:
        return process.wait()
    background.append(process)
    if step.healthy_url is not None:
        _wait_until_healthy(step.healthy_url, process)
    return 0


def _owners_alone(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + HEALTH_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise LaunchError(f"the rollout buffer exited with {process.returncode}; see its output above")
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (OSError, urllib.error.URLError):
            time.sleep(0.5)
    raise LaunchError(f"{url} does not answer after {HEALTH_TIMEOUT_S:.0f} s")
