"""How a training is started: the exact commands, what is refused, and that slime's own parser takes every argument."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from rollout_buffer_lab.mock_trainer import trainer_args
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.supervisor.child_processes import free_port
from tests.processes import write_program
from tools.launch_training import main
from tools.launching.flag_check import refusals
from tools.launching.models import VISION_MODELS, Kind, LaunchError, trains_qwen3_5_vl
from tools.launching.pinned_train import pin
from tools.launching.preconditions import TRY_TOKENIZER, missing
from tools.launching.settings import VARIABLES, LaunchSettings, misspelt, read_settings
from tools.launching.steps import NATIVE_SPEC, Step, compose, obstacles, run
from tools.launching.train_arguments import custom_config, train_arguments

ROOT = Path(__file__).resolve().parents[3]
SLIME = os.environ.get("ROLLOUT_BUFFER_TEST_SLIME", "")
RAY_CLUSTER = "slime_plugins.rollout_buffer.devices.ray_cluster.probe"
SLIME_PYTHON = os.environ.get("ROLLOUT_BUFFER_TEST_SLIME_PYTHON", sys.executable)
SCRIPTS = {
    "scripts/run_agent.sh": Kind.MATH,
    "examples/android_world/run_android_world.sh": Kind.ANDROID_WORLD,
    "examples/android_world/run_android_world_opt.sh": Kind.ANDROID_WORLD_OPT,
    "examples/android_world/run_android_world_history.sh": Kind.ANDROID_WORLD_HISTORY,
}
MEGATRONS_OWN = {
    "--accumulate-allreduce-grads-in-fp32",
    "--adam-beta1",
    "--adam-beta2",
    "--attention-backend",
    "--attention-dropout",
    "--attention-softmax-in-fp32",
    "--context-parallel-size",
    "--expert-model-parallel-size",
    "--expert-tensor-parallel-size",
    "--hidden-dropout",
    "--lr-decay-style",
    "--micro-batch-size",
    "--optimizer",
    "--pipeline-model-parallel-size",
    "--recompute-granularity",
    "--recompute-method",
    "--recompute-num-layers",
    "--sequence-parallel",
    "--tensor-model-parallel-size",
    "--weight-decay",
}
"""Megatron's parser is not at hand: these are the arguments that slime's own scripts pass to it."""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The variables of a launch: a slime checkout that knows both backends, and folders of the test's own."""
    arguments = tmp_path / "slime" / "slime" / "utils" / "arguments.py"
    arguments.parent.mkdir(parents=True)
    arguments.write_text(
        'parser.add_argument("--train-backend", type=str, choices=["megatron", "fsdp"], default="megatron")\n'
        'parser.add_argument("--megatron-to-hf-mode")\n'
    )
    arguments.with_name("types.py").write_text("class Sample:\n    rollout_id: int | None = None\n")
    return {
        "SLIME_DIR": str(tmp_path / "slime"),
        "SLIME_SCRIPT_MODELS_DIR": str(tmp_path / "models"),
        "SLIME_SCRIPT_SAVE_DIR": str(tmp_path / "saved"),
    }


def settings_of(environment: dict[str, str], kind: Kind = Kind.ANDROID_WORLD, **more: str) -> LaunchSettings:
    return read_settings(kind, {**environment, **more})


def values_of(arguments: list[str]) -> dict[str, str]:
    pairs = zip(arguments, [*arguments[1:], ""], strict=True)
    return {flag: "" if value.startswith("--") else value for flag, value in pairs if flag.startswith("--")}


DOCUMENTED = {
    Kind.ANDROID_WORLD: {
        "--num-rollout": "16",
        "--rollout-batch-size": "8",
        "--n-samples-per-prompt": "8",
        "--rollout-max-response-len": "4096",
        "--rollout-temperature": "0.7",
        "--global-batch-size": "64",
        "--lr": "1e-6",
        "--advantage-estimator": "grpo",
        "--rollout-function-path": "slime.rollout.agent_rollout.generate_rollout",
        "--train-backend": "fsdp",
        "--prompt-data": str(ROOT / "data" / "tasks.jsonl"),
    },
    Kind.MATH: {
        "--num-rollout": "3000",
        "--rollout-batch-size": "16",
        "--n-samples-per-prompt": "8",
        "--rollout-max-response-len": "8192",
        "--rollout-temperature": "0.8",
        "--loss-mask-type": "distill_qwen",
    },
}


@pytest.mark.parametrize("kind", DOCUMENTED)
def test_the_documented_hyper_parameters_are_what_is_passed(environment: dict[str, str], kind: Kind) -> None:
    assert DOCUMENTED[kind].items() <= values_of(train_arguments(settings_of(environment, kind))).items()


@pytest.mark.parametrize(("model", "base"), [("DeepSeek-R1-Distill-Qwen-7B", ["10000"]), ("Qwen2.5-7B-Instruct", [])])
def test_a_distilled_model_keeps_its_own_rotary_base(environment: dict[str, str], model: str, base: list[str]) -> None:
    """slime's shape of Qwen2.5 has another one, and slime refuses a model whose config disagrees."""
    more = {"SLIME_SCRIPT_MODEL_NAME": model, "SLIME_SCRIPT_TRAIN_BACKEND": "megatron"}
    line = compose(settings_of(environment, Kind.MATH, **more))[-1].command[-1]
    words = shlex.split(line)

    assert [words[at + 1] for at, word in enumerate(words) if word == "--rotary-base"] == base
    assert not base or words.index("${MODEL_ARGS[@]}") < words.index("--rotary-base")


def test_a_variable_that_nobody_reads_is_named_with_the_one_that_was_meant() -> None:
    found = misspelt({"SLIME_SCRIPT_NUM_GPU": "4", "SLIME_SCRIPT_NUM_NODES": "1", "PATH": ""})

    assert found == ["SLIME_SCRIPT_NUM_GPU is unknown; did you mean SLIME_SCRIPT_NUM_GPUS?"]


def test_the_steps_come_in_order_and_the_python_entry_only_trains(environment: dict[str, str]) -> None:
    settings = settings_of(environment)
    steps = [
        "stop emulators of an earlier run",
        "put the rollout buffer into the slime checkout",
        "write settings without a flag",
        "start Ray",
        "fetch the model",
        "serve the rollout buffer",
        "train",
    ]
    left_out = {"stop emulators of an earlier run", "start Ray", "fetch the model"}

    assert [step.title for step in compose(settings)] == steps
    trains = [step.title for step in compose(settings, only_train=True)]
    assert trains == [title for title in steps if title not in left_out]


def test_ray_and_a_model_that_are_there_are_left_alone(environment: dict[str, str]) -> None:
    settings = settings_of(environment, SLIME_SCRIPT_EXTERNAL_RAY="1")
    settings.model_path.mkdir(parents=True)
    steps = {step.title: step for step in compose(settings)}

    assert not {"start Ray", "fetch the model"} & steps.keys()
    assert steps["serve the rollout buffer"].command[-2:] == ("--ray-address", "auto")
    assert steps["check that the buffer can join the running Ray"].command[-2:] == (RAY_CLUSTER, "auto")
    named = list(steps)
    assert named.index("check that the buffer can join the running Ray") < named.index("serve the rollout buffer")


NETWORK = {"SLIME_SCRIPT_NUM_NODES": "2", "SLIME_SCRIPT_EXTERNAL_RAY": "1"}


def test_two_nodes_meet_at_an_address_that_both_reach(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.launching.settings.own_address", lambda: "10.0.0.7")
    settings = settings_of({**environment, **NETWORK})
    steps = {step.title: step for step in compose(settings)}
    served = steps["serve the rollout buffer"].command
    job = steps["train"].command
    variables = json.loads(job[job.index("--runtime-env-json") + 1])["env_vars"]

    assert settings.buffer_url == "http://10.0.0.7:8889"
    assert served[served.index("--host") + 1] == "10.0.0.7"
    assert variables["MASTER_ADDR"] == "10.0.0.7"
    assert "pinned_train.py" in steps["train"].shown()
    assert "pinned_train.py" not in compose(settings_of(environment))[-1].shown()
    monkeypatch.setattr("tools.launching.settings.own_address", lambda: None)
    with pytest.raises(LaunchError, match="say in MASTER_ADDR"):
        settings_of({**environment, **NETWORK})


def test_a_buffer_that_others_reach_has_a_token_that_stays(environment: dict[str, str]) -> None:
    more = {**NETWORK, "MASTER_ADDR": "10.0.0.1"}
    first = settings_of({**environment, **more})
    step = next(step for step in compose(first) if step.title == "keep the buffer's token")
    run([step])
    file = first.run_path / "buffer_token"

    assert len(first.buffer_token) >= 16
    assert file.stat().st_mode & 0o777 == 0o600
    again = settings_of({**environment, **more})
    assert again.buffer_token == first.buffer_token == file.read_text().strip()
    assert "keep the buffer's token" not in [step.title for step in compose(again)]


def test_the_farms_file_alone_says_how_long_episodes_are_and_how_many(
    environment: dict[str, str], tmp_path: Path
) -> None:
    farm = tmp_path / "farm.yaml"
    farm.write_text("num_workers: 12.0\nmax_turns: 30\nmax_context_len: 32768\n")
    settings = settings_of(environment, ROLLOUT_BUFFER_ANDROID_WORLD_CONFIG=str(farm))
    config = next(step.writes for step in compose(settings) if step.writes)[1]

    assert "rollout_num_process: 12" in config
    assert not {"max_turns", "max_context_len"} & set(re.findall(r"\w+", config))
    assert values_of(train_arguments(settings))["--max-tokens-per-gpu"] == "32768"
    assert farm.read_text() == "num_workers: 12.0\nmax_turns: 30\nmax_context_len: 32768\n"
    for wrong in ("num_workers: many", "num_workers: 1.5", "max_context_len: -4"):
        farm.write_text(wrong)
        with pytest.raises(LaunchError, match=f"{wrong.partition(':')[0]} of .*farm.yaml"):
            settings_of(environment, ROLLOUT_BUFFER_ANDROID_WORLD_CONFIG=str(farm))


def test_variables_override_the_farms_file_for_the_trainer_and_for_episodes_without_a_buffer(
    environment: dict[str, str],
) -> None:
    prefix = "ROLLOUT_BUFFER_ANDROID_WORLD__"
    more = {f"{prefix}NUM_WORKERS": "3", f"{prefix}RESOURCES_PER_WORKER__NUM_CPUS": "2"}

    assert custom_config(settings_of({**environment, **more}))["rollout_num_process"] == 3
    submitted = compose(settings_of({**environment, **more}, SLIME_SCRIPT_WITHOUT_BUFFER="1"))[-1].shown()
    assert all(f'"{name}": "{value}"' in submitted for name, value in more.items())


def test_a_real_model_is_trained_on_simulated_phones_only_when_told(
    environment: dict[str, str], tmp_path: Path
) -> None:
    farm = tmp_path / "farm.yaml"
    farm.write_text("device: simulated\n")
    more = {"ROLLOUT_BUFFER_ANDROID_WORLD_CONFIG": str(farm)}
    told = settings_of({**environment, **more, "SLIME_SCRIPT_SIMULATED_PHONES": "1"})

    assert "SLIME_SCRIPT_SIMULATED_PHONES=1" in obstacles(settings_of({**environment, **more}))[0]
    assert obstacles(told) == []
    served = next(step for step in compose(told) if step.title == "serve the rollout buffer").command
    assert "device=simulated" in served


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_any_number_of_rows_goes_into_micro_batches(environment: dict[str, str], kind: Kind, backend: str) -> None:
    """54 or 86 rows of a step stop a training whose micro-batches have one size, at four data-parallel ranks."""
    more = {"SLIME_SCRIPT_TRAIN_BACKEND": backend, "SLIME_SCRIPT_EXTERNAL_RAY": "1", "MASTER_ADDR": "10.0.0.1"}
    values = values_of(train_arguments(settings_of(environment, kind, **more)))

    assert "--use-dynamic-batch-size" in values
    assert int(values["--max-tokens-per-gpu"]) > 0
    assert "--micro-batch-size" not in values


def test_dummies_lose_their_weight_on_the_training_ranks_of_a_slime_that_knows_how(environment: dict[str, str]) -> None:
    """The hook is called by Megatron alone, and changes what slimes before June do not have."""
    loss = Path(environment["SLIME_DIR"]) / "slime" / "backends" / "megatron_utils" / "loss.py"
    loss.parent.mkdir(parents=True)
    set_by = {}
    for source in ("group_mask_sums", 'batch["rollout_mask_sums"]'):
        loss.write_text(source)
        for backend in ("fsdp", "megatron"):
            settings = settings_of(environment, SLIME_SCRIPT_TRAIN_BACKEND=backend)
            path = values_of(train_arguments(settings)).get("--rollout-data-postprocess-path")
            set_by[source, backend] = path is not None

    assert [names for names, is_set in set_by.items() if is_set] == [('batch["rollout_mask_sums"]', "megatron")]
    assert path == "slime.rollout.agent_rollout.post_process_rollout_data"


def test_rewards_of_turns_are_trained_on_request_with_a_slime_that_has_the_hook(environment: dict[str, str]) -> None:
    loss = Path(environment["SLIME_DIR"]) / "slime" / "backends" / "megatron_utils" / "loss.py"
    loss.parent.mkdir(parents=True)
    loss.write_text('batch["rollout_mask_sums"]')
    told = {"SLIME_SCRIPT_TRAIN_BACKEND": "megatron", "SLIME_SCRIPT_TURN_DISCOUNT": "0.9"}
    settings = settings_of({**environment, **told})
    hook = "--custom-advantage-function-path"

    assert values_of(train_arguments(settings))[hook] == "slime.rollout.agent_rollout.turn_advantages"
    assert custom_config(settings)["rollout_buffer_turn_discount"] == 0.9
    plain = settings_of(environment, SLIME_SCRIPT_TRAIN_BACKEND="megatron")
    assert hook not in values_of(train_arguments(plain))
    assert "rollout_buffer_turn_discount" not in custom_config(plain)
    with pytest.raises(LaunchError, match="a number from 0 to 1"):
        settings_of({**environment, **told, "SLIME_SCRIPT_TURN_DISCOUNT": "2"})
    loss.write_text("group_mask_sums")
    with pytest.raises(LaunchError, match="SLIME_SCRIPT_TURN_DISCOUNT needs the backend"):
        settings_of({**environment, **told})


@pytest.fixture
def newest(environment: dict[str, str]) -> dict[str, str]:
    """A slime without FSDP and without the bridge, which trains Qwen3.5 by itself."""
    root = Path(environment["SLIME_DIR"])
    arguments = '"--train-backend", type=str, choices=["megatron"], default="megatron"'
    (root / "slime" / "utils" / "arguments.py").write_text(arguments)
    model = root / "slime_plugins" / "models" / "qwen3_5_vl.py"
    model.parent.mkdir(parents=True)
    model.write_text("")
    return environment


def test_qwen3_5_is_trained_with_its_vision_encoder_by_slime_itself(newest: dict[str, str]) -> None:
    settings = settings_of(newest, SLIME_SCRIPT_MODEL_NAME="Qwen3.5-35B-A3B")
    values = values_of(train_arguments(settings))
    line = compose(settings)[-1].command[-1]

    assert obstacles(settings) == []
    assert "scripts/models/qwen3.5-35B-A3B.sh && MODEL_ARGS[1]=slime_plugins.models.qwen3_5_vl" in line
    assert "MODEL_ARGS[2]=get_qwen3_5_vl_model_provider && exec" in line
    assert (values["--loss-mask-type"], values["--micro-batch-size"]) == ("qwen3_5", "1")
    assert "--use-dynamic-batch-size" not in values
    assert (values["--tensor-model-parallel-size"], values["--expert-model-parallel-size"]) == ("2", "4")
    assert "--megatron-to-hf-mode" not in values


@pytest.mark.parametrize("model", ["Qwen3-VL-8B-Instruct", "Qwen2.5-VL-7B-Instruct"])
def test_a_model_that_needs_the_bridge_is_refused_where_there_is_none(newest: dict[str, str], model: str) -> None:
    (said,) = obstacles(settings_of(newest, SLIME_SCRIPT_MODEL_NAME=model))

    assert f"cannot load {model} into Megatron: take slime df926b6a9" in said
    assert "SLIME_SCRIPT_MODEL_NAME=Qwen3.5" in said


def test_without_the_buffer_slime_plays_the_episodes(environment: dict[str, str]) -> None:
    settings = settings_of(environment, Kind.ANDROID_WORLD_HISTORY, SLIME_SCRIPT_WITHOUT_BUFFER="1")
    values = values_of(train_arguments(settings))

    assert values["--custom-generate-function-path"] == "examples.android_world.rollout_history.generate"
    assert not {"--rollout-function-path", "--rollout-buffer-url"} & values.keys()
    assert "serve the rollout buffer" not in [step.title for step in compose(settings)]


def test_arguments_after_the_dashes_win(environment: dict[str, str]) -> None:
    words = shlex.split(compose(settings_of(environment), ["--lr", "2e-6"])[-1].shown())

    assert words[-2:] == ["--lr", "2e-6)"]


@pytest.mark.usefixtures("subprocess_checks_pass")
def test_secrets_are_in_the_job_and_never_shown(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    token.write_text("open-sesame-open-sesame\n")
    more = {"SLIME_SCRIPT_BUFFER_TOKEN_FILE": str(token), "WANDB_API_KEY": "wandb-secret", "MASTER_ADDR": "10.0.0.1"}
    for name, value in {**environment, **more}.items():
        monkeypatch.setenv(name, value)
    job = compose(settings_of({**environment, **more}))[-1].command
    variables = json.loads(job[job.index("--runtime-env-json") + 1])["env_vars"]

    assert (variables["ROLLOUT_BUFFER_TOKEN"], variables["WANDB_API_KEY"]) == (
        "open-sesame-open-sesame",
        "wandb-secret",
    )
    assert main(["android_world", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "open-sesame-open-sesame" not in shown
    assert "wandb-secret" not in shown
    assert "--use-wandb" in shown


@pytest.mark.parametrize(
    ("kind", "more", "says"),
    [
        (Kind.ANDROID_WORLD, {"SLIME_SCRIPT_NUM_GPUS": "²"}, "SLIME_SCRIPT_NUM_GPUS is '²'"),
        (Kind.ANDROID_WORLD, {"SLIME_SCRIPT_EXTERNAL_RAY": "yes"}, "say 0 or 1"),
        (Kind.ANDROID_WORLD, {"SLIME_SCRIPT_TRAIN_BACKEND": "deepspeed"}, "must be fsdp or megatron"),
        (Kind.ANDROID_WORLD, {"SLIME_SCRIPT_NUM_NODES": "2"}, "SLIME_SCRIPT_EXTERNAL_RAY=1"),
        (Kind.ANDROID_WORLD, {"SLIME_SCRIPT_NUM_GPUS": "1"}, "SLIME_SCRIPT_COLOCATE=1"),
        (
            Kind.ANDROID_WORLD,
            {"SLIME_SCRIPT_NUM_NODES": "2", "SLIME_SCRIPT_EXTERNAL_RAY": "1", "MASTER_ADDR": "127.0.0.1"},
            "each of the 2 nodes takes for itself",
        ),
        (Kind.ANDROID_WORLD, {"SLIME_SCRIPT_EVAL_DATA": "/nowhere.jsonl"}, "there is no such file"),
        (
            Kind.ANDROID_WORLD,
            {"SLIME_SCRIPT_BUFFER_URL": "http://10.0.0.9:8889", "SLIME_SCRIPT_WITHOUT_BUFFER": "1"},
            "unset one",
        ),
        (Kind.ANDROID_WORLD, {"SLIME_DIR": "/nowhere"}, "no slime checkout"),
        (
            Kind.ANDROID_WORLD,
            {"SLIME_SCRIPT_TRAIN_BACKEND": "megatron", "SLIME_SCRIPT_MODEL_NAME": "Other"},
            "model 'Other' is not supported",
        ),
        (Kind.MATH, {"SLIME_SCRIPT_WITHOUT_BUFFER": "1"}, "is for Android World"),
        (Kind.MATH, {"SLIME_SCRIPT_BUFFER_TOKEN_FILE": "/nowhere/token"}, "SLIME_SCRIPT_BUFFER_TOKEN_FILE is /nowhere"),
        (Kind.MATH, {"SLIME_SCRIPT_BUFFER_TOKEN_FILE": sys.executable}, "which cannot be read: 'utf-8' codec"),
        (Kind.ANDROID_WORLD, {"ROLLOUT_BUFFER_ANDROID_WORLD_CONFIG": "/nowhere.yaml"}, "it cannot be read"),
        (Kind.MATH, {"SLIME_SCRIPT_MODEL_NAME": "Other"}, "DeepSeek-R1-Distill-Qwen-7B, Qwen2.5-7B-Instruct"),
        (Kind.MATH, {"SLIME_SCRIPT_BUFFER_PORT": "70000"}, "ports end at 65535"),
    ],
)
def test_settings_that_make_no_sense_are_refused_with_a_remedy(
    environment: dict[str, str], kind: Kind, more: dict[str, str], says: str
) -> None:
    with pytest.raises(LaunchError, match=says):
        settings_of(environment, kind, **more)


def test_a_backend_that_this_slime_lacks_is_refused_when_named_and_replaced_when_not(
    environment: dict[str, str],
) -> None:
    file = Path(environment["SLIME_DIR"]) / "slime" / "utils" / "arguments.py"
    file.write_text('"--train-backend", type=str, choices=["megatron"], default="megatron"')

    assert settings_of(environment).backend == "megatron"
    with pytest.raises(LaunchError, match="this slime has no backend fsdp"):
        settings_of(environment, SLIME_SCRIPT_TRAIN_BACKEND="fsdp")
    assert "cannot load Qwen3-VL-2B-Instruct" in obstacles(settings_of(environment))[0]
    assert obstacles(settings_of(environment, Kind.MATH)) == []


def test_a_failed_step_ends_the_run_and_its_background_steps(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    behind = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    steps = [
        Step(title="serve", command=(sys.executable, "-c", behind), background=True),
        Step(title="wait", command=("sh", "-c", f"while [ ! -s {pid_file} ]; do sleep 0.05; done")),
        Step(title="break", command=("sh", "-c", "exit 3")),
        Step(title="train", command=("touch", str(tmp_path / "trained"))),
    ]

    with pytest.raises(LaunchError, match="could not break: sh exited with 3"):
        run(steps)

    assert not (tmp_path / "trained").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_the_trainings_exit_code_is_the_runs(tmp_path: Path) -> None:
    config = tmp_path / "run" / "config.yaml"
    steps = [Step(title="write", writes=(config, "a: 1\n")), Step(title="train", command=("sh", "-c", "exit 7"))]

    assert run(steps) == 7
    assert config.read_text() == "a: 1\n"


# --- what has to be there --------------------------------------------------------------------------------------------


@pytest.fixture
def subprocess_checks_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks that run slime's Python in a process of its own pass."""
    for name in ("TRY_BUFFER", "TRY_TOKENIZER"):
        monkeypatch.setattr(f"tools.launching.preconditions.{name}", "pass")


@pytest.fixture
def ready(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subprocess_checks_pass: None
) -> LaunchSettings:
    """Settings of a run of mathematics that finds everything it needs; ``ray`` and ``hf`` are never called."""
    programs, home, model = tmp_path / "bin", tmp_path / "home", tmp_path / "models" / "Qwen3-4B"
    home.mkdir()
    for name in ("ray", "hf"):
        write_program(programs / name, f"touch {tmp_path}/started\nexit 1")
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(home))
    write_program(programs / "nvidia-smi", "for gpu in 1 2 3 4 5 6 7 8; do echo 3; done")
    check = tmp_path / "flag_check.py"
    check.write_text("""print('{"unknown": [], "refused": []}')\n""")
    monkeypatch.setattr("tools.launching.preconditions.FLAG_CHECK", check)
    monkeypatch.setattr("tools.launching.preconditions.RAY_DASHBOARD", ("127.0.0.1", free_port()))
    shutil.copytree(DEMO_TOKENIZER_PATH, model)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"")
    more = {"SLIME_SCRIPT_MODEL_NAME": "Qwen3-4B", "SLIME_SCRIPT_BUFFER_PORT": str(free_port())}
    for name, value in {**environment, **more}.items():
        monkeypatch.setenv(name, value)
    return settings_of({**environment, **more}, Kind.MATH)


def lines_of(*values: object) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def problems(*lines: object) -> Callable[[LaunchSettings], LaunchSettings]:
    """The input has these lines."""

    def written(settings: LaunchSettings) -> LaunchSettings:
        path = settings.models / "problems.jsonl"
        path.write_text(lines_of(*lines))
        return replace(settings, task_data=path)

    return written


def half_of_the_weights(settings: LaunchSettings) -> LaunchSettings:
    weights = {"a": "model.safetensors", "b": "model-2.safetensors"}
    (settings.model_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    return settings


def without(name: str) -> Callable[[LaunchSettings], LaunchSettings]:
    def removed(settings: LaunchSettings) -> LaunchSettings:
        (settings.model_path / name).unlink()
        return settings

    return removed


def no_model(settings: LaunchSettings) -> LaunchSettings:
    shutil.rmtree(settings.model_path)
    os.environ["PATH"] = "/usr/bin:/bin"  # the fixture's monkeypatch sets it back
    return settings


def half_converted(settings: LaunchSettings) -> LaunchSettings:
    Path(f"{settings.model_path}_torch_dist").mkdir()
    return replace(settings, backend="megatron")


MISSING: dict[str, tuple[Callable[[LaunchSettings], LaunchSettings], str]] = {
    "input": (lambda settings: replace(settings, task_data=Path("/nowhere.jsonl")), "SLIME_SCRIPT_TASK_DATA"),
    "lines": (problems(), "holds no line"),
    "ids": (
        problems({"instance_id": "1", "prompt": "?", "label": "1"}, {"prompt": "2 + 2?", "label": "4"}),
        "problems.jsonl line 2 has no instance_id: python .*assign_instance_id.py --input_path .*problems",
    ),
    "labels": (problems({"instance_id": "1", "prompt": "2 + 2?"}), "line 1 has no label"),
    "tokenizer": (without("tokenizer.json"), r"the tokenizer in .* cannot be used .*fetch it with: hf download Qwen"),
    "chat template": (without("chat_template.jinja"), "it has no chat template"),
    "config": (without("config.json"), "is no model: it has no config.json; fetch it with"),
    "weights": (without("model.safetensors"), r"lacks its weights \(\*.safetensors\); fetch it with"),
    "half of the weights": (half_of_the_weights, r"lacks 1 of 2 weight files \(model-2.safetensors"),
    "model": (no_model, "no program hf on PATH to fetch it with: pip install huggingface_hub"),
    "Ray": (no_model, "ray is not on PATH"),
    "Megatron": (lambda settings: replace(settings, backend="megatron"), "SLIME_SCRIPT_MEGATRON_DIR"),
    "converted": (
        lambda settings: replace(settings, backend="megatron"),
        r"takes converted models only.*: source .*qwen3-4B.sh && .*convert_hf",
    ),
    "half converted": (half_converted, "is no converted model: delete it and convert again"),
    "port": (lambda settings: replace(settings, master="192.0.2.1"), "SLIME_SCRIPT_BUFFER_PORT"),
}


@pytest.mark.parametrize("what", MISSING)
def test_what_is_missing_is_said_with_its_remedy(
    what: str, ready: LaunchSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil, says = MISSING[what]
    if what in ("tokenizer", "chat template"):
        monkeypatch.setattr("tools.launching.preconditions.TRY_TOKENIZER", TRY_TOKENIZER)

    found = missing(spoil(ready))

    assert [sentence for sentence in found if re.search(says, sentence)]
    assert all("\n" not in sentence for sentence in found)


def test_a_package_that_several_checks_miss_is_named_once(
    ready: LaunchSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TRY_BUFFER", "TRY_TOKENIZER"):
        monkeypatch.setattr(f"tools.launching.preconditions.{name}", "import no_such_package")
    (tmp_path / "flag_check.py").write_text("import no_such_package")

    (found,) = missing(ready)

    assert re.search(r"No module named 'no_such_package'.*slime's environment", found)


def says(found: list[str], words: str) -> bool:
    return any(re.search(words, sentence) for sentence in found)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("exit 9", "this host has 0 GPUs, but SLIME_SCRIPT_NUM_GPUS is 8"),
        ("echo 3; echo '[N/A]'", "this host has 2 GPUs"),
        ("for gpu in 1 2 3 4 5 6 7; do echo 3; done; echo 70000", "only 7 of 8 GPUs are free"),
    ],
)
def test_too_few_free_gpus_are_said_before_anything_starts(
    ready: LaunchSettings, tmp_path: Path, script: str, words: str
) -> None:
    write_program(tmp_path / "bin" / "nvidia-smi", script)

    assert says(missing(ready), words)


def test_a_ray_that_runs_must_be_named_and_a_named_one_must_run_with_enough_gpus(
    ready: LaunchSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert says(missing(replace(ready, external_ray=True)), "no Ray accepts jobs")
    with socket.create_server(("127.0.0.1", 0)) as dashboard:
        monkeypatch.setattr("tools.launching.preconditions.RAY_DASHBOARD", dashboard.getsockname())
        assert says(missing(ready), "Ray runs on this host already: use it with SLIME_SCRIPT_EXTERNAL_RAY=1")
        for answer, words in {
            "print(3.0)": "has 3 free GPUs, but 16 are needed",
            "raise OSError('other version')": "cannot join the Ray that runs .*other version",
        }.items():
            monkeypatch.setattr("tools.launching.preconditions.TRY_RAY", answer)
            assert says(missing(replace(ready, external_ray=True, nodes=2)), words)
        monkeypatch.setattr("tools.launching.preconditions.TRY_RAY", "print(16.0)")
        assert missing(replace(ready, external_ray=True, nodes=2)) == []


class BufferWithToken(BaseHTTPRequestHandler):
    """Answers as a buffer that wants a token."""

    def do_GET(self) -> None:
        self.send_response(200 if self.headers["Authorization"] == "Bearer sesame" else 401)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def test_a_buffer_elsewhere_must_answer_and_take_the_token(ready: LaunchSettings) -> None:
    with HTTPServer(("127.0.0.1", 0), BufferWithToken) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        there = replace(ready, external_buffer=f"http://127.0.0.1:{server.server_port}")

        assert says(missing(there), "refuses the token: name its file in SLIME_SCRIPT_BUFFER_TOKEN_FILE")
        assert missing(replace(there, buffer_token="sesame")) == []
        server.shutdown()
    assert says(missing(there), "no buffer answers at http://127.0.0.1")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("""print('{"unknown": ["--old-flag"], "refused": []}')""", "this slime ignores the unknown flags --old-flag"),
        ("""print('{"unknown": [], "refused": ["--log-passrate: leave it out"]}')""", "--log-passrate: leave it out"),
        ("raise ImportError('no megatron')", "cannot read the arguments in .*no megatron.*slime's environment"),
    ],
)
def test_arguments_that_slime_would_pass_over_are_refused(
    ready: LaunchSettings, tmp_path: Path, answer: str, words: str
) -> None:
    (tmp_path / "flag_check.py").write_text(answer + "\n")

    assert says(missing(ready, ["--old-flag"]), words)


def test_what_the_rollout_function_refuses_is_known_before_anything_starts(tmp_path: Path) -> None:
    """The keys of the YAML file count as slime sets them: over the flags."""
    file = tmp_path / "more.yaml"
    file.write_text("log_passrate: true\n")
    parsed = {"rollout_batch_size": 2, "n_samples_per_prompt": 4, "global_batch_size": 8}

    assert refusals(trainer_args(**parsed, custom_config_path=None)) == []
    assert says(refusals(trainer_args(**parsed, custom_config_path=str(file))), "--log-passrate")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("emulator_path: /nowhere/emulator", r"Android SDK: emulator: no program at /nowhere/emulator: install the "),
        ("num_worker: 3", r"farm.yaml: .*num_worker is not a setting; did you mean num_workers\?"),
        ("num_workers: [", r"farm.yaml: "),
    ],
)
def test_a_farm_that_cannot_come_up_on_this_host_is_said_before_anything_starts(
    ready: LaunchSettings, tmp_path: Path, line: str, words: str
) -> None:
    file = tmp_path / "farm.yaml"
    file.write_text(f"avd_name: Base\n{line}\n")
    farm = replace(ready, kind=Kind.ANDROID_WORLD, model="Qwen3-VL-8B-Instruct", farm=replace(ready.farm, path=file))

    found = missing(farm)

    assert says(found, words)
    assert all("\n" not in sentence for sentence in found)
    for elsewhere in ({"external_ray": True}, {"external_buffer": "http://127.0.0.1:1"}):
        assert not says(missing(replace(farm, **elsewhere)), words)


def test_a_model_that_this_slime_has_no_loader_for_is_refused(ready: LaunchSettings, tmp_path: Path) -> None:
    loaders = ready.slime / "slime/backends/megatron_utils/hf_to_megatron/__init__.py"
    loaders.parent.mkdir(parents=True)
    loaders.write_text('_LOADERS = {"qwen3": qwen_hf_tensor}\n')
    (ready.slime / "slime/utils/arguments.py").write_text("")
    (tmp_path / "megatron" / "megatron").mkdir(parents=True)
    megatron = replace(ready, backend="megatron", megatron=tmp_path / "megatron")
    config = ready.model_path / "config.json"

    for content, words in {"{}": "names no model_type", '{"model_type": "other"}': "is a other, for which"}.items():
        config.write_text(content)
        assert says(missing(megatron), words)
    config.write_text('{"model_type": "qwen3"}')
    assert missing(megatron) == []


# --- the scripts -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("subprocess_checks_pass")
@pytest.mark.parametrize(("script", "kind"), SCRIPTS.items())
def test_each_script_shows_its_commands(
    script: str,
    kind: Kind,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The scripts themselves are run in ``test_install_into_slime.py``."""
    up = "/.." * script.count("/")
    starts = f'exec python3 "$here{up}/tools/launch_training.py" {kind.value} "$@"'
    assert (ROOT / script).read_text().splitlines()[-1] == starts
    for name, value in {**environment, "SLIME_SCRIPT_EXTERNAL_RAY": "1", "MASTER_ADDR": "10.0.0.1"}.items():
        monkeypatch.setenv(name, value)

    assert main([kind.value, "--dry-run"]) == 0

    shown = capsys.readouterr().out
    assert "ray job submit" in shown
    assert subprocess.run(["bash", "-n"], input=shown, text=True, check=False).returncode == 0


def test_the_nodes_of_a_cluster_are_started_one_by_one() -> None:
    command = ["bash", "examples/android_world/multi_node_ray_start.sh", "--dry-run", "10.0.0.2", "10.0.0.3"]
    shown, refused = (
        subprocess.run(
            command,
            cwd=ROOT,
            env={"PATH": os.environ["PATH"], "MASTER_ADDR": head},
            capture_output=True,
            text=True,
            check=False,
        )
        for head in ("10.0.0.1", "127.0.0.1")
    )

    assert [line.split()[0] for line in shown.stdout.splitlines()] == ["ray", "ssh", "ssh"]
    assert "--head" in shown.stdout.splitlines()[0]
    assert refused.returncode == 2
    assert "MASTER_ADDR" in refused.stderr


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_the_shell_scripts_are_clean() -> None:
    scripts = [
        path
        for path in [*(ROOT / "scripts").iterdir(), *(ROOT / "examples/android_world").iterdir(), ROOT / ".ci" / "run"]
        if path.is_file() and path.read_bytes().startswith((b"#!/usr/bin/env bash", b"#!/bin/bash", b"#!/bin/sh"))
    ]

    assert len(scripts) > 5
    checked = subprocess.run(["shellcheck", "-x", *map(str, scripts)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


def test_every_variable_is_documented() -> None:
    page = (ROOT / "docs" / "slime.md").read_text(encoding="utf-8")

    assert [name for name in VARIABLES if f"`{name}`" not in page] == []


@pytest.mark.slime
@pytest.mark.timeout(300)  # torch and transformers are imported in a process of its own
@pytest.mark.skipif(not SLIME, reason="set ROLLOUT_BUFFER_TEST_SLIME to the path of a slime checkout")
class TestParsers:
    """With slime's own parser, and Megatron's and SGLang's where they can be imported."""

    def test_slimes_parsers_know_every_argument_of_every_script(self, tmp_path: Path) -> None:
        """All at once: a flag may stand twice, and each value is looked at."""
        switches = ("0", "1")
        runs = [
            (kind, model, without_buffer, colocate)
            for kind, without_buffer, colocate in itertools.product(Kind, switches, switches)
            for model in MODELS_OF[kind.is_android]
            if kind.is_android or without_buffer == "0"
        ]
        words = [word for run in runs for word in self._arguments(*run)]

        assert len(runs) > 20
        assert unknown_to_slime(words, tmp_path) == set()

    @staticmethod
    def _arguments(kind: Kind, model: str, without_buffer: str, colocate: str) -> list[str]:
        settings = read_settings(
            kind,
            {
                "SLIME_DIR": SLIME,
                "SLIME_SCRIPT_EXTERNAL_RAY": "1",
                "MASTER_ADDR": "10.0.0.1",
                "SLIME_SCRIPT_WITHOUT_BUFFER": without_buffer,
                "SLIME_SCRIPT_COLOCATE": colocate,
                "SLIME_SCRIPT_MODEL_NAME": model,
                "WANDB_API_KEY": "key",
            },
        )
        return train_arguments(settings)

    @pytest.mark.parametrize("model", sorted(name for name, model in VISION_MODELS.items() if model.native))
    def test_the_shape_of_each_model_with_a_native_vision_encoder_is_slimes(self, model: str) -> None:
        """What the launch line does to slime's shape is what slime's own script for such a model does."""
        if not trains_qwen3_5_vl(Path(SLIME)):
            pytest.skip("this slime trains no Qwen3.5 with its vision tower")
        shape = Path(SLIME) / "scripts" / "models" / f"{VISION_MODELS[model].shape}.sh"
        ours = shape_after(f"source {shape} && MODEL_ARGS[1]={NATIVE_SPEC[0]} && MODEL_ARGS[2]={NATIVE_SPEC[1]}")
        assert ours[:3] == ["--spec", *NATIVE_SPEC]
        groups = ours[ours.index("--num-query-groups") + 1]
        assert int(groups) == VISION_MODELS[model].query_groups
        assert ("--num-experts" in ours) is VISION_MODELS[model].experts
        own = shape.with_name(f"{shape.stem}-vl.sh")
        if own.is_file():
            assert ours == shape_after(f"source {own}")

    def test_a_flag_that_was_renamed_is_found(self, tmp_path: Path) -> None:
        line = "--hf-checkpoint model --rollout-batch-size 8 --offload-old-actor --sglang-mem-fraction-static 0.6"

        assert unknown_to_slime(shlex.split(line), tmp_path) == {"--offload-old-actor"}


NATIVE = tuple(name for name, model in VISION_MODELS.items() if model.native)
MODELS_OF = {True: ("Qwen3-VL-8B-Instruct", "Qwen2.5-VL-7B-Instruct", *NATIVE), False: ("Qwen3-4B",)}


def shape_after(line: str) -> list[str]:
    """Returns the words of ``MODEL_ARGS`` after a line of the shell."""
    done = subprocess.run(
        ["bash", "-c", f"{line} && printf '%s\\n' \"${{MODEL_ARGS[@]}}\""], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


STUBS = {
    "wandb": "",
    "sglang_router": "__version__ = '0.3.2+slime'\n",
    "sglang_router/launch_router": "class RouterArgs:\n    add_cli_args = staticmethod(lambda parser, **_: None)\n",
}


def unknown_to_slime(arguments: list[str], folder: Path) -> set[str]:
    """Returns the flags that no parser takes; those slime does not know, without ``ROLLOUT_BUFFER_TEST_MEGATRON`` or
    without SGLang in slime's Python."""
    megatron = os.environ.get("ROLLOUT_BUFFER_TEST_MEGATRON", "")
    if not megatron or subprocess.run([SLIME_PYTHON, "-c", "import sglang"], check=False).returncode != 0:
        return unknown_to_slime_itself(arguments)
    for name, content in STUBS.items():
        file = folder / name / "__init__.py" if "/" not in name else folder / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(content)
    program = ROOT / "tools" / "launching" / "flag_check.py"
    asked = subprocess.run(
        [SLIME_PYTHON, str(program)],
        input=json.dumps(arguments),
        env={**os.environ, "PYTHONPATH": f"{SLIME}:{megatron}:{folder}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert asked.returncode == 0, asked.stderr[-3000:]
    return set(json.loads(asked.stdout.splitlines()[-1])["unknown"])


def unknown_to_slime_itself(arguments: list[str]) -> set[str]:
    """SGLang's own arguments begin with --sglang-; its classes are replaced, and Megatron's are known by name."""
    program = (
        "import argparse, json, sys, types\n"
        "class Absent(types.ModuleType):\n"
        "    def __getattr__(self, name):\n"
        "        if name.startswith('__'): raise AttributeError(name)\n"
        "        return type(name, (), {'add_cli_args': staticmethod(lambda *a, **k: None)})\n"
        "srt, router = 'sglang.srt', 'sglang_router'\n"
        "for name in ('sglang', srt, srt + '.server_args', router, router + '.launch_router'):\n"
        "    sys.modules[name] = Absent(name)\n"
        "from slime.utils.arguments import get_slime_extra_args_provider\n"
        "parser = get_slime_extra_args_provider(None)(argparse.ArgumentParser(allow_abbrev=False))\n"
        "print(json.dumps(parser.parse_known_args(json.load(sys.stdin))[1]))\n"
    )
    finished = subprocess.run(
        [SLIME_PYTHON, "-c", program],
        input=json.dumps(arguments),
        env={**os.environ, "PYTHONPATH": SLIME},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    left = {word for word in json.loads(finished.stdout.splitlines()[-1]) if word.startswith("--")}
    return {word for word in left if not word.startswith("--sglang-")} - MEGATRONS_OWN - {"--train-backend"}


class Manager:
    """Stands for a Ray actor class: remembers the options it was created with."""

    created: ClassVar[list[dict[str, Any]]] = []
    name = "manager"

    @classmethod
    def options(cls, **options: Any) -> type[Manager]:
        cls.created.append(options)
        return cls


def test_the_rollout_manager_is_pinned_and_nothing_else_of_it_changes() -> None:
    module = SimpleNamespace(__name__="slime.ray.placement_group", RolloutManager=Manager)
    pin(module, "here")
    module.RolloutManager.options(num_cpus=1, num_gpus=0)
    module.RolloutManager.options(scheduling_strategy="there")

    assert Manager.created == [
        {"num_cpus": 1, "num_gpus": 0, "scheduling_strategy": "here"},
        {"scheduling_strategy": "there"},
    ]
    assert module.RolloutManager.name == "manager"


def test_a_slime_that_creates_the_manager_elsewhere_is_refused() -> None:
    with pytest.raises(SystemExit, match="creates no RolloutManager"):
        pin(SimpleNamespace(__name__="slime.ray.placement_group"), "here")
