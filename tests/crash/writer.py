"""One writer of the crash test: posts its items, each until it got its 200, and notes that. May be killed at any time.

python -m tests.crash.writer PLAN NUMBER
"""

from __future__ import annotations

import sys
import time
from typing import Any

import requests

from slime_plugins.rollout_buffer.client import RolloutBufferClient
from slime_plugins.rollout_buffer.errors import StorageFullError, UnavailableError
from tests.crash.workload import WRITTEN_JOB, Journal, Plan, load_plan, requests_of_writer

RETRY_S = 0.15


def main(plan_path: str, number: str) -> int:
    """Goes on after the last request that is noted as answered; returns 0 when all are.

    Only what may pass is tried again: a refusal, or a defect of the server, ends the run.
    """
    plan = load_plan(plan_path)
    journal = Journal(plan.path(f"writer-{number}.jsonl"))
    answered = sum("statuses" in event for event in journal.events())
    client = RolloutBufferClient(plan.url, timeout_s=20.0)
    for position, items in enumerate(requests_of_writer(plan, int(number))):
        if position < answered:
            continue
        _write_until_answered(client, journal, items)
        plan.pause(plan.write_pause_s)
    journal.note(done=True)
    return 0


def _write_until_answered(client: RolloutBufferClient, journal: Journal, items: list[dict[str, Any]]) -> None:
    while True:
        try:
            reply = client.write(items, job_id=WRITTEN_JOB)
        except (UnavailableError, StorageFullError, requests.RequestException, ValueError) as error:
            journal.note(failed=f"{type(error).__name__}: {error}"[:300])
        else:
            journal.note(statuses={result["uid"]: result["status"] for result in reply["results"]})
            return
        time.sleep(RETRY_S)


def progress(plan: Plan) -> dict[str, str]:
    """Returns every uid that got its 200, with the status of its last answer."""
    answered: dict[str, str] = {}
    for number in range(plan.writers):
        for event in Journal(plan.path(f"writer-{number}.jsonl")).events():
            answered.update(event.get("statuses", {}))
    return answered


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
