"""``rollout-buffer eval`` as its users run it: killed, stopped, resumed, over both kinds of engine."""

from __future__ import annotations

import functools
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollout_buffer_lab.mock_trainer import trainer_args
from slime.rollout.agent_rollout import generate_rollout
from slime_plugins.rollout_buffer.cli.app import app
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.reporting.inspection import Inspection
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.supervisor.child_processes import ChildProcess
from slime_plugins.rollout_buffer.wire.query_params import TrajectoryFilters
from tests.integration.conftest import ROLLOUT_BUFFER, BufferProcess, scripted_engine
from tests.processes import children_of, process_table
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(240)

MOODY = '''
"""A generator of tests: one task breaks until it is mended, one on its first try; the others earn the slot's parity."""

from pathlib import Path

from slime_plugins.rollout_buffer.errors import DeviceError
from slime_plugins.rollout_buffer.types import Outcome, StopReason, Trajectory

TASK_TYPE = "moody"


class Moody:
    async def start(self, context): ...

    async def play(self, episode):
        mood = episode.instance.data["mood"]
        broken = mood == "broken" and not Path(__file__).with_name("mended").exists()
        if broken or (mood == "shaky" and episode.attempt == 1):
            raise DeviceError("it hangs")
        return Trajectory(
            uid=episode.uid,
            instance_id=episode.instance.instance_id,
            messages=[{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}],
            reward=float(episode.slot % 2) * 5,
            outcome=Outcome.COMPLETED,
            stop_reason=StopReason.STOP,
            extra_info={"success": episode.slot % 2 == 1},
        )

    async def close(self): ...


def create_generator():
    return Moody()
'''


def evaluation(engine: str, output: Path, *arguments: str) -> list[str]:
    return [*ROLLOUT_BUFFER, "eval", "--engine-url", engine, "--output", str(output), *arguments]


def run(command: list[str], expected: int = 0) -> tuple[dict[str, Any], str]:
    """Runs a command to its end; returns the report that it printed, and its standard error."""
    ended = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=180, check=False)
    assert ended.returncode == expected, ended.stderr
    return json.loads(ended.stdout) if ended.stdout else {}, " ".join(ended.stderr.split())


def sums(folder: Path, count: int) -> Path:
    path = folder / "sums.jsonl"
    lines = [{"instance_id": f"sum-{i}", "prompt": f"What is {i} + 7?", "label": str(i + 7)} for i in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def played_in(output: Path) -> dict[tuple[str, int], str]:
    """The trajectories in the store of a stopped evaluation: uid by slot."""
    store = Store(output / "buffer")
    try:
        with store.read() as connection:
            rows = connection.execute("SELECT instance_id, slot, uid FROM trajectories").fetchall()
    finally:
        store.close()
    assert max(Counter((row[0], row[1]) for row in rows).values(), default=1) == 1
    return {(row[0], row[1]): row[2] for row in rows}


@pytest.fixture
def slow_engine(tmp_path: Path) -> Iterator[str]:
    with scripted_engine(tmp_path, "--latency-s", "0.4") as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def skilled_engine(tmp_path: Path) -> Iterator[str]:
    with scripted_engine(tmp_path, "--skill", "1") as port:
        yield f"http://127.0.0.1:{port}/v1"


def kill(process: ChildProcess, *, with_children: bool) -> None:
    """Sends SIGKILL to the command, and with ``with_children`` also to the buffer that it started."""
    for pid in [process.pid, *(children_of(process.pid) if with_children else [])]:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: process.exit_code() is not None, what="its death")


def played_so_far(output: Path) -> int:
    """Counts the stored trajectories while the evaluation runs."""
    database = output / "buffer" / "buffer.sqlite3"
    if not database.exists():
        return 0
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        try:
            return int(connection.execute("SELECT count(*) FROM trajectories").fetchone()[0])
        except sqlite3.OperationalError:
            return 0


def has_played(output: Path, least: int) -> bool:
    return played_so_far(output) >= least


@pytest.mark.slow
def test_an_evaluation_that_is_killed_or_interrupted_goes_on_and_plays_no_slot_twice(
    slow_engine: str, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    arguments = ["--task-type", "math", "--tasks", str(sums(tmp_path, 5)), "--samples-per-task", "4"]
    command = evaluation(slow_engine, output, *arguments, "--concurrency", "2")
    earlier: dict[tuple[str, int], str] = {}
    for least, with_children in ((2, False), (6, True)):
        process = ChildProcess("eval", command, log_file=tmp_path / "eval.log")
        wait_until(functools.partial(has_played, output, least), 120, f"{least} trajectories")
        kill(process, with_children=with_children)
        assert not (output / "report.json").exists()
        now = wait_for_the_buffer_and_read(output)
        assert earlier.items() <= now.items()
        assert least <= len(now) < 20
        earlier = now
    heeding = ["env", "--default-signal=SIGINT", *command]  # a shell's background jobs ignore SIGINT
    process = ChildProcess("eval", heeding, log_file=tmp_path / "eval.log")
    wait_until(functools.partial(has_played, output, len(earlier) + 1), 120, "another trajectory")
    os.kill(process.pid, signal.SIGINT)
    wait_until(lambda: process.exit_code() is not None, 60, what="its end")
    assert process.exit_code() == 1
    assert "the same command continues" in " ".join(process.log_tail(30).split())
    report = json.loads((output / "report.json").read_text())
    assert not report["complete"]
    assert len(earlier) < report["slots"]["played"] == len(played_in(output)) < 20
    _, said = run([*command, "--temperature", "0.1"], expected=2)
    assert "belongs to another evaluation" in said
    assert "sampling_params" in said
    report, _ = run(command)
    assert report["complete"]
    assert report["slots"] == {"planned": 20, "played": 20, "not_played": 0}
    entries = [(one["instance_id"], attempt) for one in report["instances"] for attempt in one["attempts"]]
    attempts = {(name, attempt["slot"]): attempt["uid"] for name, attempt in entries}
    assert len(attempts) == 20
    assert earlier.items() <= attempts.items()
    assert attempts == played_in(output)


def wait_for_the_buffer_and_read(output: Path) -> dict[tuple[str, int], str]:
    serving = f"--data-dir {output / 'buffer'}"
    wait_until(lambda: not any(serving in line for _, _, line in process_table()), 60, "end of its processes")
    return played_in(output)


@pytest.mark.large
@pytest.mark.slow
def test_what_breaks_is_tried_again_and_never_the_policys_failure(stand_in_engine: int, tmp_path: Path) -> None:
    (tmp_path / "generators").mkdir()
    (tmp_path / "generators" / "moody.py").write_text(MOODY, encoding="utf-8")
    tasks = tmp_path / "tasks.jsonl"
    moods = {"a": "good", "b": "shaky", "c": "broken"}
    lines = [
        {"instance_id": name, "mood": mood, "metadata": {"task_name": mood, "app": "x", "tags": ["t", mood]}}
        for name, mood in moods.items()
    ]
    tasks.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    arguments = ["--task-type", "moody", "--generator-dir", str(tmp_path / "generators"), "--group-by", "tags"]
    arguments += ["--tasks", str(tasks), "--samples-per-task", "4", "--max-attempts", "2", "--pass-k", "3"]
    command = evaluation(f"http://127.0.0.1:{stand_in_engine}", tmp_path / "out", *arguments)
    report, _ = run(command)
    assert report["complete"]
    assert report["slots"] == {"planned": 12, "played": 8, "not_played": 4}
    assert report["failed_tries"] == {"device": 4 + 2 * 4}
    assert report["success"]["value"] == 0.5
    assert report["success_failures_as_zero"]["value"] == pytest.approx(1 / 3)
    assert report["pass_at_k"] == {"3": {**report["pass_at_k"]["3"], "value": 1.0, "tasks": 2, "left_out": 1}}
    assert report["by_task"]["broken"]["success"] is None
    assert report["by_tags"]["t"]["slots"]["planned"] == 12
    assert set(report["by_app"]) == {"x"}
    (tmp_path / "generators" / "mended").touch()
    assert run(command)[0]["slots"] == report["slots"]
    retried, _ = run([*command, "--retry-given-up"])
    assert retried["slots"] == {"planned": 12, "played": 12, "not_played": 0}
    assert retried["failed_tries"] == report["failed_tries"]
    before, after = ({one["instance_id"]: one["attempts"] for one in each["instances"]} for each in (report, retried))
    assert {name: after[name] for name in "ab"} == {name: before[name] for name in "ab"}


@pytest.mark.large
@pytest.mark.slow
def test_an_openai_compatible_server_plays_phones_and_edited_contexts(skilled_engine: str, tmp_path: Path) -> None:
    url = skilled_engine
    settings = ["--api", "openai", "--android", "num_workers=2", "--android", "device_pool=local"]
    demo_tasks = Path("slime_plugins/rollout_buffer/assets/demo_android_world.jsonl").resolve()
    report, _ = run(evaluation(url, tmp_path / "phones", *settings, "--tasks", f"{demo_tasks}@[0:3]"))
    assert report["success"]["value"] == 1.0, report
    assert set(report["by_app"]) == {"clock", "settings"}
    assert report["work"]["model"] == "stand-in"
    documents = tmp_path / "documents.jsonl"
    make = [sys.executable, "-m", "rollout_buffer_lab.documents"]
    subprocess.run([*make, "--output", str(documents), "--lines", "2", "--max_tokens", "6000"], check=True, timeout=60)
    arguments = ["--task-type", "statelm", "--tasks", str(documents), "--option", 'statelm={"max_model_length": 16384}']
    report, _ = run(evaluation(url, tmp_path / "documents", "--api", "openai", *arguments))
    assert report["slots"]["played"] == 2
    assert report["success"]["value"] == 1.0, report
    store = Store(tmp_path / "documents" / "buffer")
    inspection = Inspection(store)
    keys = inspection.keys_before(TrajectoryFilters(job_id=report["job_id"]), None, 100)
    items = [json.loads(inspection.payload(key)) for key in keys]
    store.close()
    assert items
    assert not any(item.get("generations") for item in items)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--engine-url", "http://127.0.0.1:9"], 1, "the engine does not answer"),
        (["--task-type", "math", "--engine-url", "{engine}"], 2, "--tasks is missing"),
        (["--engine-url", "{engine}", "--tasks", "nowhere.jsonl"], 2, "nowhere.jsonl"),
        (["--engine-url", "{engine}", "--samples-per-task", "2", "--pass-k", "4"], 2, "--pass-k"),
        (["--engine-url", "{engine}", "--option", "nothing"], 2, "KEY=VALUE"),
        (["--engine-url", "{engine}", "--option", "num_epoch=2"], 2, "--option may not set num_epoch"),
        (["--engine-url", "{engine}", "--compare", "nowhere.json"], 2, "no report"),
        (["--engine-url", "{engine}/v1", "--api", "openai", "--tokenizer", "."], 2, "--tokenizer is for --api sglang"),
        (["--engine-url", "{engine}", "--buffer-url", "http://127.0.0.1:9"], 3, "no answer from the buffer"),
    ],
)
def test_a_wrong_call_of_eval_ends_with_a_sentence_and_its_exit_code(
    stand_in_engine: int, tmp_path: Path, arguments: list[str], code: int, says: str
) -> None:
    engine = f"http://127.0.0.1:{stand_in_engine}"
    given = [argument.format(engine=engine) if "{engine}" in argument else argument for argument in arguments]
    ended = CliRunner().invoke(app, ["eval", *given, "--output", str(tmp_path / "out"), "--json"])
    assert ended.exit_code == code
    assert says in " ".join(ended.stderr.split())


@pytest.mark.slow
def test_an_evaluation_in_a_training_counts_what_could_not_be_played(
    start_buffer: Callable[..., BufferProcess], stand_in_engine: int, tmp_path: Path
) -> None:
    (tmp_path / "generators").mkdir()
    (tmp_path / "generators" / "moody.py").write_text(MOODY, encoding="utf-8")
    moods = {"a": "good", "b": "shaky", "c": "broken"}
    lines = [json.dumps({"instance_id": name, "mood": mood}) for name, mood in moods.items()]
    (tmp_path / "held-out.jsonl").write_text("\n".join(lines), encoding="utf-8")
    buffer = start_buffer("--generator-dir", str(tmp_path / "generators"))
    args = trainer_args(
        rollout_buffer_url=buffer.url,
        rollout_task_type="moody",
        sglang_router_ip="127.0.0.1",
        sglang_router_port=stand_in_engine,
        hf_checkpoint=str(DEMO_TOKENIZER_PATH),
        eval_prompt_data=["held-out", str(tmp_path / "held-out.jsonl")],
        n_samples_per_eval_prompt=4,
        rollout_buffer_options={"max_attempts": 2, "reward_range": [0, 5], "min_timeout_group_size_ratio": 1},
    )
    output = generate_rollout(args, 3, None, evaluation=True)
    assert output.data["held-out"]["rewards"] == [0.0, 5.0] * 4
    assert output.metrics == {"eval/held-out-left_out": 4, "eval/held-out-success": 0.5}
