"""What a runner says of its devices reaches ``/jobs/<id>``, ``/metrics`` and the log; nothing it says can do harm."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Mapping
from typing import Any

import pytest
from flask.testing import FlaskClient
from rich.console import Console

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.cli.job_status import draw_job_status
from slime_plugins.rollout_buffer.devices.counters import DeviceCounters
from slime_plugins.rollout_buffer.devices.leased_device import LeaseReport, device_died
from slime_plugins.rollout_buffer.generator.base_generator import GeneratorContext
from slime_plugins.rollout_buffer.reporting.job_snapshot import take_snapshot
from slime_plugins.rollout_buffer.runner import device_watch
from slime_plugins.rollout_buffer.runner.device_watch import DeviceWatch
from slime_plugins.rollout_buffer.runner.job_runner import JobRunner
from slime_plugins.rollout_buffer.state.runner_reports import devices_of_job, recent_device_pools, store_report
from tests.unit.reporting.test_metrics import scrape
from tests.unit.runner.test_runner import ScriptedGenerator, by_slot, plugin_of, start


def device(name: str = "device-0", state: str = "ready", **more: Any) -> dict[str, Any]:
    counters = DeviceCounters()
    counters.add(LeaseReport(reset_s=(2.0,), step_s=(0.5, 1.0), held_s=10.0, failures={"hung": 1}))
    return {"device_id": name, "state": state, "last_error": "", **counters.as_dict()} | more


def farm(*devices: dict[str, Any], pool: str = "ray") -> dict[str, Any]:
    return {"pool": pool, "runners_waiting": {"training": 1, "evaluation": 0}, "devices": list(devices or [device()])}


def job_with_report(client: FlaskClient, report: Mapping[str, Any], job_id: str = "j", **more: Any) -> Buffer:
    client.post("/start_rollout", data=json.dumps({"task_type": "external", "job_id": job_id}))
    buffer: Buffer = client.application.extensions["rollout_buffer"].buffer
    store_report(buffer.store, buffer.job(job_id).key, 1, report, **more)
    return buffer


# ---- HTTP ------------------------------------------------------------------------------------------------------------


def test_one_job_shows_its_devices_and_the_list_of_jobs_does_not(client: FlaskClient) -> None:
    job_with_report(client, farm(device(state="quarantined", last_error="adb is offline", leased_by=None)))
    shown = client.get("/jobs/j").get_json()["devices"]
    assert (shown["pool"], shown["age_s"] < 60) == ("ray", True)
    (only,) = shown["devices"]
    assert (only["state"], only["last_error"], only["failures"]) == ("quarantined", "adb is offline", {"hung": 1})
    assert (only["step_s_p50"], only["step_s_p95"], only["actions_per_minute"]) == (0.5, 1.0, 12.0)
    assert "devices" not in client.get("/jobs").get_json()["jobs"][0]


def test_metrics_tell_every_device_with_its_state_counts_and_times(client: FlaskClient) -> None:
    job_with_report(client, farm(device(), device("device-1", "booting", quarantines=3)))
    found = scrape(client)
    assert found["rollout_buffer_devices"] == {
        ("ray", "device-0", "ready"): 1,
        ("ray", "device-1", "booting"): 1,
    }
    assert found["rollout_buffer_device_episodes"]["ray", "device-0"] == 1
    assert found["rollout_buffer_device_steps"]["ray", "device-0"] == 2
    assert found["rollout_buffer_device_failures"]["ray", "device-0", "hung"] == 1
    assert found["rollout_buffer_device_health_actions"]["ray", "device-1", "quarantine"] == 3
    assert found["rollout_buffer_device_reset_seconds"]["ray", "device-0", "0.95"] == 2.0
    assert found["rollout_buffer_device_step_seconds"]["ray", "device-0", "0.5"] == 0.5
    assert found["rollout_buffer_device_actions_per_minute"]["ray", "device-0"] == 12.0
    assert found["rollout_buffer_device_runners_waiting"] == {("ray", "training"): 1, ("ray", "evaluation"): 0}


def test_two_jobs_on_one_farm_are_counted_once_by_the_newest_report(client: FlaskClient) -> None:
    buffer = job_with_report(client, farm(device(state="leased")), "older")
    job_with_report(client, farm(device(state="ready")), "newer")
    assert scrape(client)["rollout_buffer_devices"] == {("ray", "device-0", "ready"): 1}
    assert len(recent_device_pools(buffer.store)) == 1


def test_an_old_report_of_devices_is_no_metric_but_stays_with_its_job_for_a_week(client: FlaskClient) -> None:
    day = 24 * 3600.0
    buffer = job_with_report(client, farm(), now=1000.0)
    assert scrape(client)["rollout_buffer_devices"] == {}
    assert client.get("/jobs/j").get_json()["devices"]["age_s"] > 60
    store_report(buffer.store, 77, 1, farm(), now=1000.0 + 6 * day)
    assert devices_of_job(buffer.store, buffer.job("j").key) is not None
    store_report(buffer.store, 77, 1, farm(), now=1000.0 + 8 * day)
    assert devices_of_job(buffer.store, buffer.job("j").key) is None


def test_status_shows_the_states_and_why_a_device_is_out(client: FlaskClient) -> None:
    job_with_report(client, farm(device(), device("device-1", "quarantined", last_error="adb is offline")))
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(draw_job_status([client.get("/jobs/j").get_json()]))
    shown = console.export_text()
    assert "s ago: 1 quarantined, 1 ready" in shown
    assert "device-1 is quarantined: adb is offline" in shown


# ---- the runner ------------------------------------------------------------------------------------------------------


class GeneratorWithDevices(ScriptedGenerator):
    """Its devices answer what the test says."""

    answer: Any = None

    async def devices(self) -> Mapping[str, Any]:
        if isinstance(self.answer, Exception):
            raise self.answer
        reply: Mapping[str, Any] = self.answer
        return reply


async def run(buffer: Buffer, generator: GeneratorWithDevices) -> dict[str, Any] | None:
    job = start(buffer)
    await JobRunner(buffer, job.key, plugin_of(generator), buffer_url="http://127.0.0.1:1").run()
    assert buffer.job_by_key(job.key).state.value == "finished"
    return devices_of_job(buffer.store, job.key)


async def test_a_runner_reports_its_devices_at_the_latest_when_the_job_ends(real_time_buffer: Buffer) -> None:
    generator = GeneratorWithDevices(by_slot)
    generator.answer = farm(device("device-7"))
    report = await run(real_time_buffer, generator)
    assert report is not None
    assert report["devices"][0]["device_id"] == "device-7"


async def test_devices_that_are_still_booting_are_shown_before_the_generator_is_ready(real_time_buffer: Buffer) -> None:
    shown: list[Any] = []

    class SlowStart(GeneratorWithDevices):
        async def start(self, context: GeneratorContext) -> None:
            while not shown or shown[-1] is None:
                await asyncio.sleep(0.01)
                shown.append(devices_of_job(real_time_buffer.store, 1))

    generator = SlowStart(by_slot)
    generator.answer = farm(device(state="booting", last_error="no node offers {phone: 1}"))
    await run(real_time_buffer, generator)
    assert shown[-1]["devices"][0]["last_error"] == "no node offers {phone: 1}"


async def test_a_runner_that_cannot_reach_its_devices_says_why_and_a_metric_does_not(client: FlaskClient) -> None:
    buffer = job_with_report(client, farm())
    generator = GeneratorWithDevices(by_slot)
    generator.answer = device_died("the Ray cluster at 10.0.0.1:6379 cannot be used")

    async def keep(report: Mapping[str, Any]) -> None:
        store_report(buffer.store, buffer.job("j").key, 1, report)

    await DeviceWatch(generator, "j", keep).report()
    assert client.get("/jobs/j").get_json()["devices"]["unreachable"] == generator.answer.message
    job, now = buffer.job("j"), buffer.store.clock()
    with buffer.store.read() as connection:
        snapshot = take_snapshot(connection, job, {}, now, buffer.store.data_dir)
    assert snapshot.devices == {"unreachable": generator.answer.message}
    assert scrape(client)["rollout_buffer_devices"] == {}


async def test_the_log_says_which_device_rests_and_which_has_a_new_worker(caplog: pytest.LogCaptureFixture) -> None:
    generator = GeneratorWithDevices(by_slot)

    async def keep(_: Mapping[str, Any]) -> None:
        pass

    watch = DeviceWatch(generator, "job-1", keep)
    with caplog.at_level(logging.INFO, logger=device_watch.__name__):
        for state, replacements in (("ready", 0), ("quarantined", 0), ("quarantined", 0), ("ready", 1)):
            generator.answer = farm(device(state=state, replacements=replacements, last_error="adb is offline"))
            await watch.report()
    assert [record.getMessage() for record in caplog.records] == [
        "job job-1: devices of ray: 1 ready; 1 episodes, 1 hung",
        "job job-1: device-0 is quarantined: adb is offline",
        "job job-1: device-0 has a new worker: adb is offline",
    ]
