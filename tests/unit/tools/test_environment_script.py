"""Which Python the scripts take, and with what they make their environment; what the package says it runs on."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """An empty PATH, but for a shell's own tools."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "cat", "cut", "grep", "mkdir", "sha256sum", "touch", "chmod"):
        (folder / name).symlink_to(shutil.which(name) or name)
    return folder


def add_program(programs: Path, name: str, script: str) -> None:
    (programs / name).write_text(f"#!/bin/bash\n{script}\n")
    (programs / name).chmod(0o755)


def add_python(programs: Path, name: str, version: tuple[int, int]) -> None:
    """A Python that answers whether it is supported, makes an environment, and takes note of the rest."""
    said = ".".join(map(str, version))
    (programs / name).write_text(
        f'#!/bin/bash\necho "{name} $*" >>{programs}/calls\n'
        f'if [ "$1" = -c ]; then echo {said}; exit; fi\n'
        f'if [ "$2" = venv ]; then mkdir -p "$3/bin"; cat "$0" >"$3/bin/python"; chmod +x "$3/bin/python"; fi\n'
    )
    (programs / name).chmod(0o755)


def add_uv(programs: Path) -> None:
    """A uv that takes note of what it is asked."""
    (programs / "uv").write_text(
        f'#!/bin/bash\necho "uv $*" >>{programs}/calls\n'
        'if [ "$1" = venv ]; then for folder; do :; done; mkdir -p "$folder/bin"; touch "$folder/bin/python"; '
        'chmod +x "$folder/bin/python"; fi\n'
    )
    (programs / "uv").chmod(0o755)


def sourced(programs: Path, command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-euc", f". scripts/environment; {command}"],
        cwd=ROOT,
        env={"PATH": str(programs), **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("there", "taken"),
    [
        ({"python3.11": (3, 11), "python3.12": (3, 12), "python3.13": (3, 13)}, "python3.13"),
        ({"python3.11": (3, 11), "python3": (3, 13)}, "python3"),
        ({"python3.12": (3, 12), "python3": (3, 11)}, "python3.12"),
        ({"python3.14": (3, 14), "python3": (3, 12)}, "python3"),
        ({"python3.13": (2, 7), "python3.12": (3, 12)}, "python3.12"),
    ],
)
def test_the_newest_supported_python_is_taken(programs: Path, there: dict[str, tuple[int, int]], taken: str) -> None:
    for name, version in there.items():
        add_python(programs, name, version)

    assert sourced(programs, "find_python").stdout.strip() == taken


def test_what_a_version_manager_has_and_does_not_activate_is_passed_by(programs: Path) -> None:
    add_python(programs, "python3.12", (3, 12))
    (programs / "python3.13").write_text("#!/bin/bash\necho 'pyenv: python3.13: command not found' >&2; exit 127\n")
    (programs / "python3.13").chmod(0o755)

    assert sourced(programs, "find_python").stdout.strip() == "python3.12"


def test_a_python_that_was_named_is_taken_or_refused(programs: Path) -> None:
    add_python(programs, "my own", (3, 11))
    add_python(programs, "old", (3, 10))
    add_python(programs, "python3.13", (3, 13))

    assert sourced(programs, "find_python", ROLLOUT_BUFFER_PYTHON="my own").stdout.strip() == "my own"
    refused = sourced(programs, "find_python", ROLLOUT_BUFFER_PYTHON="old")
    assert refused.returncode == 1
    assert "ROLLOUT_BUFFER_PYTHON is old, which is no Python 3.11, 3.12 or 3.13" in refused.stderr


def test_who_has_the_tests_environment_waits_for_no_other(programs: Path, tmp_path: Path) -> None:
    add_python(programs, "python3.13", (3, 13))
    command = f"prepare_environment {tmp_path}/venv"

    sourced(programs, f"{command} dev")
    before = (programs / "calls").read_text()
    again = sourced(programs, f"{command} android; {command} dev")
    assert (again.returncode, again.stdout) == (0, "")
    assert "pip install" not in (programs / "calls").read_text().removeprefix(before)


def test_a_tests_environment_of_before_does_not_have_the_demo_install_every_time(
    programs: Path, tmp_path: Path
) -> None:
    add_python(programs, "python3.13", (3, 13))
    command = f"prepare_environment {tmp_path}/venv android"
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / ".ready-dev").write_text("of another commit")

    assert "Installing" in sourced(programs, command).stdout
    assert sourced(programs, command).stdout == ""


def test_without_a_python_a_sentence_says_which(programs: Path) -> None:
    add_python(programs, "python3", (3, 10))

    found = sourced(programs, "find_python")

    assert (found.returncode, found.stdout) == (1, "")
    assert "needs Python 3.11, 3.12 or 3.13" in found.stderr


@pytest.mark.parametrize("with_uv", [False, True])
def test_the_environment_is_made_once_with_uv_where_it_is(programs: Path, tmp_path: Path, with_uv: bool) -> None:
    add_python(programs, "python3.12", (3, 12))
    if with_uv:
        add_uv(programs)
    folder = tmp_path / "venv"

    first = sourced(programs, f"prepare_environment {folder} android")
    calls = (programs / "calls").read_text().splitlines()
    again = sourced(programs, f"prepare_environment {folder} android")

    assert (first.returncode, again.returncode, again.stdout) == (0, 0, "")
    assert (programs / "calls").read_text().splitlines() == calls
    constraint = "--quiet --constraint requirements/constraints.txt --editable .[android]"
    if with_uv:
        assert f"uv venv --quiet --seed --python python3.12 {folder}" in calls
        assert f"uv pip install --python {folder}/bin/python {constraint}" in calls
    else:
        assert f"python3.12 -m venv {folder}" in calls
        assert any(call.endswith(f"-m pip install --disable-pip-version-check {constraint}") for call in calls)


def test_uv_alone_is_enough(programs: Path, tmp_path: Path) -> None:
    add_uv(programs)

    assert sourced(programs, f"prepare_environment {tmp_path}/venv android").returncode == 0
    assert f"uv venv --quiet --seed --python 3.13 {tmp_path}/venv" in (programs / "calls").read_text()


@pytest.mark.parametrize("with_uv", [False, True])
@pytest.mark.parametrize(
    ("system", "has_gpu", "extras", "is_for_cpus"),
    [
        ("Linux", False, "embedded-engine", True),
        ("Linux", False, "embedded-engine,miniwob", True),
        ("Linux", True, "embedded-engine", False),
        ("Darwin", False, "embedded-engine", False),  # PyPI has no other build for it
        ("Linux", False, "android", False),
    ],
)
def test_cuda_is_installed_only_where_there_is_a_gpu(
    programs: Path, tmp_path: Path, system: str, has_gpu: bool, extras: str, is_for_cpus: bool, with_uv: bool
) -> None:
    add_python(programs, "python3.13", (3, 13))
    add_program(programs, "uname", f"echo {system}")
    add_program(programs, "nvidia-smi", f"exit {int(not has_gpu)}")
    if with_uv:
        add_uv(programs)

    done = sourced(programs, f"prepare_environment {tmp_path}/venv {extras}")

    assert (done.returncode, done.stderr) == (0, "")
    installs = [call for call in (programs / "calls").read_text().splitlines() if " pip install " in call]
    of_torch, of_project = installs[:-1], installs[-1]
    assert of_project.endswith(f"--editable .[{extras}]")
    assert len(of_torch) == is_for_cpus
    for call in of_torch:
        assert " --no-deps --extra-index-url https://download.pytorch.org/whl/cpu torch==" in call
        assert call.endswith("+cpu")


def test_where_the_build_for_cpus_is_not_to_be_had_the_other_one_is_taken(programs: Path, tmp_path: Path) -> None:
    add_python(programs, "python3.13", (3, 13))
    add_program(programs, "uname", "echo Linux")
    add_program(programs, "uv", f'echo "uv $*" >>{programs}/calls; case "$*" in *+cpu*) exit 1 ;; esac')
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    add_program(tmp_path / "venv" / "bin", "python", "exit 1")

    done = sourced(programs, f"prepare_environment {tmp_path}/venv embedded-engine")

    assert (done.returncode, done.stderr) == (0, "")
    assert "PyTorch's build for CPUs cannot be installed" in done.stdout
    assert (programs / "calls").read_text().splitlines()[-1].endswith("--editable .[embedded-engine]")


def test_the_package_says_which_pythons_it_runs_on() -> None:
    supported = SpecifierSet(PROJECT["requires-python"])

    assert [f"3.{minor}" for minor in range(9, 16) if supported.contains(f"3.{minor}.1")] == ["3.11", "3.12", "3.13"]


def test_the_names_of_extras_are_those_that_every_pip_takes() -> None:
    assert [
        name for name in PROJECT["optional-dependencies"] if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)
    ] == []
