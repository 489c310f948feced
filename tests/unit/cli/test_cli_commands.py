"""Groups, inspect, export, skip-list and prune over a real connection, and what exit codes say."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text
from typer.testing import CliRunner, Result

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.cli.app import app as command_line
from slime_plugins.rollout_buffer.cli.commands import export, trajectories
from slime_plugins.rollout_buffer.cli.transcript_view import message_lines
from slime_plugins.rollout_buffer.client import RolloutBufferClient
from slime_plugins.rollout_buffer.errors import DamagedError
from slime_plugins.rollout_buffer.rules.heartbeats import SUPERVISOR
from slime_plugins.rollout_buffer.serve_settings import ServeSettings
from slime_plugins.rollout_buffer.state.attempts import AttemptFailure
from slime_plugins.rollout_buffer.storage.retention import purge, would_purge
from tests.asgi_client import create_app, serving_wsgi
from tests.support import PNG, PNG_HASH, message_with_image, written

ANSWER = (
    '<thinking>\nI see the app.\n</thinking>\n<tool_call>\n{"name": "tap", "arguments": {}}\n</tool_call>\n'
    "<conclusion>Tapped.</conclusion>"
)
EPISODE: dict[str, Any] = {
    "messages": [message_with_image(), {"role": "assistant", "content": ANSWER}],
    "extra_info": {"reward_breakdown": {"success": 1.0, "steps": 3}},
}


@dataclass(frozen=True, slots=True)
class Served:
    """A served buffer whose job ``j`` has five groups of one: two delivered, two ready, and one that was filtered."""

    url: str
    buffer: Buffer
    data_dir: Path

    @property
    def client(self) -> RolloutBufferClient:
        return RolloutBufferClient(self.url)

    def run(self, *arguments: str, **options: Any) -> Result:
        return CliRunner().invoke(command_line, [*arguments, "--url", self.url], **options)

    def said(self, *arguments: str, **options: Any) -> str:
        """What a command that goes well prints, in one line."""
        result = self.run(*arguments, **options)
        assert result.exit_code == 0, result.output
        return " ".join(result.stdout.split())


def sampled_by(version: int) -> list[dict[str, Any]]:
    return [{"prompt_ids": [1], "output_ids": [2], "finish_reason": "stop", "weight_version": version}]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    app = create_app(ServeSettings(data_dir=tmp_path / "data"))
    buffer: Buffer = app.extensions["rollout_buffer"].buffer
    buffer.beat(SUPERVISOR.name, os.getpid(), {"task_types": {"external": {}}, "broken_generators": {}})
    with serving_wsgi(app) as url:
        yield _filled(Served(url, buffer, tmp_path / "data"))
    buffer.store.close()


def _filled(served: Served) -> Served:
    settings = {"num_repeat_per_sample": 1, "max_weight_version_lag": 0, "max_groups_ahead": None, "note": None}
    served.client.start_rollout({"task_type": "external", "job_id": "j", **settings})
    served.client.write(
        [written("u0", "a", reward=7.0, generations=sampled_by(0)), written("u1", "b", **EPISODE)], job_id="j"
    )
    served.client.write([written(f"u{n}", name) for n, name in ((2, "c"), (3, "d"))], job_id="j")
    served.client.write([written("u4", "e", generations=sampled_by(1))], job_id="j")
    served.client.get_rollout_data(job_id="j", max_groups=2)
    return served


# --- starting --------------------------------------------------------------------------------------------------------


def test_a_job_is_started_from_a_file_and_flags_and_the_same_call_attaches(served: Served, tmp_path: Path) -> None:
    payload = tmp_path / "job.yaml"
    text = '{"task_type": "external", "samples": 4, "sampling_params": {"top_p": 0.9}, "own": 9e-1}'  # a text in YAML
    payload.write_text(text, encoding="utf-8-sig")
    call = ("start", str(payload), "--job-id", "k", "--samples", "2", "--set", "sampling_params.temperature=0.5")
    assert "k: started" in served.said(*call)
    job = served.client.job("k")
    assert (job["group_size"], job["settings"]["own"]) == (2, 0.9)
    assert job["settings"]["sampling_params"] | {"top_p": 0.9, "temperature": 0.5} == job["settings"]["sampling_params"]
    assert "k: exists already and is running; attached to it" in served.said(*call)
    assert json.loads(served.said(*call, "--json"))["attached"] is True
    served.buffer.fail_job(served.buffer.job("k").key, "it broke")
    assert "k: had failed; its failed groups are played again" in served.said(*call)
    assert "k: exists already and is running; attached to it" in served.said(*call)


def test_set_overrides_a_flag_under_its_other_name_and_fills_an_empty_section(served: Served, tmp_path: Path) -> None:
    payload = tmp_path / "job.yaml"
    payload.write_text("task_type: external\nsampling_params:\n", encoding="utf-8")
    settings = ("--set", "num_repeat_per_sample=3", "--set", "samples=4", "--set", "sampling_params.top_p=0.9")
    served.said("start", str(payload), "--job-id", "k", "--samples", "2", *settings)
    job = served.client.job("k")
    assert (job["group_size"], job["settings"]["sampling_params"]["top_p"]) == (4, 0.9)


def test_a_payload_in_json_is_read_as_json(served: Served, tmp_path: Path) -> None:
    payload = tmp_path / "job.json"
    params = {"min_p": 1e-06, "stop": ["😀"]}
    body = {"task_type": "external", "job_id": "k", "num_repeat_per_sample": 1, "sampling_params": params}
    payload.write_text(json.dumps(body, indent="\t"))
    served.said("start", str(payload))
    started = served.client.job("k")["settings"]["sampling_params"]
    assert started | params == started


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--task-type", "external", "--set", "temprature"), "is not KEY=VALUE"),
        (("--task-type", "external", "--set", "num_epochs=2"), "num_epoch"),
        (("--task-type", "external", "--set", "job_id=k", "--set", "job_id.a=1"), "is not a section"),
        ((), "give a payload file"),
        (("FILE",), "does not hold an object"),
    ],
)
def test_a_job_that_cannot_be_started_is_a_wrong_call(
    served: Served, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    (tmp_path / "list").write_text("[1, 2]")
    result = served.run("start", *(str(tmp_path / "list") if one == "FILE" else one for one in arguments))
    assert result.exit_code == 2
    assert says in " ".join(result.stderr.split())


def test_the_folder_of_the_demo_tokenizer_can_be_asked_for() -> None:
    said = CliRunner().invoke(command_line, ["--demo-tokenizer"])
    assert (Path(said.stdout.strip()) / "tokenizer.json").is_file()


# --- looking ---------------------------------------------------------------------------------------------------------


def test_ids_that_look_like_markup_are_printed_unchanged(served: Served, tmp_path: Path) -> None:
    served.client.get_rollout_data(job_id="j", max_groups=1, consumer_id="[/x]", poll_id="p")
    assert "[/x]" in served.said("deliveries", "j")
    delivery_id = json.loads(served.said("deliveries", "j", "--json"))["deliveries"][0]["delivery_id"]
    assert "[b].json" in served.said("replay", delivery_id, "--output", str(tmp_path / "[b].json"))


def test_groups_say_what_became_of_them(served: Served) -> None:
    said = served.said("groups", "j", "--state", "filtered")
    assert "max_weight_version_lag" in said
    assert "delivered" not in said
    page = json.loads(served.said("groups", "j", "--limit", "2", "--json"))
    assert len(page["groups"]) == 2
    assert "no such group" in served.said("groups", "j", "--search", "nothing")
    assert "more with --cursor" in served.said("groups", "j", "--limit", "2")


def failing_job(served: Served, attempts: int, transcript: list[dict[str, Any]]) -> None:
    """Starts job ``f``, whose only slot has ``attempts`` failed attempts."""
    buffer = served.buffer
    served.client.start_rollout({"task_type": "external", "job_id": "f", "instances": [{"instance_id": "x"}],
                                 "num_repeat_per_sample": 1})  # fmt: skip
    job = buffer.job("f")
    fence = buffer.begin_running(job.key)
    (group,) = buffer.open_groups(job.key, after=(-1, -1), limit=1)
    for number in range(attempts):
        attempt = buffer.begin_attempt(fence, group, 0)
        assert attempt is not None
        failure = AttemptFailure(
            code="device", message=f"phone {number} hung", transcript=transcript, traceback="Traceback: my.py, line 3"
        )
        buffer.fail_attempt(fence, group, 0, attempt, failure)


def test_failed_attempts_are_listed_with_their_error_and_what_was_said(served: Served) -> None:
    failing_job(served, 3, [{"role": "user", "content": "Turn it off"}, {"role": "assistant", "content": ANSWER}])
    said = served.said("attempts", "f", "--limit", "2")
    for part in ("device: phone 2 hung", "device: phone 1 hung", "Turn it off", "I see the app.", "more with --cursor",
                 "Traceback: my.py, line 3", "the same traceback as above"):  # fmt: skip
        assert part in said
    assert "The runner's log" not in said  # nothing is played here
    assert "phone 0" not in said
    assert "no such attempt" in served.said("attempts", "f", "--error-code", "engine")
    assert "no attempt of j failed" in served.said("attempts", "j")
    assert served.run("attempts", "nobody").exit_code == 2


def test_failed_attempts_are_read_from_a_data_directory_that_nobody_serves(served: Served) -> None:
    failing_job(served, 1, [{"role": "user", "content": "Turn it off"}])
    over_http = json.loads(served.said("attempts", "f", "--json"))
    result = CliRunner().invoke(command_line, ["attempts", "f", "--json", "--data-dir", str(served.data_dir)])
    assert json.loads(result.stdout) == over_http
    wrong = CliRunner().invoke(command_line, ["attempts", "f", "--data-dir", str(served.data_dir / "none")])
    assert wrong.exit_code == 2
    assert "holds no buffer" in " ".join(wrong.stderr.split())


def test_the_worst_disagreement_of_trainer_and_engine_is_listed(served: Served) -> None:
    assert "no trainer reported" in served.said("mismatch", "j")
    turn = {"prompt_ids": [1], "output_ids": [2, 3], "output_log_probs": [-1.0, -1.0], "finish_reason": "stop"}
    served.client.write([written("gap", "f", generations=[turn])], job_id="j")
    served.client.report_training("j", [{"uid": "gap", "log_probs": [-1.0, -3.5]}])
    said = served.said("mismatch", "j")
    assert "gap" in said
    assert "2.5" in said
    assert json.loads(served.said("mismatch", "j", "--json"))["max"] == 2.5


def test_a_trajectory_is_shown_turn_by_turn(served: Served) -> None:
    said = served.said("inspect", "u1")
    for part in ("I see the app.", '"name": "tap"', "Tapped.", f"[screenshot {PNG_HASH}]", "steps 3", "+1.0000"):
        assert part in said
    assert json.loads(served.said("inspect", "u1", "--json"))["messages"] == served.client.trajectory("u1")["messages"]


@pytest.mark.parametrize(
    ("message", "extra_info", "shown"),
    [
        ({"content": ["a bare text"]}, {}, "a bare text"),
        ({"content": [5, None]}, {}, "5 null"),
        ({"content": [{"type": "tool_use", "name": "tap"}]}, {}, '{"type": "tool_use", "name": "tap"}'),
        ({"content": [{"type": "text", "text": None}]}, {}, '{"type": "text", "text": null}'),
        ({"content": [{"type": "image_url", "image_url": f"sha256:{PNG_HASH}"}]}, {}, f"[screenshot {PNG_HASH}]"),
        ({"content": "", "tool_calls": ["a call"]}, {}, "→ a call"),
        ({"content": "", "tool_calls": [{"function": "f"}]}, {}, "→ f"),
        ({"content": "", "tool_calls": 7}, {}, "→ 7"),
        ({"content": ""}, {"reward_breakdown": [1, 2]}, "reward breakdown [1, 2]"),
        ({"content": ""}, {"reward_breakdown": 0.5}, "reward breakdown 0.5"),
    ],
)
def test_a_trajectory_of_another_form_than_openais_is_shown(
    served: Served, message: dict[str, Any], extra_info: dict[str, Any], shown: str
) -> None:
    odd: dict[str, Any] = {"messages": [{"role": "assistant", **message}], "extra_info": extra_info}
    served.client.write([written("odd", "f", **odd)], job_id="j")
    assert shown in served.said("inspect", "odd")


@pytest.mark.parametrize("name", ["tool_call", "conclusion", None])
def test_a_long_text_or_call_is_shortened_unless_all_is_wanted(name: str | None) -> None:
    long = "x" * 9000
    message: dict[str, Any] = {"role": "assistant", "content": f"<{name}>{long}</{name}>" if name else ""}
    if name is None:
        message = {**message, "tool_calls": [{"function": {"name": "f", "arguments": long}}]}

    def printed(limit: int | None) -> str:
        console = Console(file=io.StringIO(), width=80)
        console.print(*message_lines(message, Text, limit))
        return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]  # it is the StringIO from above

    assert printed(None).count("x") == 9000
    assert 90 <= printed(100).count("x") <= 100
    assert "more characters (--json shows them)" in " ".join(printed(100).split())


def test_weight_versions_are_shown_in_the_order_of_their_numbers() -> None:
    generations: list[dict[str, Any]] = [{"output_ids": [], "weight_version": one} for one in ("10", "9", None, "9")]
    console = Console(file=io.StringIO(), width=200)
    console.print(trajectories._numbers({"generations": generations}))
    said = console.file.getvalue()  # type: ignore[attr-defined]  # it is the StringIO from above
    assert "weight version 9, 10\n" in said


def test_a_screenshot_is_drawn_and_one_that_is_gone_is_named(served: Served) -> None:
    draw = trajectories._Screenshots(served.client, 8)
    console = Console(file=io.StringIO(), force_terminal=True, width=40)
    console.print(draw(f"sha256:{PNG_HASH}"))
    drawn = console.file.getvalue()  # type: ignore[attr-defined]  # it is the StringIO from above
    assert drawn.strip()
    assert "screenshot" not in drawn
    assert "screenshot" in str(draw(f"sha256:{'0' * 64}"))


def test_without_the_extra_for_drawing_screenshots_are_named_and_one_note_says_why(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "textual_image.renderable", None)
    draw = trajectories._Screenshots(served.client, 8)
    assert capsys.readouterr().err == ""
    assert [str(draw(f"sha256:{PNG_HASH}")) for _ in range(2)] == [f"[screenshot {PNG_HASH}]"] * 2
    assert capsys.readouterr().err.count("needs the extra 'terminal'") == 1


def test_status_says_what_a_job_waits_for_and_how_much_of_it_is_closed(served: Served) -> None:
    said = served.said("status")
    assert "slots closed" in said
    assert "to be fetched or acknowledged" in said
    (job,) = json.loads(served.said("status", "--json"))["jobs"]
    assert job["now"]["explanation"] == served.client.explanation("j")["explanation"]


# --- exporting -------------------------------------------------------------------------------------------------------


def exported(served: Served, path: Path, *options: str) -> dict[str, Any]:
    counts: dict[str, Any] = json.loads(served.said("export", "j", "--output", str(path), "--json", *options))
    return counts


def test_exported_lines_are_what_was_delivered_with_the_screenshots_beside_them(served: Served, tmp_path: Path) -> None:
    counts = exported(served, tmp_path / "out.jsonl")
    delivered = {entry["uid"] for entry in served.client.trajectories()["trajectories"] if entry["delivery_id"]}
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {line["uid"] for line in lines} == delivered - {"u0"}  # u0 was filtered, which the delivery only reported
    assert (counts["written"], counts["not_delivered"]) == (2, 3)
    (shot,) = next(line for line in lines if line["uid"] == "u1")["images"]
    assert (tmp_path / shot["path"]).read_bytes() == PNG
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "out.jsonl", "out.jsonl.images"]


def test_an_export_of_nothing_writes_no_file_and_says_what_would(served: Served, tmp_path: Path) -> None:
    failing_job(served, 1, [])
    served.client.write([written("new", "x")], job_id="f")
    call = ("export", "f", "--output", str(tmp_path / "out.jsonl"))
    refused = served.run(*call)
    assert refused.exit_code == 2
    assert "none of 1 trajectories of f was delivered: --all takes them too" in " ".join(refused.stderr.split())
    assert "1 trajectories in" in served.said(*call, "--all")


def test_the_list_of_jobs_has_whole_ids_and_the_first_line_of_each_cause(served: Served) -> None:
    name = "a-name-that-is-rather-long-" + "x" * 30
    served.client.start_rollout({"task_type": "external", "job_id": name})
    served.buffer.fail_job(served.buffer.job(name).key, "it broke in a file\nTraceback")
    listed = served.said("jobs")
    assert name in listed
    assert "it broke in a file" in listed
    assert "Traceback" not in listed


def test_the_list_of_jobs_has_the_reason_why_an_open_job_does_not_progress(served: Served) -> None:
    served.client.start_rollout({"task_type": "external", "job_id": "still", "instances": [{"instance_id": "x"}]})
    assert "no item was stored yet" in served.said("jobs")


def test_lines_with_embedded_screenshots_are_read_without_the_buffer(served: Served, tmp_path: Path) -> None:
    exported(served, tmp_path / "out.jsonl", "--all", "--images", "embed")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    shown = next(line for line in lines if line["uid"] == "u1")["messages"]
    assert shown == served.client.trajectory("u1", images="inline")["messages"]


@pytest.mark.parametrize("images", ["files", "embed", "none"])
def test_parquet_is_read_back(served: Served, tmp_path: Path, images: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(export, "PAGE", 2)
    monkeypatch.setattr(export, "ROWS_AT_ONCE", 2)
    counts = exported(served, tmp_path / "out.parquet", "--format", "parquet", "--all", "--images", images)
    assert counts["written"] == 5
    file = parquet.ParquetFile(tmp_path / "out.parquet")
    assert file.num_row_groups == 3
    rows = {row["uid"]: row for row in file.read().to_pylist()}
    assert set(rows) == {"u0", "u1", "u2", "u3", "u4"}
    assert json.loads(rows["u1"]["messages"]) == served.client.trajectory("u1")["messages"]
    assert rows["u0"]["reward"] == 7.0
    (shot,) = rows["u1"]["images"]
    wanted = {"files": (None, PNG), "embed": (PNG, None), "none": (None, None)}[images]
    there = tmp_path / shot["path"]
    assert (shot["bytes"], there.read_bytes() if there.is_file() else None) == wanted


def test_a_data_set_is_loaded_back_with_its_screenshots(served: Served, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    exported(served, tmp_path / "set", "--format", "datasets", "--images", "embed")
    found = datasets.load_from_disk(str(tmp_path / "set"))
    rows = {row["uid"]: row for row in found}
    assert len(rows) == 2
    assert rows["u1"]["images"][0].size == (1, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "set"]


@pytest.mark.parametrize("file_format", ["parquet", "datasets"])
def test_a_format_without_its_libraries_names_its_extra(
    served: Served, tmp_path: Path, file_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refused = served.run("export", "j", "--format", file_format, "--output", str(tmp_path / "out"))
    assert (refused.exit_code, f"--format {file_format} needs the extra '{file_format}'" in refused.stderr) == (2, True)


def test_an_export_replaces_nothing_unless_told_to(served: Served, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    assert served.run("export", "j", "--output", str(tmp_path / "out")).exit_code == 2
    assert (tmp_path / "out").read_text() == "mine"
    exported(served, tmp_path / "out", "--overwrite")
    assert len((tmp_path / "out").read_text().splitlines()) == 2
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").touch()
    refused = served.run("export", "j", "--output", str(tmp_path / "mine"), "--overwrite")
    assert (refused.exit_code, (tmp_path / "mine" / "notes").exists()) == (2, True)


def test_what_retention_purged_is_counted_and_left_out(served: Served, tmp_path: Path) -> None:
    served.client.get_rollout_data(job_id="j")
    purge(served.buffer.store, now=time.time() + 100, retain_s=50)
    counts = exported(served, tmp_path / "out", "--all")
    assert (counts["written"], counts["purged"], counts["damaged"]) == (0, 5, 0)
    assert served.run("inspect", "u1").stderr.endswith("was purged by retention\n")


def test_an_export_goes_on_after_what_is_damaged(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(*_: object, **__: object) -> None:
        raise DamagedError("other bytes")

    monkeypatch.setattr(RolloutBufferClient, "get_image", damaged)
    assert exported(served, tmp_path / "out")["missing_images"] == 1
    monkeypatch.setattr(RolloutBufferClient, "trajectory", damaged)
    counts = exported(served, tmp_path / "new")
    assert (counts["purged"], counts["damaged"]) == (0, 2)


# --- skip lists ------------------------------------------------------------------------------------------------------


def test_a_skip_list_is_exported_edited_and_lets_the_job_go_on_from_it(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "list.json"
    served.said("skip-list", "export", "j", "--output", str(file))
    told = json.loads(file.read_text())
    assert told["counts"] == {"delivered": 2, "filtered": 1}
    gone = next(name for name in told["skip_instance_ids"] if name != "a")
    edit = ["skip-list", "edit", str(file), "--remove", gone, "--add", "e"]
    assert CliRunner().invoke(command_line, edit).exit_code == 0
    job = served.client.job("j")
    before = job["groups"]
    changed = json.loads(served.said("skip-list", "import", "j", str(file), "--yes", "--json"))
    assert changed["before"] == before
    assert changed["after"] == {**before, "delivered": 1, "ready": 2, "skipped": 1}
    assert [one["job_id"] for one in served.client.jobs()] == ["j"]
    assert served.client.job("j")["settings"] == job["settings"]


@pytest.mark.parametrize(("text", "encoding"), [('["a", 7]', "utf-8"), ("a\n7\n", "utf-8-sig")])
def test_a_skip_list_goes_into_a_start_payload(served: Served, tmp_path: Path, text: str, encoding: str) -> None:
    (tmp_path / "l").write_text(text, encoding=encoding)
    call = ("skip-list", "import", "j", str(tmp_path / "l"), "--output", str(tmp_path / "start.json"))
    served.said(*call)
    assert served.run(*call).exit_code == 2
    served.said(*call, "--overwrite")
    start = json.loads((tmp_path / "start.json").read_text())
    assert start["skip_instance_ids"] == ["7", "a"]
    assert served.client.start_rollout(start).job_id == "j"


@pytest.mark.parametrize("text", ['{"skip_instance_ids": 3}', "[1.5]", "{", None])
def test_a_file_that_is_no_skip_list_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "l").write_text(text)
    result = CliRunner().invoke(command_line, ["skip-list", "edit", str(tmp_path / "l")])
    assert result.exit_code == 2
    assert "Traceback" not in result.output


# --- pruning ---------------------------------------------------------------------------------------------------------


def test_a_dry_run_says_what_a_prune_does_and_changes_nothing(served: Served) -> None:
    served.client.get_rollout_data(job_id="j")
    served.buffer.store._writer.close()  # as a process that ended
    later = time.time() + 100
    would = would_purge(served.buffer.store, now=later, retain_s=50)
    assert would.payloads == 5
    assert served.client.trajectory("u1")["messages"]
    did = purge(served.buffer.store, now=later, retain_s=50)
    assert (did, did.bytes) == (would, would.bytes)
    assert (did.images, did.packs) == (1, 1)
    assert did.bytes > 0


def test_prune_keeps_what_is_young(served: Served) -> None:
    prune = ["prune", "--older-than", "1h", "--data-dir", str(served.data_dir), "--json"]
    result = CliRunner().invoke(command_line, prune)
    assert result.exit_code == 0
    assert json.loads(result.stdout)["payloads"] == 0


# --- how commands end ------------------------------------------------------------------------------------------------


def test_exit_codes_tell_a_wrong_call_from_a_refusal_and_from_silence(served: Served) -> None:
    assert served.run("groups", "j").exit_code == 0
    assert served.run("groups", "other").exit_code == 2
    assert served.run("groups", "j", "--state", "nonsense").exit_code == 2
    assert served.run("cancel", "j").exit_code == 0
    assert served.run("pause", "j").exit_code == 4
    assert CliRunner().invoke(command_line, ["jobs", "--url", "http://127.0.0.1:9"]).exit_code == 3
    served.buffer.remove_heartbeat(SUPERVISOR.name)
    assert served.run("health", "--json").exit_code == 1


def test_health_exits_0_when_the_service_is_degraded_so_that_a_full_disk_restarts_nothing(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.buffer.store, "trouble", lambda: "the disk is full")
    result = served.run("health", "--json")
    assert (result.exit_code, json.loads(result.stdout)["status"]) == (0, "degraded")


def test_buffer_py_starts_the_server_as_slimes_own_does(tmp_path: Path) -> None:
    file = tmp_path / "taken"
    file.touch()
    program = [sys.executable, "buffer.py", "--data-dir", str(file)]
    folder = Path(__file__).resolve().parents[3] / "slime_plugins" / "rollout_buffer"
    done = subprocess.run(program, cwd=folder, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{file} is a file" in done.stderr

    # the user's own PYTHONPATH still counts in the process that serves
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import sys; print('own module', file=sys.stderr)", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(own)}
    done = subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr.count("own module") == 2

    # in an environment without *.pth files, which may import Python's own types before types.py is on the path
    venv.create(tmp_path / "bare", symlinks=True)
    program[0] = str(tmp_path / "bare" / "bin" / "python")
    done = subprocess.run(program, cwd=folder, capture_output=True, text=True, check=False, timeout=60)
    assert "circular import" not in done.stderr
