"""The options of a job's generator: kept beside the job, read by who plays it, shown for one job alone."""

from __future__ import annotations

from typing import Any

import pytest
from flask.testing import FlaskClient

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.reporting.job_description import settings_for_display
from tests.support import start_external

OPTIONS: dict[str, Any] = {"a": {"b": [1, 2.5, None, True, 'é"\\']}, "flag": False, "text": "t", "a.b $[0]": 1}


def test_options_do_not_lie_in_the_row_that_every_write_reads(buffer: Buffer) -> None:
    job = start_external(buffer, job_id="j", **OPTIONS)
    assert not OPTIONS.keys() & job.settings.all_values.keys()
    assert buffer.job_settings(job).options == OPTIONS
    assert settings_for_display(buffer.store, job) == {**job.settings.all_values, **OPTIONS}


def test_another_value_of_an_option_is_another_job(buffer: Buffer) -> None:
    start_external(buffer, job_id="j", **OPTIONS)
    with pytest.raises(Exception, match="different: text"):
        start_external(buffer, job_id="j", **{**OPTIONS, "text": "u"})


def test_the_list_of_jobs_shows_no_settings_and_one_job_does(client: FlaskClient) -> None:
    client.post("/start_rollout", json={"task_type": "external", "job_id": "j", **OPTIONS})
    (listed,) = client.get("/jobs").get_json()["jobs"]
    assert "settings" not in listed
    assert client.get("/jobs/j").get_json()["settings"].items() >= OPTIONS.items()
