"""The commands of the README and of the page on operations against a real buffer, as they stand there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.supervisor.child_processes import free_port
from tests.integration.conftest import BufferProcess
from tests.tutorial_page import read_page
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
OPERATIONS = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")


def test_the_curls_of_the_readme_bring_an_item_back_with_another_job_open(
    served: BufferProcess,
) -> None:
    (block,) = re.findall(r"```bash\n(curl .*?)```", README, re.DOTALL)
    buffer = served
    buffer.client.start_rollout({"task_type": "external", "num_repeat_per_sample": 1, "job_id": "another"})

    commands = re.split(r"\n(?=curl)", block.strip())
    said = [
        json.loads(
            subprocess.run(
                ["bash", "-c", command.replace("localhost:8889", f"127.0.0.1:{buffer.port}")],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
        for command in commands
    ]

    assert len(said) == 3
    assert said[0]["job_id"] == "mine"
    assert said[1]["success"] is True
    assert said[2]["data"]["data"][0]["uid"] == "1"


def test_the_quickstart_of_an_own_engine_starts_a_job_when_it_is_pasted_at_once(
    stand_in_engine: int, tmp_path: Path
) -> None:
    port, text = free_port(), (ROOT / "docs" / "generators.md").read_text(encoding="utf-8")
    (generator, *_) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (block,) = re.findall(r"```bash\n(echo .*?)```", text, re.DOTALL)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "length.py").write_text(generator, encoding="utf-8")
    here = block.replace(":30000", f":{stand_in_engine}").replace("/models/Qwen3-4B", str(DEMO_TOKENIZER_PATH))
    here = here.replace("/models ", f"{DEMO_TOKENIZER_PATH} ").replace("serve ", f"serve --port {port} ")
    environment = {
        "HOME": str(tmp_path),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "ROLLOUT_BUFFER_URL": f"http://127.0.0.1:{port}",
    }
    said = subprocess.run(
        ["timeout", "60", "bash", "-c", f"trap 'kill $(jobs -p); wait' EXIT\nset -e\n{here}"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (said.returncode, said.stdout.count(": started.")) == (0, 1), said.stderr


def test_the_job_of_the_operations_page_plays_from_its_two_files(
    start_buffer: Callable[..., BufferProcess], stand_in_engine: int, tmp_path: Path
) -> None:
    page = read_page(OPERATIONS)
    page.write_into(tmp_path)
    job = tmp_path / "job.yaml"
    here = job.read_text(encoding="utf-8").replace(":30000", f":{stand_in_engine}")
    job.write_text(here.replace("/data/Qwen3-4B", str(DEMO_TOKENIZER_PATH)), encoding="utf-8")
    buffer = start_buffer()
    commands = page.script.splitlines()
    start, status, trajectories = commands[(at := commands.index("rollout-buffer start job.yaml")) : at + 3]

    def typed(line: str) -> str:
        command = [sys.executable, "-m", "slime_plugins.rollout_buffer", *line.split()[1:], "--url", buffer.url]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    assert "first: started" in typed(start)
    wait_until(lambda: buffer.client.job("first")["state"] in ("finished", "failed"), 60, "end of the job")
    assert "finished" in typed(status)
    assert len(re.findall(r"\bfirst\b", typed(trajectories))) == 8
