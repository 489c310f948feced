"""The overlay: what it puts into a slime checkout, what it refuses, and that nothing of it stays behind."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tools import install_into_slime
from tools.install_into_slime import STATE, Overlay, OverlayError, main

ROOT = Path(__file__).resolve().parents[3]
REAL_SLIME = os.environ.get("ROLLOUT_BUFFER_TEST_SLIME", "")

SAMPLE = """
class Sample:
    group_index: int = 0
    index: int = 0
    rollout_id: int = 0
    tokens: list = None
    response_length: int = 0
    reward: float = 0.0
    loss_mask: list = None
    weight_versions: list = None
    rollout_log_probs: list = None
    remove_sample: bool = False
    multimodal_train_inputs: dict = None
    metadata: dict = None
    status: str = ""
"""
MASKS = """
def get_response_lengths(loss_masks): ...


class MultiTurnLossMaskGenerator:
    def get_loss_mask(self, messages, tools=None): ...
    def get_system_message_length(self): ...
    def find_all_sublist_indices(self, main_list, sublist): ...
"""
TREE = {
    "slime/__init__.py": "",
    "slime/utils/__init__.py": "",
    "slime/utils/types.py": SAMPLE,
    "slime/utils/mask_utils.py": MASKS,
    "slime/rollout/__init__.py": "",
    "slime/rollout/base_types.py": "class RolloutFnTrainOutput: ...\nclass RolloutFnEvalOutput: ...\n",
    "slime/rollout/data_source.py": "class RolloutDataSourceWithBuffer: ...\n",
    "slime/utils/arguments.py": '"--train-backend", choices=["megatron"]\n',
    "scripts/run-qwen3-4B.sh": "# slime's own\n",
    "tools/convert_hf_to_torch_dist.py": "# slime's own\n",
    "slime/ray/rollout.py": "class RolloutManager: ...\n",
    "slime_plugins/__init__.py": "",
    "slime_plugins/rollout_buffer/buffer.py": "# slime's own\n",
    "slime_plugins/rollout_buffer/README.md": "slime's own\n",
    ".gitignore": "__pycache__/\n",
}


def committed_tree(folder: Path) -> Path:
    """A committed tree with what the overlay looks for in slime."""
    for path, content in TREE.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-q", "-m", "slime")
    return folder


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return committed_tree(tmp_path)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with the whole overlay, in which tests only run something."""
    folder = committed_tree(tmp_path_factory.mktemp("installed"))
    Overlay(folder).install()
    return folder


def git(folder: Path, *command: str) -> str:
    return subprocess.run(["git", "-C", str(folder), *command], check=True, capture_output=True, text=True).stdout


def everything(folder: Path) -> dict[str, bytes]:
    files = (file for file in folder.rglob("*") if file.is_file() and ".git" not in file.parts)
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


@pytest.mark.parametrize("trainer_only", [False, True])
def test_the_packages_that_a_python_lacks_are_printed_as_a_command_to_paste(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], trainer_only: bool
) -> None:
    monkeypatch.setattr(install_into_slime, "_is_met", lambda requirement: False)
    main([str(checkout), *["--trainer-only"] * trainer_only])
    command = shlex.split(capsys.readouterr().out.split("pip install")[1])
    names = {Requirement(word).name for word in command}
    assert ({"flask", "uvloop"} <= names) is not trainer_only
    assert {"aiohttp", "requests", "transformers", "pydantic"} <= names


def test_the_overlay_goes_in_and_slimes_types_and_masks_stay(checkout: Path) -> None:
    assert main([str(checkout)]) == 0

    for ours in ("slime/rollout/agent_rollout.py", "slime_plugins/rollout_buffer/buffer.py"):
        assert (checkout / ours).read_bytes() == (ROOT / ours).read_bytes()
    assert (checkout / "slime/utils/mask_generator.py").is_file()
    slimes = ("utils/types.py", "utils/mask_utils.py", "rollout/base_types.py")
    for own in (*(f"slime/{name}" for name in slimes), "slime_plugins/rollout_buffer/README.md"):
        assert (checkout / own).read_text() == TREE[own]
    assert main([str(checkout), "--check"]) == 0


def test_an_uninstall_leaves_nothing_behind_also_of_two_installations(checkout: Path) -> None:
    before = everything(checkout)
    Overlay(checkout).install()
    Overlay(checkout).install()
    python_was_here = checkout / "slime_plugins/rollout_buffer/generator/__pycache__/registry.cpython-311.pyc"
    python_was_here.parent.mkdir()
    python_was_here.write_bytes(b"compiled")

    assert main([str(checkout), "--uninstall"]) == 0

    assert everything(checkout) == before
    assert git(checkout, "status", "--short", "--ignored") == ""


def test_a_newer_version_takes_away_what_it_no_longer_has(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    old = tmp_path_factory.mktemp("old")
    for folder in ("slime", "slime_plugins"):
        shutil.copytree(ROOT / folder, old / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (old / "slime/utils/mask_gone.py").write_text("# once there\n")
    Overlay(checkout, old).install()
    assert (checkout / "slime/utils/mask_gone.py").exists()
    assert any("mask_gone" in line for line in Overlay(checkout).findings()) is False

    Overlay(checkout).install()

    assert not (checkout / "slime/utils/mask_gone.py").exists()
    assert Overlay(checkout).findings() == []


def test_a_check_names_what_is_changed_and_what_is_missing(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(checkout), "--check"]) == 1
    assert "has no overlay" in capsys.readouterr().out
    Overlay(checkout).install()
    (checkout / "slime/rollout/agent_rollout.py").write_text("# mine\n")
    (checkout / "slime/utils/mask_rows.py").unlink()

    assert main([str(checkout), "--check"]) == 1

    said = capsys.readouterr().out
    assert "slime/rollout/agent_rollout.py: changed since it was installed" in said
    assert "slime/utils/mask_rows.py: missing" in said


@pytest.mark.parametrize("how", [[], ["--uninstall"]])
def test_somebodys_changes_are_never_dropped_unasked(
    checkout: Path, how: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Overlay(checkout).install()
    file = checkout / "slime/rollout/agent_rollout.py"
    file.write_text("# mine\n")

    assert main([str(checkout), *how]) == 2

    assert file.read_text() == "# mine\n"
    assert "slime/rollout/agent_rollout.py" in capsys.readouterr().err
    assert main([str(checkout), *how, "--force"]) == 0


def test_a_cut_off_installation_can_be_taken_away(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = everything(checkout)
    copies = iter(range(40))
    copy = Overlay._copy

    def full_disk(source: Path, target: Path, *, as_link: bool = False) -> None:
        if next(copies, None) is None:
            raise OSError("no space left on device")
        copy(source, target, as_link=as_link)

    monkeypatch.setattr(Overlay, "_copy", staticmethod(full_disk))
    with pytest.raises(OSError, match="no space"):
        Overlay(checkout).install()
    monkeypatch.undo()

    assert Overlay(checkout).findings() != []
    Overlay(checkout).uninstall()
    assert everything(checkout) == before


def test_a_tree_that_is_not_known_is_refused_untouched(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / "slime/ray/rollout.py").write_text("class Other: ...\n")
    before = everything(checkout)

    assert main([str(checkout)]) == 2

    assert "slime/ray/rollout.py does not define RolloutManager" in capsys.readouterr().err
    assert everything(checkout) == before


def test_the_farms_file_is_there_to_be_edited_and_stays(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Overlay(checkout).install()
    file = checkout / "examples/android_world/config.yaml"
    ours = file.read_text()
    file.write_text(f"{ours}\nnum_workers: 7\n")

    assert main([str(checkout), "--check"]) == 0
    assert main([str(checkout)]) == 0
    assert file.read_text() == f"{ours}\nnum_workers: 7\n"
    assert "config.yaml stays as it was edited; what ships is" in capsys.readouterr().out
    assert main([str(checkout), "--check"]) == 0
    assert main([str(checkout), "--uninstall"]) == 2
    assert file.exists()
    assert main([str(checkout), "--force"]) == 0
    assert file.read_text() == ours


def test_a_slime_without_the_fields_of_samples_is_refused(checkout: Path) -> None:
    (checkout / "slime/utils/types.py").write_text(SAMPLE.replace("loss_mask", "other"))

    with pytest.raises(OverlayError, match="Sample has no loss_mask"):
        Overlay(checkout).install()


@pytest.mark.parametrize(("name", "warned"), [("rollout_id", False), ("group_id", False), ("other", True)])
def test_a_slime_that_weighs_each_row_alone_is_taken_with_a_warning(
    checkout: Path, name: str, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkout / "slime/utils/types.py").write_text(SAMPLE.replace("rollout_id", name))

    assert main([str(checkout)]) == 0
    assert ("it weighs each row as a trajectory of its own" in capsys.readouterr().out) is warned


@pytest.mark.parametrize("path", ["nowhere", "."])
def test_what_is_no_slime_is_refused(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / path)]) == 2
    assert "is no slime checkout" in capsys.readouterr().err
    assert not (tmp_path / path / STATE).exists()


def run_in(checkout: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command from the checkout's root, where nothing but the checkout is found of this project."""
    surroundings = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(checkout / "home")}
    return subprocess.run(
        command, cwd=checkout, env=surroundings | environment, capture_output=True, text=True, check=False, timeout=50
    )


def test_the_scripts_start_a_training_from_slimes_own_root(installed: Path) -> None:
    for script in ("./scripts/run_agent.sh", "examples/android_world/run_android_world_history.sh"):
        shown = run_in(installed, script, "--dry-run").stdout
        assert f"python3 {installed}/train_async.py" in shown
        assert "install_into_slime" not in shown
        assert f"--data-root {installed}/data" in shown


def test_a_start_from_slimes_root_says_all_that_is_missing_and_starts_nothing(installed: Path) -> None:
    refused = run_in(installed, "./scripts/run_agent.sh")

    assert refused.returncode == 2
    assert refused.stdout == ""
    said = refused.stderr.splitlines()
    assert all(line.startswith("launch_training: ") for line in said)
    assert any("SLIME_SCRIPT_MEGATRON_DIR" in line for line in said)
    assert any("takes converted models only" in line for line in said)
    assert not (installed / "home").exists()


def test_another_checkout_is_trained_by_its_own_scripts(installed: Path) -> None:
    refused = run_in(installed, "./scripts/run_agent.sh", SLIME_DIR="/elsewhere")

    assert refused.returncode == 2
    assert "leave SLIME_DIR out" in refused.stderr


def test_problems_get_their_ids_with_the_guides_command(installed: Path) -> None:
    (installed / "dapo.jsonl").write_text('{"prompt": [{"role": "user", "content": "2 + 2?"}], "label": "4"}\n')

    program = "./slime_plugins/rollout_buffer/tools/assign_instance_id.py"
    run_in(installed, sys.executable, program, "--input_path", "dapo.jsonl").check_returncode()

    assert json.loads((installed / "dapo_instance_id.jsonl").read_text())["instance_id"] == "math_0"


def test_tasks_that_a_user_chose_are_those_that_are_written_and_trained(checkout: Path) -> None:
    """A guide's two steps: edit ``task_list.txt`` beside the example, and write ``tasks.jsonl`` again."""
    Overlay(checkout).install()
    example = checkout / "examples/android_world/data"
    (example / "task_list.txt").write_text("ContactsAddContact\n")

    run_in(checkout, sys.executable, "examples/android_world/data/generate_tasks.py").check_returncode()

    for tasks in (example / "tasks.jsonl", checkout / "data/tasks.jsonl"):
        lines = [json.loads(line) for line in tasks.read_text().splitlines()]
        assert {line["metadata"]["task_name"] for line in lines} == {"ContactsAddContact"}
        assert len(lines) == 20
    assert main([str(checkout), "--uninstall", "--force"]) == 0
    assert git(checkout, "status", "--short", "--ignored") == ""


# --- the trainer's end alone -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trainers_end(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout whose types are slime's as far as the rollout function uses them, and whose buffer runs elsewhere."""
    folder = committed_tree(tmp_path_factory.mktemp("trainers_end"))
    for path in ("slime/utils/types.py", "slime/rollout/base_types.py"):
        shutil.copy2(ROOT / path, folder / path)
    assert main([str(folder), "--trainer-only"]) == 0
    return folder


def test_the_trainers_end_plays_a_rollout_by_itself(trainers_end: Path) -> None:
    """Every module that went in is imported, and a batch goes from the buffer's protocol to Samples."""
    program = """
import importlib, json, pathlib
from loopback_buffer import generate_rollout
from types import SimpleNamespace

source = SimpleNamespace(get_samples=lambda count: [], metadata={})
batch = generate_rollout(None, 0, source)
files = [*pathlib.Path("slime/rollout").glob("agent_*.py"), *pathlib.Path("slime_plugins").rglob("*.py")]
for file in files:
    importlib.import_module(".".join(file.with_suffix("").parts).removesuffix(".__init__"))
print(json.dumps({"samples": sum(map(len, batch.samples)), "imported": len(files)}))
"""
    done = run_in(trainers_end, sys.executable, "-c", program, PYTHONPATH=f"{trainers_end}:{ROOT / 'tests'}")

    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["samples"] == 4
    assert told["imported"] > 40


def test_of_the_buffer_itself_nothing_goes_in_with_the_trainers_end(trainers_end: Path) -> None:
    inside = {path.name for path in (trainers_end / "slime_plugins/rollout_buffer").iterdir() if path.is_dir()}

    assert inside - {"__pycache__"} == {"rules", "tools", "trainer", "wire"}
    assert main([str(trainers_end), "--check"]) == 0


def test_buffer_py_in_the_trainers_end_says_how_to_start_the_buffer(trainers_end: Path) -> None:
    done = run_in(trainers_end / "slime_plugins/rollout_buffer", sys.executable, "buffer.py")

    assert done.returncode == 1
    assert "pip install . in a checkout of the rollout buffer, rollout-buffer serve --data-dir" in done.stderr


def test_a_python_without_the_services_packages_says_which_one_it_lacks(installed: Path) -> None:
    done = run_in(installed, sys.executable, "-S", "-m", "slime_plugins.rollout_buffer", "serve")

    assert done.returncode == 1
    assert re.fullmatch(r"rollout-buffer: \S+ has no package typer: tools/install_into_slime\.py .*\n", done.stderr)


def test_a_training_from_the_trainers_end_wants_the_buffers_address(trainers_end: Path) -> None:
    android = "./examples/android_world/run_android_world.sh"
    for refused in (
        run_in(trainers_end, "./scripts/run_agent.sh"),
        run_in(trainers_end, android, SLIME_SCRIPT_WITHOUT_BUFFER="1"),
    ):
        assert "name the buffer that runs elsewhere in SLIME_SCRIPT_BUFFER_URL" in refused.stderr

    for script in ("./scripts/run_agent.sh", android):
        shown = run_in(trainers_end, script, "--dry-run", SLIME_SCRIPT_BUFFER_URL="http://10.0.0.7:8889")
        assert shown.returncode == 0, shown.stderr
        assert "--rollout-buffer-url http://10.0.0.7:8889" in shown.stdout
        assert "cleanup.sh" not in shown.stdout


def test_the_whole_buffer_comes_over_the_trainers_end_and_goes_again(checkout: Path) -> None:
    assert main([str(checkout), "--trainer-only"]) == 0
    assert main([str(checkout)]) == 0
    assert (checkout / "slime_plugins/rollout_buffer/server").is_dir()
    assert main([str(checkout), "--trainer-only"]) == 0
    assert not (checkout / "slime_plugins/rollout_buffer/server").exists()
    assert main([str(checkout), "--uninstall"]) == 0
    assert (checkout / "slime_plugins/rollout_buffer/buffer.py").read_text() == "# slime's own\n"


@pytest.mark.slime
@pytest.mark.skipif(not REAL_SLIME, reason="set ROLLOUT_BUFFER_TEST_SLIME to the path of a slime checkout")
def test_a_real_checkout_is_unchanged_after_an_uninstall(tmp_path: Path) -> None:
    git(tmp_path, "clone", "-q", REAL_SLIME, "slime")
    checkout = tmp_path / "slime"

    assert main([str(checkout)]) == 0
    assert main([str(checkout), "--check"]) == 0
    assert " M slime_plugins/rollout_buffer/buffer.py" in git(checkout, "status", "--short")
    assert main([str(checkout), "--uninstall"]) == 0

    assert git(checkout, "status", "--short", "--ignored") == ""
