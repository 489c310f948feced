"""``/metrics`` and ``/jobs`` are two views of the same accounting."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from typing import Any

import pytest
from flask.testing import FlaskClient
from prometheus_client.parser import text_string_to_metric_families

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.reporting.prometheus import METRICS, cause_class
from slime_plugins.rollout_buffer.state.attempts import AttemptFailure
from tests.support import poll, start_external, write, written

Values = dict[tuple[str, ...], float]


def scrape(client: FlaskClient) -> dict[str, Values]:
    """Every sample as name → label values → value."""
    reply = client.get("/metrics")
    assert (reply.status_code, reply.content_type) == (200, "text/plain; version=0.0.4; charset=utf-8")
    labels = {metric.name: metric.labels for metric in METRICS}
    found: dict[str, Values] = defaultdict(dict)
    for family in text_string_to_metric_families(reply.text):
        for sample in family.samples:
            found[sample.name][tuple(sample.labels[label] for label in labels[sample.name])] = sample.value
    return found


def of_job(values: Values, job: dict[str, Any]) -> dict[str, float]:
    """The samples of one job by what is left of their labels."""
    this = (job["job_id"], job["task_type"])
    return {":".join(filter(None, key[2:])): value for key, value in values.items() if key[:2] == this}


def expected_attempts(job: dict[str, Any]) -> dict[str, int]:
    """``/jobs`` counts failed attempts once by state and once by code; ``/metrics`` once, with the code as a label."""
    with_code = {key: count for key, count in job["attempts"].items() if ":" in key}
    without = {key: count for key, count in job["attempts"].items() if ":" not in key}
    for key, count in with_code.items():
        without[key.split(":")[0]] -= count
    return {key: count for key, count in {**with_code, **without}.items() if count}


def check_agreement(client: FlaskClient) -> None:
    metrics = scrape(client)
    for job in client.get("/jobs").get_json()["jobs"]:
        slots = dict(job["slots"])
        assert of_job(metrics["rollout_buffer_slots_submitted"], job) == {"": slots.pop("submitted")}
        assert of_job(metrics["rollout_buffer_slots"], job) == slots
        assert of_job(metrics["rollout_buffer_groups"], job) == job["groups"]
        assert of_job(metrics["rollout_buffer_attempts"], job) == expected_attempts(job)
        assert of_job(metrics["rollout_buffer_trajectories"], job) == job["outcomes"]
        assert of_job(metrics["rollout_buffer_trajectories_late"], job) == {"": job["late"]}
        assert of_job(metrics["rollout_buffer_jobs"], job) == {job["state"]: 1}
        causes: dict[str, int] = defaultdict(int)
        for state, counted in job["causes"].items():
            for cause, count in counted.items():
                causes[f"{state}:{cause_class(cause)}"] += count
        assert of_job(metrics["rollout_buffer_group_causes"], job) == causes


class Operator:
    """Does things to a buffer at random."""

    def __init__(self, buffer: Buffer, seed: int) -> None:
        self.buffer, self.random = buffer, random.Random(seed)
        self.jobs = [
            start_external(buffer, n=2, job_id="j"),
            start_external(buffer, n=3, ids=tuple("abcd"), job_id="k"),
        ]
        self.fence = buffer.begin_running(self.jobs[1].key)
        self.deliveries: list[str] = []
        self.written = 0

    def step(self) -> None:
        self.random.choice([self.write, self.write, self.take, self.acknowledge, self.attempt, self.time_out])()

    def write(self) -> None:
        for _ in range(3):
            self.written += 1
            uid, name, reward = f"u{self.written}", self.random.choice("abcd"), self.random.choice([0.0, 1.0, 7.0])
            more = {"extra_info": {"finish_reason": self.random.choice(["stop", "length"])}}
            write(self.buffer, self.random.choice(self.jobs), written(uid, name, reward=reward, **more))

    def take(self) -> None:
        lease_s = self.random.choice([None, 0.001, 600.0])
        delivery = poll(self.buffer, self.random.choice(self.jobs), max_groups=1, lease_s=lease_s)
        if delivery is not None:
            self.deliveries.append(delivery.delivery_id)

    def acknowledge(self) -> None:
        if self.deliveries:
            self.buffer.acknowledge([self.random.choice(self.deliveries)])

    def attempt(self) -> None:
        for group in self.buffer.open_groups(self.jobs[1].key, after=(-1, -1), limit=1):
            number = self.buffer.begin_attempt(self.fence, group, 0)
            if number is not None and self.random.random() < 0.7:
                code = self.random.choice(["device", "engine"])
                given_up = self.random.random() < 0.3
                self.buffer.fail_attempt(
                    self.fence, group, 0, number, AttemptFailure(code=code, message="broke", given_up=given_up)
                )

    def time_out(self) -> None:
        self.buffer.expire_leases()


@pytest.mark.parametrize("seed", range(4))
def test_metrics_and_jobs_agree_after_whatever_happens(client: FlaskClient, seed: int) -> None:
    operator = Operator(client.application.extensions["rollout_buffer"].buffer, seed)
    for _ in range(25):
        operator.step()
        check_agreement(client)
    states = scrape(client)["rollout_buffer_slots"]
    assert sum(states.values()) > 0


def test_metrics_have_the_ages_of_polls_groups_and_heartbeats(client: FlaskClient) -> None:
    client.post("/start_rollout", data=json.dumps({"task_type": "external", "job_id": "j"}))
    metrics = scrape(client)
    assert metrics["rollout_buffer_poll_age_seconds"] == {}
    assert metrics["rollout_buffer_oldest_ready_group_age_seconds"] == {("j", "external"): 0.0}
    assert 0 <= metrics["rollout_buffer_supervisor_heartbeat_age_seconds"][()] < 60
    client.post("/get_rollout_data", data=b"{}")
    client.post("/buffer/write", data=json.dumps(written("u")))
    metrics = scrape(client)
    assert 0 <= metrics["rollout_buffer_poll_age_seconds"]["j", "external"] < 60
    assert 0 < metrics["rollout_buffer_oldest_ready_group_age_seconds"]["j", "external"] < 60


def test_a_hostile_job_id_stays_inside_its_label(client: FlaskClient) -> None:
    hostile = 'a"} 1 \\ rollout_buffer_slots{job_id="b'
    client.post("/start_rollout", data=json.dumps({"task_type": "external", "job_id": hostile}))
    assert {key[0] for key in scrape(client)["rollout_buffer_slots"]} == {hostile}
