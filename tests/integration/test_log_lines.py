"""A server that was told to log JSON writes nothing else, from its first line to its last."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.supervisor.child_processes import free_port


def test_every_line_of_a_gateway_is_json(tmp_path: Path) -> None:
    Store(tmp_path / "data").close()  # as ``serve`` has made it
    command = [sys.executable, "-m", "slime_plugins.rollout_buffer", "gateway", "--data-dir", str(tmp_path / "data")]
    command += ["--port", str(free_port()), "--log-format", "json"]
    said: list[str] = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                said.append(line)
                if "gateway serving on" in line:
                    break
            process.send_signal(signal.SIGTERM)
            said += process.stderr.readlines()
            assert process.wait(20) == 0
        finally:
            process.kill()
    messages = [json.loads(line)["message"] for line in said]
    assert any(message.startswith("gateway serving on http://127.0.0.1:") for message in messages)
    assert messages[-1] == "the gateway stopped"
