"""``eval``: what cannot be compared is refused before anything is played; what was played is printed also on errors."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from slime_plugins.rollout_buffer.cli.app import app
from slime_plugins.rollout_buffer.evaluation import evaluate
from slime_plugins.rollout_buffer.evaluation.report import TaskRecord, build_report

PLAYED = {"instance_id": "a", "played": 2, "solved": 1}


def compared(folder: Path, report: Any) -> Result:
    """Evaluates the task ``a`` with an engine that does not answer."""
    (folder / "tasks.jsonl").write_text('{"instance_id": "a", "prompt": "1+1", "label": "2"}\n')
    (folder / "earlier.json").write_text(json.dumps(report))
    files = ("--tasks", f"{folder}/tasks.jsonl", "--compare", f"{folder}/earlier.json", "--output", f"{folder}/out")
    call = ["eval", "--engine-url", "http://127.0.0.1:9", "--task-type", "math", *files, "--json"]
    return CliRunner().invoke(app, call)


@pytest.mark.parametrize(
    ("report", "says"),
    [
        ({"instances": [{"instance_id": "a"}]}, "is no report of an evaluation: it has no 'played'"),
        ({"instances": [{**PLAYED, "played": "2"}]}, "is no report of an evaluation: "),
        ([], "is no report of an evaluation: "),
        ({"instances": [{**PLAYED, "instance_id": "b"}]}, "has played none of these tasks"),
        ({"instances": [{**PLAYED, "played": 0}]}, "has played none of these tasks"),
    ],
)
def test_a_report_that_cannot_be_compared_is_refused_before_the_engine_is_asked(
    tmp_path: Path, report: Any, says: str
) -> None:
    ended = compared(tmp_path, report)
    assert ended.exit_code == 2
    assert says in " ".join(ended.stderr.split())
    assert not (tmp_path / "out").exists()


def test_what_was_played_is_printed_also_if_no_common_task_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = {"instances": [{**PLAYED, "played": 0, "solved": 0}]}
    module = importlib.import_module("slime_plugins.rollout_buffer.cli.commands.eval")
    monkeypatch.setattr(module, "_measure", lambda *_arguments, **_options: report)
    ended = compared(tmp_path, {"instances": [PLAYED]})
    printed = json.loads(ended.stdout)
    assert (printed["error"]["detail"], ended.exit_code) == ({"report": report}, 2)
    assert "no task in common that both played" in " ".join(ended.stderr.split())


def test_an_evaluation_whose_job_failed_prints_what_was_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = build_report(
        [TaskRecord(instance_id="a")], [], samples_per_task=7, ks=[], failed_attempts={}, complete=False
    )
    report = {**counted, "work": {"task_type": "math", "model": "m"}}

    def fail(*_arguments: object) -> None:
        raise evaluate.EvaluationError("the job is failed: why", {"report": report})

    monkeypatch.setattr(evaluate, "evaluate", fail)
    call = ["eval", "--engine-url", "http://127.0.0.1:9", "--task-type", "math", "--tasks", "t.jsonl"]
    ended = CliRunner().invoke(app, [*call, "--output", str(tmp_path)])
    assert ended.exit_code == 1
    assert "7 slots not played" in ended.stdout
    assert "the job is failed: why" in ended.stderr
