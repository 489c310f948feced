"""One agent of the crash test: plays sessions of the gateway, three turns each, until none is left. May be killed.

python -m tests.crash.agent PLAN NUMBER

It retries as clients do, whoever dies. A session whose agent died expires, and its slot is played again.
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
IDLE_TIMEOUT_S = 15.0
TIMEOUT_S = 20.0
RETRIES_S = 45.0
TURNS = 3


class CutError(Exception):
    """The gateway did not do what was asked, for now."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text[:200]}")
        self.status = status


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
    """Opens a session, has its turns, closes it; notes the session that the gateway says is stored."""
    opened = _post(f"{plan.gateway_url}/sessions", {"job_id": SESSIONS_JOB, "idle_timeout_s": IDLE_TIMEOUT_S})
    messages = [{"role": "user", "content": opened["instance"]["question"]}]
    for _ in range(TURNS):
        turn = {"model": "policy", "messages": messages}
        reply = _retried(f"{opened['base_url']}/chat/completions", turn, key=opened["api_key"])
        messages += [reply["choices"][0]["message"], {"role": "user", "content": "Are you sure?"}]
    reward = {"reward": float(opened["slot"] % 2)}
    closed = _retried(f"{plan.gateway_url}/sessions/{opened['session_id']}/close", reward)
    if closed["status"] in ("stored", "duplicate"):
        journal.note(stored=opened["session_id"], said=[message["content"] for message in messages[1::2]])


def _retried(url: str, body: dict[str, Any], *, key: str = "") -> dict[str, Any]:
    began, tries = time.monotonic(), 0
    while True:
        try:
            return _post(url, body, key=key, tries=tries)
        except (requests.RequestException, CutError) as error:
            is_over = isinstance(error, CutError) and error.status < 500 and error.status != 429
            if is_over or time.monotonic() - began > RETRIES_S:
                raise
        tries += 1
        time.sleep(RETRY_S)


def _post(url: str, body: dict[str, Any], *, key: str = "", tries: int = 0) -> dict[str, Any]:
    headers = {"x-stainless-retry-count": str(tries), **({"Authorization": f"Bearer {key}"} if key else {})}
    reply = requests.post(url, json=body, headers=headers, timeout=TIMEOUT_S)
    if reply.status_code == 400:
        raise RolloutBufferError(f"a right request was refused: {reply.text[:300]}")
    if not reply.ok:
        raise CutError(reply.status_code, reply.text)
    answer: dict[str, Any] = reply.json()
    return answer


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
