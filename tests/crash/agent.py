"""One agent of the crash test: plays sessions of the gateway, one turn each, until none is left. May be killed.

python -m tests.crash.agent PLAN NUMBER

A session that is cut, by whoever's death, is left alone: it expires, and its slot is played again.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import requests

from slime_plugins.rollout_buffer.client import RolloutBufferClient
from slime_plugins.rollout_buffer.errors import RolloutBufferError, StorageFullError, UnavailableError
from tests.crash.workload import SESSIONS_JOB, Journal, Plan, load_plan

RETRY_S = 0.3
IDLE_TIMEOUT_S = 6.0
TIMEOUT_S = 20.0


class CutError(Exception):
    """The gateway did not do what was asked, for now."""


def main(plan_path: str, number: str) -> int:
    """Plays until no slot is open; returns 0."""
    plan = load_plan(plan_path)
    journal = Journal(plan.path(f"agent-{number}.jsonl"))
    while not is_over(plan, journal):
        try:
            play(plan, journal)
        except (requests.RequestException, ValueError, CutError) as error:
            journal.note(failed=f"{type(error).__name__}: {error}"[:300])
            time.sleep(RETRY_S)
        plan.pause(plan.write_pause_s)
    journal.note(done=True)
    return 0


def is_over(plan: Plan, journal: Journal) -> bool:
    """Whether every group is closed; False when nobody answers."""
    try:
        groups = RolloutBufferClient(plan.url, timeout_s=TIMEOUT_S).job(SESSIONS_JOB)["groups"]
    except (UnavailableError, StorageFullError, requests.RequestException, ValueError) as error:
        journal.note(failed=f"{type(error).__name__}: {error}"[:300])
        time.sleep(RETRY_S)
        return False
    return not groups["open"]


def play(plan: Plan, journal: Journal) -> None:
    """Opens a session, has one turn, closes it; notes the session that the gateway says is stored."""
    opened = _post(f"{plan.gateway_url}/sessions", {"job_id": SESSIONS_JOB, "idle_timeout_s": IDLE_TIMEOUT_S})
    question = opened["instance"]["question"]
    turn = {"model": "policy", "messages": [{"role": "user", "content": question}]}
    reply = _post(f"{opened['base_url']}/chat/completions", turn, key=opened["api_key"])
    said = reply["choices"][0]["message"]["content"]
    closed = _post(f"{plan.gateway_url}/sessions/{opened['session_id']}/close", {"reward": float(opened["slot"] % 2)})
    if closed["status"] == "stored":
        journal.note(stored=opened["session_id"], said=said)


def _post(url: str, body: dict[str, Any], *, key: str = "") -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    reply = requests.post(url, json=body, headers=headers, timeout=TIMEOUT_S)
    if reply.status_code == 400:
        raise RolloutBufferError(f"a right request was refused: {reply.text[:300]}")
    if not reply.ok:
        raise CutError(f"HTTP {reply.status_code}: {reply.text[:200]}")
    answer: dict[str, Any] = reply.json()
    return answer


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
