"""``scripts/install_android_world`` makes the environment of the device workers, and says what it lacks."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

from tests.processes import write_program

ROOT = Path(__file__).resolve().parents[3]


def run(*arguments: str, script: str = "install_android_world") -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "scripts" / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_check_without_an_environment_says_how_to_make_one(tmp_path: Path) -> None:
    done = run("--check", str(tmp_path / "none"))
    assert done.returncode == 1
    assert done.stdout == f"missing  {tmp_path}/none: run scripts/install_android_world {tmp_path}/none\n"


def test_the_base_device_is_set_up_with_an_environment_that_is_there(tmp_path: Path) -> None:
    done = run(str(tmp_path / "none"), script="set_up_base_device")
    assert done.returncode == 1
    assert "run scripts/install_android_world first" in done.stderr
    write_program(tmp_path / "some" / "bin" / "python", 'printf "%s\\n" "$@"')
    *_, module = run(str(tmp_path / "some"), script="set_up_base_device").stdout.split()
    assert importlib.util.find_spec(module) is not None


def test_the_package_is_installed_from_a_checkout_with_the_setuptools_that_it_needs(tmp_path: Path) -> None:
    write_program(
        tmp_path / "bin" / "python",
        f"""case "$*" in
*android_world.registry*) test -e {tmp_path}/installed ;;
*--force-reinstall*) cat "$PIP_CONSTRAINT" >{tmp_path}/constraint && echo "$*" >{tmp_path}/installed ;;
esac""",
    )
    done = run(str(tmp_path), "/some/checkout")
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "constraint").read_text() == "setuptools<81\n"
    assert (tmp_path / "installed").read_text().endswith("--no-deps --force-reinstall /some/checkout\n")


def test_a_package_that_cannot_be_fetched_is_named_with_the_command_that_takes_a_checkout(tmp_path: Path) -> None:
    write_program(tmp_path / "bin" / "python", 'case "$*" in *android_world*) exit 1 ;; esac')
    done = run(str(tmp_path))
    assert done.returncode == 1
    assert "missing  android_world.registry" in done.stdout
    assert f"run scripts/install_android_world {tmp_path} CHECKOUT" in done.stdout
