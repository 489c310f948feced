"""What a command that fails prints: one sentence with what to do, and JSON where that was asked for; its exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner, Result
from werkzeug.wrappers import Request, Response

from slime_plugins.rollout_buffer.cli.app import app
from slime_plugins.rollout_buffer.cli.commands import jobs
from slime_plugins.rollout_buffer.cli.common import report_errors
from slime_plugins.rollout_buffer.install_hints import install_lab
from tests.asgi_client import serving_wsgi

NOBODY = "http://127.0.0.1:9"
ASKING = [
    ["jobs"],
    ["status"],
    ["status", "--watch"],
    ["cancel", "j"],
    ["pause", "j"],
    ["resume", "j"],
    ["deliveries", "j"],
    ["replay", "d", "--output", "o"],
    ["trajectories"],
    ["health"],
    ["groups", "j"],
    ["inspect", "u"],
    ["export", "j", "--output", "o"],
    ["skip-list", "export", "j"],
]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize("command", ASKING, ids=" ".join)
def test_a_buffer_that_does_not_answer_is_one_sentence_and_code_3(command: list[str]) -> None:
    result = run(*command, "--url", NOBODY, "--json")
    assert result.exit_code == 3
    assert "Traceback" not in result.output
    (line,) = result.stderr.splitlines()
    assert line == (
        f"rollout-buffer: no answer from the buffer at {NOBODY}: Connection refused. "
        "Is `rollout-buffer serve` up? Give --url when it is elsewhere."
    )
    error = json.loads(result.stdout)["error"]
    assert (error["code"], f"rollout-buffer: {error['message']}") == ("no_answer", line)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["groups", "j", "--state", "x"], "--state"),
        (["groups", "j", "--limit", "0"], "--limit"),
        (["groups"], "job_id"),
        (["no-such-command"], "no-such-command"),
        (["export", "j"], "--output"),
    ],
)
def test_a_wrong_option_is_told_in_json_as_well(arguments: list[str], says: str) -> None:
    result = run(*arguments, "--json")
    assert result.exit_code == 2
    error = json.loads(result.stdout)["error"]
    assert error["code"] == "usage"
    assert says in error["message"]
    assert run(*arguments).stdout == ""


@pytest.fixture
def other_server() -> Iterator[str]:
    """The URL of an HTTP server that is no buffer."""

    @Request.application
    def welcome(request: Request) -> Response:
        return Response("<html>welcome</html>", 404 if request.path == "/jobs/j" else 200)

    with serving_wsgi(welcome) as url:
        yield url


def test_a_server_that_answers_without_tls_is_not_asked_whether_it_is_up(other_server: str) -> None:
    result = run("health", "--url", other_server.replace("http:", "https:"))
    assert result.exit_code == 3
    assert result.stderr.endswith("it answers without TLS: its address begins with http, not https\n")


def test_another_server_is_not_taken_for_a_buffer(other_server: str) -> None:
    result = run("jobs", "--url", other_server)
    assert result.exit_code == 1
    assert "no rollout buffer" in result.stderr
    result = run("status", "j", "--url", other_server)
    assert result.exit_code == 2
    assert "the server answered HTTP 404 (<html>welcome</html>): is it a rollout buffer?" in result.stderr


def test_an_error_of_a_users_code_is_not_blamed_on_the_address(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), report_errors():
        raise ValueError("mine")
    assert capsys.readouterr().err == "rollout-buffer: mine\n"


def test_a_model_is_not_served_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not installed
    server = "rollout_buffer_lab.embedded_engine.server"
    monkeypatch.delitem(sys.modules, server, raising=False)
    monkeypatch.delattr(server, raising=False)  # where it is installed, an earlier test may have imported it
    result = run("engine", "--model", str(tmp_path))
    assert result.exit_code == 1
    assert install_lab("embedded-engine") in result.stderr


def shell(line: str) -> subprocess.CompletedProcess[str]:
    program = f"{sys.executable} -m slime_plugins.rollout_buffer"
    script = line.replace("@", program)
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, timeout=150)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_an_output_that_is_closed_full_or_read_no_further_leaves_no_traceback() -> None:
    closed = shell("@ skip-list edit <(echo a) >&-")
    assert (closed.returncode, closed.stderr) == (0, "")
    full = shell("@ skip-list edit <(echo a) --json > /dev/full")
    assert full.returncode == 1
    assert full.stderr == "rollout-buffer: the output cannot be written: No space left on device\n"
    cut = shell("set -o pipefail; @ skip-list edit <(seq 100000) --json | head -1")
    assert cut.stdout.startswith("{")
    assert cut.stderr == ""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_bash_completes_commands_and_options() -> None:
    source = 'eval "$(_ROLLOUT_BUFFER_COMPLETE=source_bash rollout-buffer)"; '
    asked = "COMP_WORDS=(rollout-buffer skip); COMP_CWORD=1; _rollout_buffer_completion rollout-buffer; "
    found = shell(f"PATH={Path(sys.executable).parent}:$PATH; {source}{asked}echo ${{COMPREPLY[*]}}")
    assert found.stdout.split() == ["skip-list"], found.stderr


def test_watching_in_json_is_one_line_a_second(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    ticks: list[float] = []

    def sleep(seconds: float) -> None:
        ticks.append(seconds)
        if len(ticks) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("slime_plugins.rollout_buffer.cli.commands.jobs.time.sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        jobs._print_json(lambda: [{"job_id": "j"}], watch=True)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [{"jobs": [{"job_id": "j"}]}] * 3
    assert ticks == [1.0] * 3


def test_watching_in_a_pipe_prints_the_status_every_second(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(jobs, "console", Console(width=100))
    monkeypatch.setattr("slime_plugins.rollout_buffer.cli.commands.jobs.time.sleep", lambda _: None)
    monkeypatch.setattr(jobs, "draw_job_status", ["first", "second"].__getitem__)
    rounds = iter([0, 1])

    def read() -> Any:
        for found in rounds:
            return found
        raise KeyboardInterrupt

    jobs._watch(read)
    assert capsys.readouterr().out == "first\nsecond\n"


@pytest.mark.parametrize("command", ["serve", "prune", "gateway"])
def test_a_damaged_database_is_one_sentence_with_what_to_do(tmp_path: Path, command: str) -> None:
    (tmp_path / "buffer.sqlite3").write_bytes(b"this is no database" * 1000)
    arguments = {"prune": ["--older-than", "1d"], "gateway": ["--port", "0"], "serve": ["--port", "18889"]}[command]
    program = [sys.executable, "-m", "slime_plugins.rollout_buffer", command, "--data-dir", str(tmp_path), *arguments]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 4
    assert "Traceback" not in done.stderr
    assert "docs/troubleshooting.md says what can be saved" in done.stderr
