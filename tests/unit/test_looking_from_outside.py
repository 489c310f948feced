"""The client and the command line look at deliveries and trajectories over a real connection."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.cli.app import app as command_line
from slime_plugins.rollout_buffer.client import RolloutBufferClient
from slime_plugins.rollout_buffer.errors import InvalidPayloadError, NotFoundError
from slime_plugins.rollout_buffer.rules.heartbeats import SUPERVISOR
from slime_plugins.rollout_buffer.serve_settings import ServeSettings
from tests.asgi_client import create_app, serving_wsgi
from tests.support import message_with_image, written

JOB = "/runs/a b//1"


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A served buffer with a job whose id is not easy to put into a URL."""
    app = create_app(ServeSettings(data_dir=tmp_path / "data"))
    buffer: Buffer = app.extensions["rollout_buffer"].buffer
    buffer.beat(SUPERVISOR.name, os.getpid(), {"task_types": {"external": {}}, "broken_generators": {}})
    items = [
        written("u/0?#%", "é", messages=[message_with_image()]),
        written("u1", "b", reward=0.25),
        written("u2", "c"),
    ]
    with serving_wsgi(app) as address:
        client = RolloutBufferClient(address)
        client.start_rollout({"task_type": "external", "num_repeat_per_sample": 1, "job_id": JOB})
        client.write(items, job_id=JOB)
        yield address
    buffer.store.close()


def test_a_delivery_is_found_and_fetched_again(url: str) -> None:
    client = RolloutBufferClient(url)
    first = client.get_rollout_data(job_id=JOB, max_groups=2, lease_s=60, images="hash")
    second = client.get_rollout_data(job_id=JOB)
    page = client.deliveries(JOB, limit=1)
    assert [entry["delivery_id"] for entry in page["deliveries"]] == [second.delivery_id]
    (older,) = client.deliveries(JOB, cursor=page["next_cursor"])["deliveries"]
    assert (older["delivery_id"], older["groups"]) == (first.delivery_id, 2)
    assert client.delivery(older["delivery_id"], images="hash") == first
    assert client.delivery(second.delivery_id or "") == second


def test_trajectories_are_searched_and_fetched(url: str) -> None:
    client = RolloutBufferClient(url)
    found = client.trajectories(job_id=JOB, max_reward=0.5)
    assert [entry["uid"] for entry in found["trajectories"]] == ["u1"]
    assert client.trajectory("u/0?#%", job_id=JOB, images="inline")["messages"] == [message_with_image()]
    with pytest.raises(NotFoundError, match="no trajectory"):
        client.trajectory("nope")
    with pytest.raises(InvalidPayloadError, match="outcome"):
        client.trajectories(outcome="won")


def run(*arguments: str) -> str:
    result = CliRunner().invoke(command_line, list(arguments), env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_command_line_lists_and_replays(url: str, tmp_path: Path) -> None:
    client = RolloutBufferClient(url)
    delivered = client.get_rollout_data(job_id=JOB, max_groups=1).delivery_id or ""
    client.get_rollout_data(job_id=JOB, max_groups=1)
    listed = json.loads(run("deliveries", JOB, "--url", url, "--json"))
    assert [entry["delivery_id"] for entry in listed["deliveries"]][1] == delivered
    assert "more with --cursor" in run("deliveries", JOB, "--url", url, "--limit", "1")
    target = tmp_path / "replayed.json"
    assert "1 samples" in run("replay", delivered, "--output", str(target), "--url", url)
    assert target.read_bytes() == client.delivery_body(delivered)
    assert "u/0?#%" in run("trajectories", "--url", url, "--min-reward", "0.5")
    assert "no such trajectory" in run("trajectories", "--url", url, "--stop-reason", "max_turns")
    assert len(json.loads(run("trajectories", "--url", url, "--json", "--limit", "2"))["trajectories"]) == 2
