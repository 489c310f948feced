"""Checks the requirements of a run before anything is started; each problem is a sentence with its remedy."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tools.launching.models import bridges, loads_hf_weights, shape_of, vision_model
from tools.launching.settings import ROOT, LaunchSettings
from tools.launching.steps import obstacles, repository_of
from tools.launching.train_arguments import train_arguments

CHECKED_LINES = 1000
"""Number of lines of the input file that are checked, from the first on."""
ANSWER_TIMEOUT_S = 5.0
FREE_GPU_MB = 2048
"""A GPU counts as free while less memory than this is used."""
RAY_DASHBOARD = ("127.0.0.1", 8265)
FLAG_CHECK = Path(__file__).with_name("flag_check.py")
TRY_RAY = (
    "import ray; ray.init(address='auto', log_to_driver=False, logging_level='ERROR'); "
    "print(ray.available_resources().get('GPU', 0))"
)
TRY_BUFFER = (
    "from slime_plugins.rollout_buffer.server import app; "
    "from slime_plugins.rollout_buffer.supervisor import supervisor; "
    "from slime_plugins.rollout_buffer.generator.registry import load; load({kind!r})"
)
TRY_TOKENIZER = (
    "import sys; from transformers import AutoTokenizer; "
    "tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True); "
    "sys.exit(0 if tokenizer.chat_template else 'it has no chat template')"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A requirement: its name, a function that yields its problems, and whether a run with these settings needs it."""

    name: str
    find: Callable[[LaunchSettings], Iterator[str]]
    needed: Callable[[LaunchSettings], bool] = lambda _: True


def missing(settings: LaunchSettings, extra: Sequence[str] = (), *, only_train: bool = False) -> list[str]:
    """Returns a sentence for each unmet requirement; empty if the run can start.

    ``extra`` are the user's own arguments for slime. ``only_train`` is a run that neither starts Ray nor downloads the
    model.
    """
    return [
        problem for _, problems in checked_preconditions(settings, extra, only_train=only_train) for problem in problems
    ]


def checked_preconditions(
    settings: LaunchSettings, extra: Sequence[str] = (), *, only_train: bool = False
) -> Iterator[tuple[str, list[str]]]:
    """Yields each requirement of this run with its problems, in the order of the run.

    A package that several checks miss is a problem of the first of them.
    """
    reported: set[str] = set()
    for name, problems in _preconditions(settings, extra, only_train=only_train):
        packages_of = {problem: re.findall(r"No module named '[^']+'", problem) for problem in problems}
        yield name, [each for each, packages in packages_of.items() if not packages or packages[0] not in reported]
        reported.update(package for packages in packages_of.values() for package in packages)


def _preconditions(
    settings: LaunchSettings, extra: Sequence[str], *, only_train: bool
) -> Iterator[tuple[str, list[str]]]:
    for check in CHECKS:
        if check.needed(settings):
            yield check.name, list(check.find(settings))
    if not settings.model_path.is_dir():
        yield "model to fetch", list(_cannot_fetch(settings, only_train=only_train))
    yield "Ray", list(_ray(settings, only_train=only_train))
    yield "arguments known to slime", list(_arguments(settings, extra))
    if extra:
        yield "arguments of your own", list(_overrides(settings, extra))


def _input(settings: LaunchSettings) -> Iterator[str]:
    path = settings.task_data
    if not path.is_file():
        yield f"there is no {path}: name the input file in SLIME_SCRIPT_TASK_DATA"
        return
    if path.suffix == ".parquet":
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        lines = [(number, line) for number, line in enumerate(islice(file, CHECKED_LINES), 1) if line.strip()]
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
        command = shlex.join(["python", str(program), "--input_path", str(settings.task_data)])
        return f"has no instance_id: {command} writes a file with one on every line"
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
    if problem is not None and "No module named" in problem:
        yield f"{sys.executable} loads no tokenizer ({problem}): run this in slime's environment"
    elif problem is not None:
        yield f"the tokenizer in {folder} cannot be used ({problem}); {_fetch(settings)}"


def _weights_lacking(folder: Path) -> str | None:
    """Returns the number and an example of missing weight files; None if all exist."""
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
    is_installed = (settings.megatron / "megatron").is_dir() or importlib.util.find_spec("megatron") is not None
    if settings.backend == "megatron" and not is_installed:
        yield f"there is no Megatron in {settings.megatron}: name its folder in SLIME_SCRIPT_MEGATRON_DIR"


def _buffer(settings: LaunchSettings) -> Iterator[str]:
    """Checks that this checkout holds the whole overlay, and, if this run serves the buffer, that this Python can."""
    if not (ROOT / "slime_plugins/rollout_buffer/server").is_dir():
        yield (
            "this checkout holds the trainer's end alone (install_into_slime --trainer-only): name the buffer that "
            "runs elsewhere in SLIME_SCRIPT_BUFFER_URL, or install the overlay without --trainer-only"
        )
        return
    program = TRY_BUFFER.format(kind="android_world" if settings.kind.is_android else "math")
    if settings.serves_buffer and (problem := _try(program)) is not None:
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


def _buffer_elsewhere(settings: LaunchSettings) -> Iterator[str]:
    """Checks that the external buffer answers and accepts the token."""
    request = urllib.request.Request(f"{settings.external_buffer}/jobs")
    if settings.buffer_token:
        request.add_header("Authorization", f"Bearer {settings.buffer_token}")
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S):
            return
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            yield f"{settings.external_buffer} refuses the token: name its file in SLIME_SCRIPT_BUFFER_TOKEN_FILE"
        else:
            yield f"{settings.external_buffer} answers {error.code}: is it a rollout buffer?"
    except (OSError, ValueError) as error:
        yield f"no buffer answers at {settings.external_buffer} ({error}): start it, or correct SLIME_SCRIPT_BUFFER_URL"


def _loadable(settings: LaunchSettings) -> Iterator[str]:
    """Checks that this slime's Megatron has a loader for the model."""
    loaders = settings.slime / "slime/backends/megatron_utils/hf_to_megatron/__init__.py"
    config = settings.model_path / "config.json"
    if settings.backend != "megatron" or bridges(settings.slime) or not loaders.is_file() or not config.is_file():
        return
    try:
        model_type = json.loads(config.read_text(encoding="utf-8")).get("model_type")
    except (ValueError, AttributeError):
        model_type = None
    if model_type is None:
        yield f"{config} names no model_type; {_fetch(settings)}"
    elif f'"{model_type}"' not in loaders.read_text(encoding="utf-8"):
        yield f"{settings.model_path} is a {model_type}, for which this slime has no loader: see docs/slime.md"


def _gpus(settings: LaunchSettings) -> Iterator[str]:
    """Counts this host's GPUs, and the free ones."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ANSWER_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        yield "nvidia-smi does not answer: this host has no visible GPU"
        return
    # Where GPU and host share one memory it prints [N/A].
    used = [int(line) if line.isdecimal() else 0 for line in process.stdout.splitlines() if process.returncode == 0]
    free = sum(megabytes < FREE_GPU_MB for megabytes in used)
    if len(used) < settings.gpus:
        yield f"this host has {len(used)} GPUs, but SLIME_SCRIPT_NUM_GPUS is {settings.gpus}"
    elif free < settings.gpus:
        yield f"only {free} of {len(used)} GPUs are free, but {settings.gpus} are needed: see nvidia-smi"


def _farm(settings: LaunchSettings) -> Iterator[str]:
    """Runs the doctor's checks of emulators, if they run on this host."""
    command = [sys.executable, "-m", "slime_plugins.rollout_buffer", "doctor", "--json"]
    command += ["--data-dir", str(settings.run_path), "--android-config", str(settings.farm.path)]
    process = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True, check=False)
    try:
        findings = json.loads(process.stdout)["findings"]
    except (ValueError, KeyError):  # no JSON, or JSON with an error
        yield f"{settings.farm.path}: {(process.stderr.strip().splitlines() or ['the doctor printed no error'])[-1]}"
        return
    for finding in findings:
        if finding["state"] == "missing":
            yield f"{finding['name']}: {finding['detail']}: {finding['remedy']}"


def _arguments(settings: LaunchSettings, extra: Sequence[str]) -> Iterator[str]:
    """Lets slime's own parsers parse the arguments. A training itself ignores unknown flags, and refuses others only
    when the GPUs are loaded."""
    words = [*train_arguments(settings), *extra]
    path = f"{settings.slime}:{settings.megatron}"
    process = subprocess.run(
        [sys.executable, str(FLAG_CHECK)],
        input=json.dumps(words),
        env={**os.environ, "PYTHONPATH": path},
        cwd=settings.slime,
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode != 0:
        last = _last_line(process.stderr)
        yield f"slime's parsers cannot read the arguments in {sys.executable} ({last}): run this in slime's environment"
        return
    findings = json.loads(process.stdout.splitlines()[-1])
    if findings["unknown"]:
        yield f"this slime ignores the unknown flags {', '.join(findings['unknown'])}: remove or correct them"
    yield from findings["refused"]


def _overrides(settings: LaunchSettings, extra: Sequence[str]) -> Iterator[str]:
    """Checks the user's own arguments for ones that would fail the first step."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--context-parallel-size", default="1")
    ranks = parser.parse_known_args(list(extra))[0].context_parallel_size
    bridged = settings.kind.is_android and settings.backend == "megatron" and not vision_model(settings.model).native
    if bridged and ranks != "1":
        yield (
            f"--context-parallel-size {ranks} cuts a sequence away from its images, and {settings.model} would stop at "
            "its first step: leave it at 1, and raise --tensor-model-parallel-size for longer sequences"
        )


def _ray(settings: LaunchSettings, *, only_train: bool) -> Iterator[str]:
    """Checks that an external Ray answers and has enough GPUs, or that no Ray runs if one is to be started."""
    if shutil.which("ray") is None:
        yield "the program ray is not on PATH: run this in slime's environment"
        return
    is_running = _answers(*RAY_DASHBOARD)
    if not settings.external_ray and not only_train:
        if is_running:
            yield "Ray runs on this host already: use it with SLIME_SCRIPT_EXTERNAL_RAY=1, or stop it with `ray stop`"
        return
    if not is_running:
        yield "no Ray accepts jobs at 127.0.0.1:8265: start it, or leave SLIME_SCRIPT_EXTERNAL_RAY out on a single node"
        return
    gpus = settings.nodes * settings.gpus
    process = subprocess.run([sys.executable, "-c", TRY_RAY], capture_output=True, text=True, check=False)
    words = process.stdout.split()
    if process.returncode != 0 or not words:
        yield f"this Python cannot join the Ray that runs ({_last_line(process.stderr)}): Ray and Python must match"
    elif float(words[-1]) < gpus:
        yield f"the Ray cluster has {float(words[-1]):.0f} free GPUs, but {gpus} are needed: other jobs use the rest"


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=ANSWER_TIMEOUT_S):
            return True
    except OSError:
        return False


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it printed nothing"])[-1]


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
    shape = settings.slime / "scripts" / "models" / f"{shape_of(settings.kind, settings.model)}.sh"
    paths = f"--hf-checkpoint {settings.model_path} --save {settings.converted_path}"
    return f'source {shape} && PYTHONPATH={settings.megatron} python {program} "${{MODEL_ARGS[@]}}" {paths}'


def _try(program: str, *arguments: str) -> str | None:
    """Runs a small Python program in the buffer's environment; returns the last line of its error."""
    process = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env=_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    return None if process.returncode == 0 else _last_line(process.stderr)


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "TRANSFORMERS_VERBOSITY": "error"}


CHECKS: Sequence[Check] = (
    Check(name="model and slime go together", find=lambda settings: iter(obstacles(settings))),
    Check(name="input file", find=_input),
    Check(name="model and tokenizer", find=_model),
    Check(name="model that this slime loads", find=_loadable),
    Check(name="converted model", find=_converted),
    Check(name="Megatron", find=_megatron),
    Check(name="GPUs", find=_gpus, needed=lambda settings: not settings.external_ray),
    Check(name="rollout buffer", find=_buffer, needed=lambda settings: not settings.external_buffer),
    Check(name="judge of answers", find=_judge, needed=lambda settings: settings.serves_buffer),
    Check(name="port of the buffer", find=_port, needed=lambda settings: settings.serves_buffer),
    Check(name="buffer elsewhere", find=_buffer_elsewhere, needed=lambda settings: bool(settings.external_buffer)),
    Check(
        name="device farm",
        find=_farm,
        # With an external Ray or buffer, the emulators run on other hosts.
        needed=lambda settings: (
            settings.kind.is_android
            and not (settings.farm.simulated_phones or settings.external_ray or settings.external_buffer)
        ),
    ),
)
"""In the order of the run."""
