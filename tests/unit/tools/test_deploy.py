"""What a host is set up with: the image holds all that the package is made of, the unit calls what there is."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.processes import write_program
from tests.unit.docs.test_docs_drift import mistakes_in

ROOT = Path(__file__).resolve().parents[3]
CONTAINERFILE = (ROOT / "deploy" / "Containerfile").read_text(encoding="utf-8")
UNIT = (ROOT / "deploy" / "rollout-buffer.service").read_text(encoding="utf-8")
PORTS = (ROOT / "deploy" / "rollout-buffer.socket").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def copied() -> set[str]:
    """What of the source tree goes into the image."""
    lines = re.findall(r"^COPY (?!--from)(.+) \S+$", CONTAINERFILE, re.MULTILINE)
    return {word for line in lines for word in line.split()}


def test_the_image_is_built_of_everything_that_the_package_needs() -> None:
    settings = PROJECT["tool"]["setuptools"]
    packages = {name.split(".")[0] for name in settings["packages"]["find"]["include"]}
    modules = {f"{name}.py" for name in settings.get("py-modules", [])}
    wanted = packages | modules | {"pyproject.toml", PROJECT["project"]["readme"], "requirements"}
    assert wanted <= copied()
    assert [name for name in sorted(copied()) if not (ROOT / name).exists()] == []


def test_every_file_that_is_no_python_is_named_for_the_wheel() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["*"]
    files = [path for top in ("slime", "slime_plugins") for path in (ROOT / top).rglob("*") if path.is_file()]
    data = [path.name for path in files if path.suffix not in (".py", ".pyc")]
    assert len(data) > 30
    assert [name for name in data if not any(fnmatch(name, pattern) for pattern in patterns)] == []


def test_the_image_installs_extras_that_there_are() -> None:
    (extras,) = re.findall(r"'\.\[([\w,-]+)\]'", CONTAINERFILE)
    assert set(extras.split(",")) <= set(PROJECT["project"]["optional-dependencies"])


def test_the_image_serves_with_flags_that_there_are() -> None:
    (arguments,) = re.findall(r"^CMD (\[.+\])$", CONTAINERFILE, re.MULTILINE)
    assert mistakes_in(" ".join(["rollout-buffer", *json.loads(arguments)])) == []


def test_an_init_that_the_image_installs_is_process_1_so_that_the_supervisor_can_be_killed() -> None:
    (entry,) = re.findall(r"^ENTRYPOINT (\[.+\])$", CONTAINERFILE, re.MULTILINE)
    assert json.loads(entry) == ["tini", "--", "rollout-buffer"]
    assert re.search(r"apt-get install .*\btini\b", CONTAINERFILE.split("\nFROM ")[-1])


def test_the_unit_serves_with_flags_that_there_are() -> None:
    (command,) = re.findall(r"^ExecStart=\S+/(rollout-buffer .+)$", UNIT.replace("\\\n", " "), re.MULTILINE)
    assert mistakes_in(command) == []


def test_the_unit_with_the_ports_listens_where_the_service_does() -> None:
    (host,), (port,) = (re.findall(rf"--{option} (\S+)", UNIT) for option in ("host", "port"))
    assert re.findall("^ListenStream=(.+)", PORTS, re.MULTILINE) == [f"{host}:{port}"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    """The program of the service is made a file that exists here."""
    program = write_program(tmp_path / "rollout-buffer", "")
    unit = tmp_path / "rollout-buffer.service"
    unit.write_text(re.sub(r"ExecStart=\S+", f"ExecStart={program}", UNIT))
    ports = tmp_path / "rollout-buffer.socket"
    ports.write_text(PORTS)
    command = ["systemd-analyze", "verify", str(unit), str(ports)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
