"""Which Python the scripts take, and with what they make their environment; what the package says it runs on."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from tests.processes import write_program

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """An empty PATH, but for a shell's own tools."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "cat", "cut", "grep", "mkdir", "sha256sum", "touch", "chmod"):
        (folder / name).symlink_to(shutil.which(name) or name)
    return folder


def add_python(programs: Path, name: str, version: tuple[int, int]) -> None:
    """A Python that tells its version and makes an environment; each call is a line of ``calls``."""
    said = ".".join(map(str, version))
    write_program(
        programs / name,
        f'echo "{name} $*" >>{programs}/calls\n'
        f'if [ "$1" = -c ]; then echo {said}; exit; fi\n'
        f'if [ "$2" = venv ]; then mkdir -p "$3/bin"; cat "$0" >"$3/bin/python"; chmod +x "$3/bin/python"; fi',
    )


def add_uv(programs: Path) -> None:
    """A uv that makes an environment; each call is a line of ``calls``."""
    write_program(
        programs / "uv",
        f'echo "uv $*" >>{programs}/calls\n'
        'if [ "$1" = venv ]; then for folder; do :; done; mkdir -p "$folder/bin"; touch "$folder/bin/python"; '
        'chmod +x "$folder/bin/python"; fi',
    )


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


def test_a_python_that_was_named_is_taken_or_refused(programs: Path) -> None:
    add_python(programs, "my own", (3, 11))
    add_python(programs, "old", (3, 10))
    add_python(programs, "python3.13", (3, 13))

    assert sourced(programs, "find_python", ROLLOUT_BUFFER_PYTHON="my own").stdout.strip() == "my own"
    refused = sourced(programs, "find_python", ROLLOUT_BUFFER_PYTHON="old")
    assert refused.returncode == 1
    assert "ROLLOUT_BUFFER_PYTHON is old, which is no Python 3.11, 3.12 or 3.13" in refused.stderr


def test_without_a_python_a_sentence_says_which(programs: Path) -> None:
    add_python(programs, "python3", (3, 10))

    found = sourced(programs, "find_python")

    assert (found.returncode, found.stdout) == (1, "")
    assert "needs Python 3.11, 3.12 or 3.13" in found.stderr


@pytest.mark.parametrize("with_uv", [False, True])
def test_the_environment_is_made_once_and_with_uv_if_there_is_one(
    programs: Path, tmp_path: Path, with_uv: bool
) -> None:
    add_python(programs, "python3.12", (3, 12))
    if with_uv:
        add_uv(programs)
    folder = tmp_path / "venv"

    first = sourced(programs, f"prepare_environment {folder} android")
    calls = (programs / "calls").read_text().splitlines()
    again = sourced(programs, f"prepare_environment {folder} android")

    assert (first.returncode, again.returncode, again.stdout) == (0, 0, "")
    assert (programs / "calls").read_text().splitlines() == calls
    constraint = "--quiet --constraint requirements/constraints.txt --editable .[android] --editable ./lab"
    if with_uv:
        assert f"uv venv --quiet --seed --python python3.12 {folder}" in calls
        assert f"uv pip install --python {folder}/bin/python {constraint}" in calls
    else:
        assert f"python3.12 -m venv {folder}" in calls
        install = f"-m pip install --disable-pip-version-check --no-compile {constraint}"
        assert any(call.endswith(install) for call in calls)


@pytest.mark.parametrize("works", [True, False])
def test_a_uv_that_pip_can_fetch_installs_and_pip_does_where_it_fails(
    programs: Path, tmp_path: Path, works: bool
) -> None:
    add_python(programs, "python3.12", (3, 12))
    folder = tmp_path / "venv"
    write_program(folder / "bin" / "uv", f'echo "fetched $*" >>{programs}/calls; exit {int(not works)}')

    done = sourced(programs, f"prepare_environment {folder} android")

    assert done.returncode == 0
    calls = [call for call in (programs / "calls").read_text().splitlines() if "--editable" in call]
    assert calls[0].startswith(f"fetched pip install --python {folder}/bin/python")
    assert len(calls) == (1 if works else 2)


@pytest.mark.parametrize("with_uv", [False, True])
@pytest.mark.parametrize(
    ("system", "has_gpu", "extras", "is_for_cpus"),
    [
        ("Linux", False, "embedded-engine", True),
        ("Linux", True, "embedded-engine", False),
        ("Darwin", False, "embedded-engine", False),  # PyPI has no other build for it
        ("Linux", False, "", False),
    ],
)
def test_cuda_is_installed_only_where_there_is_a_gpu(
    programs: Path, tmp_path: Path, system: str, has_gpu: bool, extras: str, is_for_cpus: bool, with_uv: bool
) -> None:
    add_python(programs, "python3.13", (3, 13))
    write_program(programs / "uname", f"echo {system}")
    write_program(programs / "nvidia-smi", f"exit {int(not has_gpu)}")
    if with_uv:
        add_uv(programs)

    done = sourced(programs, f"prepare_environment {tmp_path}/venv android '{extras}'")

    assert (done.returncode, done.stderr) == (0, "")
    calls = (programs / "calls").read_text().splitlines()
    installs = [call for call in calls if " pip install " in call and "--constraint" in call]
    of_torch, of_project = installs[:-1], installs[-1]
    assert of_project.endswith("--editable .[android] --editable ./lab" + (f"[{extras}]" if extras else ""))
    assert len(of_torch) == is_for_cpus
    for call in of_torch:
        assert " --no-deps --extra-index-url https://download.pytorch.org/whl/cpu torch==" in call
        assert call.endswith("+cpu")


def test_every_pinned_package_installs_on_the_first_patch_of_each_supported_python() -> None:
    """Debian 12 has Python 3.11.2. Only packages that are installed in the pinned version are looked at."""
    pins = (ROOT / "requirements" / "constraints.txt").read_text(encoding="utf-8").split()
    installed = {f"{one.name.lower()}=={one.version}": one.metadata for one in importlib.metadata.distributions()}
    accepted = {
        pin: SpecifierSet(installed[pin]["Requires-Python"])
        for pin in pins
        if pin in installed and "Requires-Python" in installed[pin]
    }

    assert len(accepted) > 100
    first_patches = ("3.11.0", "3.12.0", "3.13.0")
    assert [pin for pin, pythons in accepted.items() if not all(map(pythons.contains, first_patches))] == []
