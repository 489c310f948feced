"""A server that was drained and stopped leaves all that it had to the next version."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.reporting.job_description import describe_job
from slime_plugins.rollout_buffer.state.recovery import recover
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.types import JobState
from tests.integration.conftest import BufferProcess
from tests.support import message_with_image, poll, slot_counts, uids, use_next_schema, write, written
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(120)


def test_the_next_version_goes_on_with_what_a_drained_server_had(
    start_buffer: Callable[..., BufferProcess],
    stand_in_engine: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = start_buffer()
    client = server.client
    client.start_rollout({"task_type": "external", "num_repeat_per_sample": 1, "job_id": "written"})
    for number in range(6):
        client.write([written(f"u{number}", f"i{number}", messages=[message_with_image()])], job_id="written")
    acked, leased = (
        client.get_rollout_data(job_id="written", lease_s=3600, max_groups=2, poll_id=f"poll-{number}", consumer_id="t")
        for number in range(2)
    )
    client.ack([acked.meta_info["delivery_id"]])
    client.start_rollout(
        {
            **{"task_type": "math", "job_id": "played", "num_repeat_per_sample": 2, "num_epoch": 50},
            **{"remote_engine_url": f"http://127.0.0.1:{stand_in_engine}", "tokenizer_path": str(DEMO_TOKENIZER_PATH)},
            "instances": [{"instance_id": f"m{at}", "prompt": f"{at} + 1?", "label": str(at + 1)} for at in range(8)],
        }
    )
    wait_until(lambda: client.job("played")["slots"]["ready"], 100, "a group that was played")
    client.drain("played", stop=True)
    wait_until(lambda: "running" not in client.job("played")["attempts"], 100, "the end of what runs")
    before = {name: facts_that_no_restart_changes(client.job(name)) for name in ("written", "played")}
    server.stop()

    use_next_schema(monkeypatch, tmp_path)
    store = Store(tmp_path / "data")
    assert recover(store).damaged == []
    buffer = Buffer(store)
    jobs = {name: buffer.job(name) for name in before}
    assert {
        name: facts_that_no_restart_changes(describe_job(buffer.store, job)) for name, job in jobs.items()
    } == before
    again = poll(buffer, jobs["written"], lease_s=3600, max_groups=2, poll_id="poll-1", consumer_id="t")
    assert uids(buffer, again) == [item.uid for item in leased.items] == ["u2", "u3"]
    assert uids(buffer, poll(buffer, jobs["written"])) == ["u4", "u5"]
    assert write(buffer, jobs["written"], written("u0", "i0"), written("u9", "i9")) == ["duplicate", "stored"]
    assert jobs["played"].state is JobState.PAUSED
    ready = slot_counts(buffer, jobs["played"])["ready"]
    assert len(uids(buffer, poll(buffer, jobs["played"]))) == ready > 0
    store.close()


def facts_that_no_restart_changes(described: Mapping[str, object]) -> dict[str, object]:
    """What of a job no restart may change."""
    return {name: described[name] for name in ("state", "slots", "attempts", "outcomes")}
