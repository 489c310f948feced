"""The README's commands against a real buffer, as they stand there, also where another job is open."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import requests

from tests.integration.conftest import BufferProcess

pytestmark = pytest.mark.timeout(120)

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
TOKEN = "open-sesame-open-sesame"


def test_the_curls_of_the_readme_bring_an_item_back_with_another_job_open(
    start_buffer: Callable[..., BufferProcess],
) -> None:
    (block,) = re.findall(r"```bash\n(curl .*?)```", README, re.DOTALL)
    buffer = start_buffer()
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


def test_no_token_a_wrong_one_and_another_scheme_are_told_apart(
    start_buffer: Callable[..., BufferProcess], tmp_path: Path
) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    buffer = start_buffer("--token-file", str(tmp_path / "token"))

    def refusal(**headers: str) -> str:
        reply = requests.get(f"{buffer.url}/jobs", headers=headers, timeout=30)
        assert reply.status_code == 401
        return str(reply.json()["error"]["message"])

    assert "no token came" in refusal()
    assert "is not this server's" in refusal(Authorization="Bearer another-token-another")
    assert "must say Bearer TOKEN" in refusal(Authorization=f"Basic {TOKEN}")
    assert requests.get(f"{buffer.url}/jobs", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=30).ok
