"""Settings of a run from environment variables, validated before anything is started."""

from __future__ import annotations

import difflib
import ipaddress
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.strict_yaml import load_yaml
from tools.launching.models import (
    Kind,
    LaunchError,
    backend_of,
    default_model,
    owner_of,
    shape_of,
    takes_weight_off_dummies,
)

ROOT = Path(__file__).resolve().parents[2]
IS_OVERLAY = not (ROOT / "tools" / "install_into_slime.py").exists()
"""True if this program is part of an overlay in a slime checkout."""
HF_MODELS, MEGATRON_MODELS = Path("~/hf_models"), Path("~/megatron_model")
MATH_DATA = Path("~/dapo-math-17k/dapo-math-17k_instance_id.jsonl")
"""Paths of models, converted models and problems in slime's guide to agent rollouts."""
DEVICE_VARIABLES = "ROLLOUT_BUFFER_ANDROID_WORLD__"
"""Prefix of the variables that override single keys of the device pool's file."""
MIN_TOKEN = 16
"""Minimum token length of ``rollout-buffer serve``, checked here before anything is started."""

VARIABLES: Mapping[str, tuple[str, str]] = {
    "SLIME_DIR": ("../slime", "the slime checkout to train with; in a checkout with the overlay, that checkout"),
    "SLIME_SCRIPT_MODEL_NAME": ("", "the model; by default Qwen3-VL-2B-Instruct, for math DeepSeek-R1-Distill-Qwen-7B"),
    "SLIME_SCRIPT_MODEL_REPOSITORY": (
        "",
        "where `hf download` finds it: Qwen/MODEL, or deepseek-ai/MODEL for a DeepSeek",
    ),
    "SLIME_SCRIPT_MODELS_DIR": ("~/models", "folder of models: they are looked for in it, and downloaded into it"),
    "SLIME_SCRIPT_SAVE_DIR": ("~/checkpoints", "folder of checkpoints: a run gets KIND-MODEL in it"),
    "SLIME_SCRIPT_NUM_NODES": ("1", "nodes of the training"),
    "SLIME_SCRIPT_NUM_GPUS": ("8", "GPUs of each node"),
    "SLIME_SCRIPT_TRAIN_BACKEND": ("fsdp", "fsdp or megatron; a named backend that this slime lacks is refused"),
    "SLIME_SCRIPT_TASK_DATA": (
        "data/tasks.jsonl",
        "input file; for math ~/dapo-math-17k/dapo-math-17k_instance_id.jsonl where it is, else data/demo_math.jsonl",
    ),
    "SLIME_SCRIPT_EXTERNAL_RAY": ("0", "1: Ray runs already; neither started nor stopped here"),
    "SLIME_SCRIPT_COLOCATE": (
        "0",
        "1: trainer and engine share the GPUs and take turns (train.py instead of train_async.py)",
    ),
    "SLIME_SCRIPT_WITHOUT_BUFFER": ("0", "1: slime plays the episodes itself (--custom-generate-function-path)"),
    "SLIME_SCRIPT_BUFFER_PORT": ("8889", "port of the rollout buffer"),
    "SLIME_SCRIPT_BUFFER_TOKEN_FILE": (
        "",
        "file with the buffer's token; if MASTER_ADDR is not loopback, by default a file in the run's folder is made",
    ),
    "SLIME_SCRIPT_MEGATRON_DIR": ("~/Megatron-LM", "Megatron's sources, for its backend"),
    "SLIME_SCRIPT_BUFFER_URL": ("", "a running buffer, also on another host; this run then serves none"),
    "SLIME_SCRIPT_EVAL_DATA": ("", "input file with which every 20th rollout is evaluated, by the buffer"),
    "SLIME_SCRIPT_TURN_DISCOUNT": (
        "",
        "0 to 1: trains rewards of turns; a turn's return is its reward plus this times the next turn's return",
    ),
    "SLIME_SCRIPT_SIMULATED_PHONES": ("0", "1: train on simulated phones, whatever the device pool's file names"),
    "ROLLOUT_BUFFER_ANDROID_WORLD_CONFIG": (
        "examples/android_world/config.yaml",
        "the device farm's file; real devices unless it has `device: simulated`",
    ),
    "MASTER_ADDR": (
        "127.0.0.1",
        "address of the head node; with several nodes, by default this host's in its network",
    ),
    "WANDB_API_KEY": ("", "when set, W&B is used; the key stays in the environment and out of the command line"),
}
"""Every variable, its default and its meaning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Farm:
    """Settings of a launch from the device pool's file and ``variables``, which override it. ``device`` None: neither
    names a device."""

    path: Path
    variables: Mapping[str, str]
    device: str | None
    num_workers: int
    max_context_len: int
    simulated_phones: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSettings:
    """Validated settings."""

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
    farm: Farm
    eval_data: Path | None
    external_buffer: str
    turn_discount: float | None = None

    @property
    def model_path(self) -> Path:
        """Folder of the model, or its download target: named by the model, or by owner and model."""
        long_name = f"{owner_of(self.model)}--{self.model}"
        places = [self.models / self.model, self.models / long_name, HF_MODELS.expanduser() / long_name]
        return next((place for place in places if place.is_dir()), places[0])

    @property
    def converted_path(self) -> Path:
        """Folder of the model converted for Megatron."""
        next_to_model = Path(f"{self.model_path}_torch_dist")
        converted = sorted(MEGATRON_MODELS.expanduser().glob(f"{self.model}*"))
        return next_to_model if next_to_model.is_dir() or not converted else converted[-1]

    @property
    def run_path(self) -> Path:
        """Output folder of this run."""
        return self.save / f"{self.kind.value}-{self.model}"

    @property
    def buffer_url(self) -> str:
        """URL of the buffer for the trainer."""
        return self.external_buffer or f"http://{self.master}:{self.buffer_port}"

    @property
    def serves_buffer(self) -> bool:
        """True if this run starts its own buffer."""
        return not self.without_buffer and not self.external_buffer


def read_settings(kind: Kind, environment: Mapping[str, str]) -> LaunchSettings:
    """Reads the variables.

    Raises:
        LaunchError: a variable is invalid, or conflicts with another.
    """
    values = {name: environment.get(name) or default for name, (default, _) in VARIABLES.items()}
    slime = _slime(environment.get("SLIME_DIR"))
    default_nodes = "2" if kind is Kind.ANDROID_WORLD_OPT else VARIABLES["SLIME_SCRIPT_NUM_NODES"][0]
    nodes = _number("SLIME_SCRIPT_NUM_NODES", environment.get("SLIME_SCRIPT_NUM_NODES") or default_nodes)
    settings = LaunchSettings(
        kind=kind,
        slime=slime,
        model=values["SLIME_SCRIPT_MODEL_NAME"] or default_model(kind),
        repository=values["SLIME_SCRIPT_MODEL_REPOSITORY"],
        models=_path(values["SLIME_SCRIPT_MODELS_DIR"]),
        save=_path(values["SLIME_SCRIPT_SAVE_DIR"]),
        nodes=nodes,
        gpus=_number("SLIME_SCRIPT_NUM_GPUS", values["SLIME_SCRIPT_NUM_GPUS"]),
        backend=backend_of(slime, environment.get("SLIME_SCRIPT_TRAIN_BACKEND")),
        task_data=_task_data(kind, environment.get("SLIME_SCRIPT_TASK_DATA")),
        external_ray=_switch("SLIME_SCRIPT_EXTERNAL_RAY", values["SLIME_SCRIPT_EXTERNAL_RAY"]),
        colocate=_switch("SLIME_SCRIPT_COLOCATE", values["SLIME_SCRIPT_COLOCATE"]),
        without_buffer=_switch("SLIME_SCRIPT_WITHOUT_BUFFER", values["SLIME_SCRIPT_WITHOUT_BUFFER"]),
        buffer_port=_number("SLIME_SCRIPT_BUFFER_PORT", values["SLIME_SCRIPT_BUFFER_PORT"]),
        buffer_token_file=_path(token) if (token := values["SLIME_SCRIPT_BUFFER_TOKEN_FILE"]) else None,
        buffer_token=_first_line(values["SLIME_SCRIPT_BUFFER_TOKEN_FILE"]),
        megatron=_path(values["SLIME_SCRIPT_MEGATRON_DIR"]),
        master=_master(environment.get("MASTER_ADDR"), nodes),
        wandb_key=values["WANDB_API_KEY"],
        farm=_farm(kind, environment, values),
        eval_data=_path(data) if (data := values["SLIME_SCRIPT_EVAL_DATA"]) else None,
        external_buffer=values["SLIME_SCRIPT_BUFFER_URL"].rstrip("/"),
        turn_discount=_share("SLIME_SCRIPT_TURN_DISCOUNT", values["SLIME_SCRIPT_TURN_DISCOUNT"]),
    )
    _check(settings)
    return _with_token(settings)


def misspelt(environment: Mapping[str, str]) -> list[str]:
    """Returns warnings about unknown ``SLIME_SCRIPT_`` variables, with suggestions."""
    remarks = []
    for name in sorted(environment):
        if name.startswith("SLIME_SCRIPT_") and name not in VARIABLES:
            matches = difflib.get_close_matches(name, VARIABLES, n=1)
            remarks.append(f"{name} is unknown" + (f"; did you mean {matches[0]}?" if matches else ""))
    return remarks


def _check(settings: LaunchSettings) -> None:
    if settings.nodes > 1 and not settings.external_ray:
        raise LaunchError(
            "several nodes need a Ray cluster that runs already: examples/android_world/multi_node_ray_start.sh on the "
            "head, then SLIME_SCRIPT_EXTERNAL_RAY=1"
        )
    if settings.without_buffer and not settings.kind.is_android:
        raise LaunchError("SLIME_SCRIPT_WITHOUT_BUFFER is for Android World: math without the buffer is slime's own")
    if settings.without_buffer and settings.external_buffer:
        raise LaunchError("SLIME_SCRIPT_BUFFER_URL names a buffer; SLIME_SCRIPT_WITHOUT_BUFFER=1 wants none: unset one")
    if not settings.colocate and settings.nodes * settings.gpus < 2:
        raise LaunchError("one GPU cannot be both trainer and engine at once: set SLIME_SCRIPT_COLOCATE=1")
    if settings.eval_data is not None and (settings.without_buffer or not settings.eval_data.is_file()):
        raise LaunchError(
            f"SLIME_SCRIPT_EVAL_DATA is {settings.eval_data}: "
            + ("only a buffer evaluates it" if settings.eval_data.is_file() else "there is no such file")
        )
    if settings.turn_discount is not None and settings.without_buffer:
        raise LaunchError("SLIME_SCRIPT_TURN_DISCOUNT is for rewards of turns from a buffer: unset it")
    if settings.turn_discount is not None and not (
        settings.backend == "megatron" and takes_weight_off_dummies(settings.slime)
    ):
        raise LaunchError(
            "SLIME_SCRIPT_TURN_DISCOUNT needs the backend megatron and a slime from June 2026 on, which calls the hook "
            "for advantages and has the weights of rows: unset it, or take such a slime"
        )
    if settings.buffer_port > 65535:
        raise LaunchError(f"SLIME_SCRIPT_BUFFER_PORT is {settings.buffer_port}: ports end at 65535")
    shape_of(settings.kind, settings.model)


def _master(given: str | None, nodes: int) -> str:
    """Returns the given or detected address; with several nodes it must be reachable by the others.

    Raises:
        LaunchError: it is a loopback address, or none was found.
    """
    if nodes == 1:
        return given or VARIABLES["MASTER_ADDR"][0]
    address = given or own_address()
    if address is None:
        raise LaunchError(
            "this host has no address in a network: say in MASTER_ADDR under which address the other nodes reach it"
        )
    if is_loopback(address):
        raise LaunchError(
            f"MASTER_ADDR is {address}, which each of the {nodes} nodes takes for itself: say the address under which "
            "the others reach this one"
        )
    return address


def own_address() -> str | None:
    """Returns this host's address in its network, None without one. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # reserved for documentation: only the route is looked up
            address = str(probe.getsockname()[0])
        except OSError:
            return None
    return None if is_loopback(address) else address


def is_loopback(host: str) -> bool:
    """Returns True for loopback and wildcard addresses and names."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower() == "localhost" or host.lower().endswith(".localhost")
    return address.is_loopback or address.is_unspecified


def _farm(kind: Kind, environment: Mapping[str, str], values: Mapping[str, str]) -> Farm:
    given = environment.get("ROLLOUT_BUFFER_ANDROID_WORLD_CONFIG")
    path = _path(given) if given else ROOT / values["ROLLOUT_BUFFER_ANDROID_WORLD_CONFIG"]
    content: Any = {}
    if kind.is_android:
        try:
            content = load_yaml(path.read_text(encoding="utf-8"), path.name)[0] or {}
        except (OSError, ValueError, ConfigError) as error:
            raise LaunchError(f"ROLLOUT_BUFFER_ANDROID_WORLD_CONFIG is {path}: it cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise LaunchError(f"{path} is no list of `key: value` lines")
    variables = {name: text for name, text in environment.items() if name.startswith(DEVICE_VARIABLES)}
    if kind.is_android:
        content |= {name.removeprefix(DEVICE_VARIABLES).lower(): text for name, text in variables.items()}

    def number(key: str, default: int) -> int:
        # The generator accepts 12.0 for 12.
        return _number(f"{key} of {path} or its variable", str(content.get(key, default)).removesuffix(".0"))

    return Farm(
        path=path,
        variables=variables,
        device=content.get("device"),
        num_workers=number("num_workers", 64),
        max_context_len=number("max_context_len", 16384),
        simulated_phones=_switch("SLIME_SCRIPT_SIMULATED_PHONES", values["SLIME_SCRIPT_SIMULATED_PHONES"]),
    )


def _with_token(settings: LaunchSettings) -> LaunchSettings:
    """Creates a token for a reachable buffer without one, or reads the one in the run's folder; a step of the run
    writes a new token there."""
    if not settings.serves_buffer or is_loopback(settings.master) or settings.buffer_token_file is not None:
        return settings
    file = settings.run_path / "buffer_token"
    token = _first_line(str(file)) if file.is_file() else secrets.token_hex(24)
    return replace(settings, buffer_token_file=file, buffer_token=token)


def _share(name: str, value: str) -> float | None:
    """Returns a number from 0 to 1, None for an empty value."""
    if not value:
        return None
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise LaunchError(f"{name} is {value!r}; use a number from 0 to 1")
    return number


def _task_data(kind: Kind, given: str | None) -> Path:
    if given:
        return _path(given)
    if kind.is_android:
        return ROOT / "data" / "tasks.jsonl"
    problems = MATH_DATA.expanduser()
    return problems if problems.is_file() else ROOT / "data" / "demo_math.jsonl"


def _slime(given: str | None) -> Path:
    slime = _path(given or (str(ROOT) if IS_OVERLAY else VARIABLES["SLIME_DIR"][0]))
    if IS_OVERLAY and slime != ROOT:
        raise LaunchError(
            f"SLIME_DIR is {slime}, but this program is a part of the overlay of {ROOT}: leave SLIME_DIR out, or run "
            "the script of the other checkout"
        )
    return slime


def _path(text: str) -> Path:
    return Path(text).expanduser().resolve()


def _first_line(path: str) -> str:
    if not path:
        return ""
    try:
        lines = _path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"SLIME_SCRIPT_BUFFER_TOKEN_FILE is {path}, which cannot be read: {error}") from error
    if not lines or not lines[0].strip():
        raise LaunchError(f"{path} (SLIME_SCRIPT_BUFFER_TOKEN_FILE) is empty: put a token into its first line")
    if len(lines[0].strip()) < MIN_TOKEN:
        raise LaunchError(
            f"{path} (SLIME_SCRIPT_BUFFER_TOKEN_FILE) holds fewer than {MIN_TOKEN} characters, which the buffer "
            "refuses: openssl rand -hex 24"
        )
    return lines[0].strip()


def _number(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise LaunchError(f"{name} is {text!r}: say a number from 1 on")
    return int(text)


def _switch(name: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise LaunchError(f"{name} is {text!r}: say 0 or 1")
    return text == "1"
