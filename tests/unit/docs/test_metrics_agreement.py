"""After a run with failures, everybody who shows a job says the same of it, number by number.

``/metrics``, ``/jobs/<id>``, the dashboard's overview and series, and what the trainer logs are five views of one
store. One job is written from outside; the other is played by a runner whose episodes fail in every typed way.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from flask import Flask, request
from flask.testing import FlaskClient
from prometheus_client.parser import text_string_to_metric_families

from rollout_buffer_lab.mock_trainer import MockTrainer, trainer_args
from slime.rollout import agent_rollout
from slime.rollout.agent_rollout import reset_jobs
from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.errors import DeviceError, EngineError, EnvironmentSetupError
from slime_plugins.rollout_buffer.generator.base_generator import GeneratorContext
from slime_plugins.rollout_buffer.reporting.job_description import describe_job
from slime_plugins.rollout_buffer.reporting.prometheus import METRICS
from slime_plugins.rollout_buffer.rules.heartbeats import SUPERVISOR
from slime_plugins.rollout_buffer.runner.job_runner import JobRunner
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.trainer.metrics import job_metrics
from slime_plugins.rollout_buffer.trainer.tracking import STEP
from slime_plugins.rollout_buffer.types import EpisodeRequest, Generation, Outcome, StopReason, Trajectory
from tests.asgi_client import serving_wsgi
from tests.support import plugin_of, poll, start_external, start_played, trajectory, write, written
from tests.wandb_runs import logged_in, offline_run

COUNTED_BY_OTHERS = ("groups", "group_causes", "deliveries", "jobs", "attempts")


class FailingGenerator:
    """Plays instance by instance: one always breaks, one breaks twice, one has equal rewards, others go well."""

    async def start(self, context: GeneratorContext) -> None:
        return None

    async def play(self, episode: EpisodeRequest) -> Trajectory:
        await asyncio.sleep(0)
        name, attempt = episode.instance.instance_id, episode.attempt
        if name == "i0":
            raise (DeviceError, EngineError)[episode.slot]("it broke")
        if name == "i1" and attempt <= 2:
            raise (EnvironmentSetupError("no such app") if attempt == 2 else ValueError("a defect"))
        return trajectory_of(episode)

    async def close(self) -> None:
        return None


def trajectory_of(episode: EpisodeRequest) -> Trajectory:
    number = int(episode.instance.instance_id[1:])
    cut = number == 3 and episode.slot == 0
    reward = 0.25 if number == 2 else episode.slot + number / 8
    generation = Generation(prompt_ids=(1,), output_ids=(2, 3), weight_version=str(9 - number))
    return trajectory(
        episode.uid,
        episode.instance.instance_id,
        reward,
        outcome=Outcome.TRUNCATED if cut else Outcome.COMPLETED,
        stop_reason=StopReason.MAX_TOKENS if cut else StopReason.STOP,
        generations=(generation,),
        extra_info={"success": episode.slot == 1, "turns": 3},
    )


PLAYED = [f"i{number}" for number in range(6)]


async def play_with_failures(buffer: Buffer) -> JobRecord:
    job = start_played(buffer, PLAYED, task_type="scripted", job_id="played/1", num_process=2)
    await play(buffer, job)
    return job


async def play(buffer: Buffer, job: JobRecord) -> None:
    plugin = plugin_of("scripted", FailingGenerator, reward_range=(0.0, 2.0))
    await asyncio.wait_for(JobRunner(buffer, job.key, plugin, buffer_url="http://127.0.0.1:9").run(), 50)


WRITTEN = list("abcdef")


def write_with_failures(buffer: Buffer) -> JobRecord:
    """Six groups: valid with a late member, equal rewards, out of range, valid, half full, empty."""
    job = start_external(buffer, 2, tuple(WRITTEN), job_id="written")
    fill(buffer, job)
    return job


def fill(buffer: Buffer, job: JobRecord) -> None:
    for name, first, second in (("a", 0.0, 1.0), ("b", 0.5, 0.5), ("c", 0.0, 9.0), ("d", 1.0, 0.0)):
        version = [{"prompt_ids": [1], "output_ids": [2], "weight_version": str(ord(name))}]
        write(buffer, job, written(f"{name}1", name, first, generations=version))
        write(buffer, job, written(f"{name}2", name, second, extra_info={"success": second > 0.6}))
    write(buffer, job, written("a3", "a"), written("e1", "e"))


def scrape(client: FlaskClient) -> dict[str, dict[tuple[str, ...], float]]:
    labels = {metric.name: metric.labels for metric in METRICS}
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            key = tuple(sample.labels[label] for label in labels[sample.name])
            found.setdefault(sample.name, {})[key] = sample.value
    return found


def under_trainer_names(client: FlaskClient, job_id: str) -> dict[str, float]:
    """What ``/metrics`` says of a job, by the rule: slashes for underscores, label values as last parts."""
    named = {}
    for name, values in scrape(client).items():
        for key, value in values.items():
            if key[:1] == (job_id,):
                named["/".join([*name.split("_"), *filter(None, key[2:])])] = value
    return named


def summed(series: dict[str, Any]) -> dict[str, float]:
    """What the buckets of a series come to over the whole job."""
    columns = series["columns"]
    total = {name: sum(values) for name, values in columns.items() if name in ("completed", "truncated", "aborted")}
    for name in ("episodes", "failed", "groups_valid", "groups_filtered", "groups_failed", "deliveries"):
        total[name] = sum(columns[name])
    for name, pick in (("reward_min", min), ("reward_max", max), ("behind_max", max), ("wait_max", max)):
        known = [value for value in columns[name] if value is not None]
        if known:
            total[name] = pick(known)
    for name, weight in (("reward_mean", "episodes"), ("wait_mean", "deliveries")):
        pairs = [(v, w) for v, w in zip(columns[name], columns[weight], strict=True) if v is not None]
        if pairs:
            total[name] = sum(v * w for v, w in pairs) / sum(w for _, w in pairs)
    return total


def check_agreement(client: FlaskClient, job_id: str) -> None:
    path = job_id.replace("/", "%2F")
    job = client.get(f"/jobs/{path}").get_json()
    prometheus, trainer = under_trainer_names(client, job_id), job_metrics(job)
    assert {name: prometheus[name] for name in trainer} == trainer
    logged_by_nobody = {f"rollout/buffer/{name.replace('_', '/')}/" for name in COUNTED_BY_OTHERS}
    ages = {"rollout/buffer/poll/age/seconds", "rollout/buffer/oldest/ready/group/age/seconds"}
    left = {name for name in prometheus.keys() - trainer.keys() if not name.startswith(tuple(logged_by_nobody))}
    assert left <= ages
    overview = next(one for one in client.get("/overview").get_json()["jobs"] if one["job_id"] == job_id)
    assert (overview["slots"], overview["groups"]) == (job["slots"], job["groups"])
    assert {state: prometheus[f"rollout/buffer/groups/{state}"] for state in job["groups"]} == job["groups"]
    assert prometheus[f"rollout/buffer/jobs/{overview['state']}"] == 1
    check_series(client.get(f"/jobs/{path}/series").get_json(), job, prometheus)


def check_series(series: dict[str, Any], job: dict[str, Any], prometheus: dict[str, float]) -> None:
    total, groups, measures = summed(series), job["groups"], job["measures"]
    outcomes = {name: total[name] for name in ("completed", "truncated", "aborted") if total[name]}
    assert outcomes == job["outcomes"]
    assert total["episodes"] == sum(job["outcomes"].values())
    assert total["failed"] == job["attempts"].get("failed", 0)
    assert total["groups_valid"] == groups["ready"] + groups["leased"] + groups["delivered"]
    assert (total["groups_filtered"], total["groups_failed"]) == (groups["filtered"], groups["failed"])
    names = [name for name in prometheus if name.startswith("rollout/buffer/deliveries/")]
    assert total["deliveries"] == sum(prometheus[name] for name in names)
    for column, (measured, statistic) in {
        "reward_mean": ("reward", "mean"),
        "reward_min": ("reward", "min"),
        "reward_max": ("reward", "max"),
        "behind_max": ("staleness", "max"),
        "wait_mean": ("poll_wait_seconds", "mean"),
        "wait_max": ("poll_wait_seconds", "max"),
    }.items():
        assert total.get(column) == pytest.approx(measures.get(measured, {}).get(statistic))


def wait_for_the_next_bucket(series: dict[str, Any]) -> None:
    """A job that has ended is delivered later than its last episode; the charts must have that, too."""
    end = series["columns"]["t"][-1] + series["width_s"]
    time.sleep(max(0.0, end - time.time()) + 0.01)


async def test_every_view_agrees_after_a_run_with_failures(client: FlaskClient, quick_runner: None) -> None:
    buffer: Buffer = client.application.extensions["rollout_buffer"].buffer
    outside = write_with_failures(buffer)
    played = await play_with_failures(buffer)
    for job in (outside, played):
        check_agreement(client, job.job_id)
        wait_for_the_next_bucket(client.get(f"/jobs/{job.job_id}/series").get_json())
        first = poll(buffer, job, max_groups=1, lease_s=600.0)
        assert first is not None
        check_agreement(client, job.job_id)
        buffer.acknowledge([first.delivery_id])
        poll(buffer, job, max_groups=1)
        check_agreement(client, job.job_id)
    accounting = client.get("/jobs/played%2F1").get_json()
    assert accounting["attempts"] == {
        "finished": 10,
        "failed": 10,
        "failed:device": 3,
        "failed:engine": 3,
        "failed:generator": 2,
        "failed:environment_setup": 2,
    }
    assert accounting["outcomes"] == {"completed": 9, "truncated": 1}
    assert accounting["measures"]["success"] == {"mean": 0.5}
    assert accounting["measures"]["staleness"]["max"] > 0
    assert client.get("/jobs/written").get_json()["late"] == 1


@pytest.mark.parametrize(("task_type", "ids", "valid"), [("scripted", PLAYED, 4), ("external", WRITTEN, 2)])
def test_what_a_trainer_logs_agrees_with_every_view(
    make_client: Callable[..., FlaskClient],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    quick_runner: None,
    task_type: str,
    ids: list[str],
    valid: int,
) -> None:
    """The metrics of the trainer's last rollout, W&B's file and the metrics file are the buffer's of the whole job."""
    monkeypatch.setattr(agent_rollout, "LOGGING_TIMEOUT_S", 50.0)  # without the buffer's metrics nothing agrees
    reset_jobs()
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"instance_id": name}) + "\n" for name in ids))
    client = make_client(data_roots=(tmp_path,))
    with serving_what_is_filled(client.application, task_type) as url, offline_run(tmp_path / "wandb") as run:
        args = trainer_args(
            rollout_buffer_url=url,
            rollout_buffer_job_id="trained",
            rollout_task_type=task_type,
            prompt_data=str(tmp_path / "tasks.jsonl"),
            hf_checkpoint=str(DEMO_TOKENIZER_PATH),
            rollout_batch_size=valid,
            n_samples_per_prompt=2,
            use_wandb=True,
            rollout_buffer_metrics_file=str(tmp_path / "metrics.jsonl"),
        )
        (record,) = MockTrainer(args).train(1)
        run.log({**record.metrics, STEP: 0})  # as slime does with what a rollout function returns
    job, prometheus = client.get("/jobs/trained").get_json(), under_trainer_names(client, "trained")
    wandb = {name: value for call in logged_in(tmp_path / "wandb") for name, value in call.items()}
    lines = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    for name, value in job_metrics(job).items():
        assert (wandb[name], lines[name], prometheus[name]) == pytest.approx((value,) * 3), name
    assert lines == {STEP: 0, **record.metrics}
    assert {name: wandb[name] for name in record.metrics} == pytest.approx(record.metrics)
    assert wandb["rollout/no_filter/total_samples"] == sum(job["outcomes"].values()) + job["late"]
    check_agreement(client, "trained")
    assert sum(job["attempts"].get(f"failed:{code}", 0) for code in ("device", "engine", "environment_setup")) == (
        8 if task_type == "scripted" else 0
    )
    assert job["late"] == (1 if task_type == "external" else 0)
    assert job["groups"]["filtered"] > 0


@contextmanager
def serving_what_is_filled(app: Flask, task_type: str) -> Iterator[str]:
    """Serves the application; fills the trainer's job when the trainer first asks for its state, before it polls."""
    buffer: Buffer = app.extensions["rollout_buffer"].buffer
    known = {"task_types": {task_type: {"needs_ray": False}}, "broken_generators": {}}
    filled = threading.Lock()

    def fill_first() -> None:
        buffer.beat(SUPERVISOR.name, os.getpid(), known)  # each time: on a busy machine a heartbeat is soon too old
        with filled:
            job = buffer.job("trained") if request.path == "/jobs/trained" else None
            if job is not None and not sum(describe_job(buffer.store, job)["outcomes"].values()):
                asyncio.run(play(buffer, job)) if task_type == "scripted" else fill(buffer, job)

    app.before_request(fill_first)
    with serving_wsgi(app) as url:
        yield url


def test_what_nobody_measured_is_left_out(client: FlaskClient) -> None:
    buffer: Buffer = client.application.extensions["rollout_buffer"].buffer
    job = start_external(buffer, 2, ("a",), job_id="empty")
    assert describe_job(buffer.store, job)["measures"] == {}
    write(buffer, job, written("a1", "a", 0.5))
    assert describe_job(buffer.store, job)["measures"] == {"reward": {"mean": 0.5, "min": 0.5, "max": 0.5}}
    names = {name for name in under_trainer_names(client, "empty") if "/success" in name or "/staleness" in name}
    assert names == set()
