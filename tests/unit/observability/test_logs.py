"""Lines of a log parse, and say which job, group and episode they are about."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.errors import DeviceError
from slime_plugins.rollout_buffer.observability.logs import LOG_FORMAT_VARIABLE, JsonFormatter
from slime_plugins.rollout_buffer.runner import episode_runner
from slime_plugins.rollout_buffer.storage.store import Store
from tests.unit.runner.test_runner import ScriptedGenerator, run, start

logger = logging.getLogger("slime_plugins.rollout_buffer.tests")


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """What the project logs, as JSON."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger("slime_plugins.rollout_buffer")
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield stream
    root.removeHandler(handler)
    root.setLevel(level)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_one_object_whatever_is_said(written: io.StringIO) -> None:
    logger.info('two\nlines, a "quote" and %s', "\x00 ü")
    try:
        raise ValueError("broken\nhere")
    except ValueError:
        logger.exception("it failed")
    first, second = lines(written)
    assert first["message"] == 'two\nlines, a "quote" and \x00 ü'
    assert (first["level"], first["logger"], first["process"]) == ("INFO", logger.name, os.getpid())
    assert first["time"].endswith("+00:00")
    assert "ValueError: broken\nhere" in second["exception"]


async def test_a_runner_says_of_each_line_what_it_is_about(
    written: io.StringIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode_runner, "RETRY_BASE_S", 0.001)
    buffer = Buffer(Store(tmp_path / "data"))
    job = start(buffer, 2, num_repeat_per_sample=2)

    def play(episode: Any) -> Any:
        logger.info("playing")
        if episode.instance.instance_id == "i0" and episode.attempt == 1:
            return DeviceError("gone")
        return float(episode.slot)

    generator = ScriptedGenerator(play)
    await run(buffer, job, generator)
    buffer.store.close()
    found = lines(written)
    assert {line["job"] for line in found} == {job.job_id}
    played = [line for line in found if line["message"] == "playing"]
    assert [line["uid"] for line in played] == [request.uid for request in generator.requests]
    assert all({"group", "instance", "slot", "attempt"} <= line.keys() for line in played)
    gone = [line for line in found if "device: gone" in line["message"]]
    assert {(line["instance"], line["attempt"]) for line in gone} == {("i0", 1)}
    assert {line["uid"] for line in gone} <= {line["uid"] for line in played}
    closed = {line["group"] for line in found if "of epoch" in line["message"]}
    assert closed == {line["group"] for line in played}


@pytest.mark.parametrize(("environment", "is_json"), [("json", True), ("text", False), ("", False)])
def test_a_process_of_its_own_logs_in_the_format_it_is_told(environment: str, is_json: bool) -> None:
    program = (
        "import logging, warnings\n"
        "from slime_plugins.rollout_buffer.observability.logs import log_fields, set_up_logging\n"
        "set_up_logging()\n"
        "with log_fields(job='j'): logging.getLogger('a').warning('said')\n"
        "from slime_plugins.rollout_buffer.server.gunicorn_config import Logger\n"
        "from gunicorn.config import Config\n"
        "Logger(Config()).info('served')\n"
    )
    variables = {**os.environ, LOG_FORMAT_VARIABLE: environment}
    result = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True)
    said, served = result.stderr.splitlines()
    if is_json:
        assert (json.loads(said)["job"], json.loads(said)["message"]) == ("j", "said")
        assert json.loads(served)["message"] == "served"
    else:
        assert said.endswith(" WARNING a said")
        assert served.endswith("[INFO] served")
