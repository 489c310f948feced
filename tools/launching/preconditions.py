"""What a run needs, looked at before anything is started: each thing that is missing is a sentence with its remedy."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from tools.launching.settings import ROOT, LaunchSettings
from tools.launching.slime_checkout import loads_hf_weights
from tools.launching.steps import repository_of

__all__ = ["missing"]

LINES_LOOKED_AT = 1000
TRY_BUFFER = (
    "from slime_plugins.rollout_buffer.server import app; "
    "from slime_plugins.rollout_buffer.supervisor import supervisor; "
    "from slime_plugins.rollout_buffer.generator import load; load({kind!r})"
)
TRY_TOKENIZER = (
    "import sys; from transformers import AutoTokenizer; "
    "tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True); "
    "sys.exit(0 if tokenizer.chat_template else 'it has no chat template')"
)


def missing(settings: LaunchSettings, *, only_train: bool = False) -> list[str]:
    """Returns a sentence for each thing that the run needs and does not find; none when it can start.

    ``only_train`` is a run that neither starts Ray nor fetches the model.
    """
    checks: list[Callable[[LaunchSettings], Iterator[str]]] = [_input, _model, _converted, _megatron, _programs]
    if not settings.without_buffer:
        checks += [_buffer, _judge, _port]
    found = [sentence for check in checks for sentence in check(settings)]
    if not settings.model_path.is_dir():
        found += _cannot_fetch(settings, only_train=only_train)
    return found


def _input(settings: LaunchSettings) -> Iterator[str]:
    path = settings.task_data
    if not path.is_file():
        yield f"there is no {path}: name the input file in SLIME_SCRIPT_TASK_DATA"
        return
    if path.suffix == ".parquet":
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        lines = [(number, line) for number, line in enumerate(islice(file, LINES_LOOKED_AT), 1) if line.strip()]
    if not lines:
        yield f"{path} holds no line: name another input file in SLIME_SCRIPT_TASK_DATA"
    for number, line in lines:
        if (problem := _problem_of(line, settings)) is not None:
            yield f"{path} line {number} {problem}"
            return


def _problem_of(line: str, settings: LaunchSettings) -> str | None:
    try:
        value: Any = json.loads(line)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        return "is not a JSON object: the input is one object per line"
    if settings.without_buffer:
        return None
    if value.get("instance_id") in (None, ""):
        program = ROOT / "slime_plugins/rollout_buffer/tools/assign_instance_id.py"
        given = shlex.join(["python", str(program), "--input_path", str(settings.task_data)])
        return f"has no instance_id: {given} writes a file with one on every line"
    if settings.kind.is_android:
        return None
    if not value.get("prompt"):
        return "has no prompt: a text, or a list of messages"
    if value.get("label", value.get("answer")) in (None, ""):
        return "has no label: the right answer, which the reward compares with"
    return None


def _model(settings: LaunchSettings) -> Iterator[str]:
    folder = settings.model_path
    if not folder.is_dir():
        return
    if not (folder / "config.json").is_file():
        yield f"{folder} is no model: it has no config.json; {_fetch(settings)}"
        return
    if lacking := _weights_lacking(folder):
        yield f"{folder} lacks {lacking}; {_fetch(settings)}"
    problem = _try(TRY_TOKENIZER, str(folder))
    if problem is not None:
        yield f"the tokenizer in {folder} cannot be used ({problem}); {_fetch(settings)}"


def _weights_lacking(folder: Path) -> str | None:
    """Which weight files are not there, in a few words."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return None if [*folder.glob("*.safetensors"), *folder.glob("*.bin")] else "its weights (*.safetensors)"
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError):
        return f"a readable {index.name}"
    absent = [name for name in names if not (folder / name).is_file()]
    return f"{len(absent)} of {len(names)} weight files ({absent[0]} …)" if absent else None


def _converted(settings: LaunchSettings) -> Iterator[str]:
    if settings.backend != "megatron":
        return
    converted = settings.converted_path
    if converted.is_dir():
        if not (converted / "latest_checkpointed_iteration.txt").is_file():
            yield f"{converted} is no converted model: delete it and convert again: {_convert(settings)}"
    elif not settings.kind.is_android and not loads_hf_weights(settings.slime):
        yield f"this slime's Megatron takes converted models only, and there is no {converted}: {_convert(settings)}"


def _megatron(settings: LaunchSettings) -> Iterator[str]:
    there = (settings.megatron / "megatron").is_dir() or importlib.util.find_spec("megatron") is not None
    if settings.backend == "megatron" and not there:
        yield f"there is no Megatron in {settings.megatron}: name its folder in SLIME_SCRIPT_MEGATRON_DIR"


def _programs(settings: LaunchSettings) -> Iterator[str]:
    if shutil.which("ray") is None:
        yield "the program ray is not on PATH: run this in slime's environment"


def _buffer(settings: LaunchSettings) -> Iterator[str]:
    problem = _try(TRY_BUFFER.format(kind="math" if not settings.kind.is_android else "android_world"))
    if problem is not None:
        yield (
            f"the rollout buffer cannot run in {sys.executable} ({problem}): install what it needs there, which "
            "tools/install_into_slime.py of the rollout buffer lists"
        )


def _judge(settings: LaunchSettings) -> Iterator[str]:
    if not settings.kind.is_android and importlib.util.find_spec("math_verify") is None:
        yield f"math-verify, which judges answers, is not installed: {sys.executable} -m pip install math-verify"


def _port(settings: LaunchSettings) -> Iterator[str]:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.master, settings.buffer_port))
        except OSError as error:
            yield (
                f"nothing can be served on {settings.master}:{settings.buffer_port} ({error.strerror}): set "
                "SLIME_SCRIPT_BUFFER_PORT, or end what serves there"
            )


def _cannot_fetch(settings: LaunchSettings, *, only_train: bool) -> Iterator[str]:
    if only_train:
        yield f"there is no model in {settings.model_path}: {_fetch(settings)}"
    elif shutil.which("hf") is None:
        yield (
            f"there is no model in {settings.model_path}, and no program hf on PATH to fetch it with: "
            "pip install huggingface_hub, or name the folder of models in SLIME_SCRIPT_MODELS_DIR"
        )


def _fetch(settings: LaunchSettings) -> str:
    return f"fetch it with: hf download {repository_of(settings)} --local-dir {settings.model_path}"


def _convert(settings: LaunchSettings) -> str:
    program = settings.slime / "tools" / "convert_hf_to_torch_dist.py"
    paths = f"--hf-checkpoint {settings.model_path} --save {settings.converted_path}"
    return f"PYTHONPATH={settings.megatron} python {program} <the model's shape> {paths}"


def _try(program: str, *arguments: str) -> str | None:
    """Runs a few lines of Python as the buffer will be run; returns the last line of what went wrong."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TRANSFORMERS_VERBOSITY": "error"},
        capture_output=True,
        text=True,
        check=False,
    )
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["it does not start"])[-1]
