"""The page on packages of one's own is followed in a fresh environment, and what it installs is listed and works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import requests

from slime_plugins.rollout_buffer.client import RolloutBufferClient
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.supervisor.child_processes import ChildProcess, free_port
from tests.integration.conftest import answers
from tests.processes import write_program
from tests.tutorial_page import read_page
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
NAMES = {("task_types", "dice"), ("scorers", "brief"), ("engines", "my_sglang"), ("commands", "dice-input")}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page's files, after its commands, and in ``venv`` the fresh environment they ran in."""
    folder = tmp_path_factory.mktemp("place")
    page = read_page((ROOT / "docs" / "extending.md").read_text(encoding="utf-8"))
    page.write_into(folder)
    venv.create(folder / "venv")
    site = next((folder / "venv").glob("lib/python*/site-packages"))
    (site / "product.pth").write_text(f"{ROOT}\n{sysconfig.get_path('purelib')}\n")
    programs = folder / "venv" / "bin"
    for name, module in {"rollout-buffer": "slime_plugins.rollout_buffer", "pip": "pip"}.items():
        write_program(programs / name, f'exec {programs}/python -m {module} "$@"')
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(folder)}
    subprocess.run(["bash", "-ec", page.script], cwd=folder, env=environment, check=True, timeout=120)
    return folder


@pytest.mark.timeout(180)
def test_a_package_of_ones_own_is_listed_and_played(place: Path, stand_in_engine: int) -> None:
    findings = {one["name"]: one["state"] for one in json.loads((place / "doctor.json").read_text())["findings"]}
    assert {findings[f"{group} {name}"] for group, name in NAMES} == {"ok"}

    port = free_port()
    program, data = str(place / "venv" / "bin" / "rollout-buffer"), str(place / "data")
    command = [program, "serve", "--port", str(port), "--data-dir", data, "--data-root", str(place)]
    process = ChildProcess("buffer", command, log_file=place / "serve.log")
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: answers(f"{url}/health"), 60, process.log_tail(20))
        client = RolloutBufferClient(url)
        health = wait_until(lambda: "dice" in (told := client.health())["task_types"] and told, 60, "its task types")
        of_package = (one for one in health["extensions"] if one["package"] == "rollout-buffer-dice 0.1.0")
        assert {(one["group"], one["name"]) for one in of_package} == NAMES
        assert requests.get(f"{url}/overview", timeout=10).json()["extensions"] == health["extensions"]

        payload = {
            "task_type": "dice",
            "input_file": str(place / "lines.jsonl"),
            "remote_engine_url": f"http://127.0.0.1:{stand_in_engine}",
            "engine_api": "my_sglang",
            "tokenizer_path": str(DEMO_TOKENIZER_PATH),
            "num_repeat_per_sample": 2,
        }
        job_id = client.start_rollout(payload).job_id
        wait_until(lambda: client.job(job_id)["state"] == "finished", 60, "its end")
    finally:
        process.stop(40)
    rescore = [program, "rescore", job_id, "--with", "brief", "--data-dir", data]
    assert (
        ": 8 trajectories scored, 0 failed"
        in subprocess.run(rescore, capture_output=True, text=True, check=False).stdout
    )


def test_without_the_lab_its_commands_and_devices_say_what_to_install(tmp_path: Path) -> None:
    code = (
        "import importlib.metadata as m, sys\n"
        "real = m.entry_points\n"
        "m.entry_points = lambda **query: [p for p in real(**query) if not p.value.startswith('rollout_buffer_lab')]\n"
        "from slime_plugins.rollout_buffer.cli.app import main\n"
        "main()\n"
    )
    for arguments in (["demo"], ["engine", "--port", "1"], ["doctor", "--json"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        assert "package rollout-buffer-lab, which is not installed: pip install" in done.stderr + done.stdout
