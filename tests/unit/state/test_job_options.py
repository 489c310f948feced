"""The options of a job's generator: kept beside the job, read by who plays it, shown for one job alone."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.storage.store import Store
from tests.old_schemas import create_schema
from tests.support import start_external

OPTIONS: dict[str, Any] = {"a": {"b": [1, 2.5, None, True, 'é"\\']}, "flag": False, "text": "t", "a.b $[0]": 1}


def test_options_do_not_lie_in_the_row_that_every_write_reads(buffer: Buffer) -> None:
    job = start_external(buffer, job_id="j", **OPTIONS)
    assert not OPTIONS.keys() & job.settings.kept.keys()
    assert buffer.job_settings(job).options == OPTIONS
    assert buffer.shown_settings(job) == {**job.settings.kept, **OPTIONS}


def test_another_value_of_an_option_is_another_job(buffer: Buffer) -> None:
    start_external(buffer, job_id="j", **OPTIONS)
    with pytest.raises(Exception, match="different: text"):
        start_external(buffer, job_id="j", **{**OPTIONS, "text": "u"})


def test_the_list_of_jobs_shows_no_settings_and_one_job_does(client: FlaskClient) -> None:
    client.post("/start_rollout", json={"task_type": "external", "job_id": "j", **OPTIONS})
    (listed,) = client.get("/jobs").get_json()["jobs"]
    assert "settings" not in listed
    assert client.get("/jobs/j").get_json()["settings"].items() >= OPTIONS.items()


@pytest.mark.parametrize("shown", [True, False])
def test_options_that_an_earlier_version_stored_without_a_limit_stay_and_nothing_else_reads_them(
    tmp_path: Path, shown: bool
) -> None:
    options = OPTIONS if shown else {**OPTIONS, "huge": [0] * 1_000_000}
    settings = {
        **{"task_type": "external", "num_process": "auto", "evaluation": True, "normalize_rewards": False},
        **{"reward_range": [-1.5, 2], "max_weight_version_lag": None, "min_valid_item_size_ratio": 0.7},
        **{"sampling_params": {"temperature": 0.5, "stop": ["\n"]}, "staleness_policy": "flag"},
    }
    with sqlite3.connect(tmp_path / "buffer.sqlite3") as earlier:
        create_schema(earlier, 17)
        columns = "job_id, task_type, state, identity, settings, has_runner, has_input, group_size, instance_count"
        earlier.execute(
            f"INSERT INTO jobs ({columns}, num_epoch, created_at, updated_at) "
            "VALUES ('j', 'external', 'running', '', ?, 0, 0, 1, 0, 1, 0, 0)",
            (json.dumps({**settings, **options}),),
        )
    earlier.close()
    buffer = Buffer(Store(tmp_path))
    (job,) = buffer.jobs()
    assert job.settings.kept == settings
    assert buffer.job_settings(job).options == options
    assert buffer.shown_settings(job) == {**settings, **(options if shown else {})}
    buffer.store.close()
