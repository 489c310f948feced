"""One agent of the crash test: plays sessions of the gateway, three turns each, until none is left. May be killed.

python -m tests.crash.agent PLAN NUMBER

A session speaks by OpenAI's client or by Anthropic's, about a picture. Both retry, whoever dies. Half of the sessions
have sub-agents that ask at the same time as their agent. A session whose agent died expires, and its slot is played
again.
"""

from __future__ import annotations

import base64
import io
import random
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import anthropic
import openai
import requests
from PIL import Image

from slime_plugins.rollout_buffer.client import RolloutBufferClient
from slime_plugins.rollout_buffer.errors import RolloutBufferError, StorageFullError, UnavailableError
from tests.crash.workload import SESSIONS_JOB, Journal, Plan, load_plan

RETRY_S = 0.3
IDLE_TIMEOUT_S = 15.0
TIMEOUT_S = 20.0
RETRIES_S = 45.0
CLIENT_RETRIES = 10
"""Of one turn: about 50 s, as the clients double their pause up to 8 s."""
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
        except (openai.BadRequestError, anthropic.BadRequestError) as error:
            raise RolloutBufferError(f"a right request was refused: {error}") from error
        except (requests.RequestException, openai.APIError, anthropic.APIError, ValueError, CutError) as error:
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
    rng = random.Random(opened["session_id"])
    picture = noise(rng, 64)
    ask, shown = rng.choice(((_ask_openai, _openai_part(picture)), (_ask_anthropic, anthropic_part(picture))))
    question = [{"type": "text", "text": opened["instance"]["question"]}, shown]
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    helpers = [[{"role": "user", "content": f"Sub-agent: what is 1 + {at}?"}] for at in range(rng.choice((0, 2)))]
    with ThreadPoolExecutor() as pool:
        helping = [pool.submit(ask, opened, helper) for helper in helpers]
        for turn in range(TURNS):
            if turn == TURNS - 1:
                wait(helping)  # so that the agent's turn is the latest
            said = ask(opened, messages)
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Are you sure?"}]
    for one in helping:
        one.result()
    reward = {"reward": float(opened["slot"] % 2)}
    closed = retried(f"{plan.gateway_url}/sessions/{opened['session_id']}/close", reward)
    if closed["status"] in ("stored", "duplicate"):
        journal.note(
            stored=opened["session_id"], said=[message["content"] for message in messages[1::2]], aside=len(helpers)
        )


def noise(rng: random.Random, size: int) -> str:
    """A PNG of noise, as base64."""
    file = io.BytesIO()
    Image.frombytes("RGB", (size, size), rng.randbytes(size * size * 3)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def anthropic_part(picture: str) -> dict[str, Any]:
    """A picture as a part of Anthropic's Messages."""
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": picture}}


def _openai_part(picture: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}


def _ask_openai(opened: Mapping[str, Any], messages: Sequence[Any]) -> str:
    url, key = opened["base_url"], opened["api_key"]
    with openai.OpenAI(base_url=url, api_key=key, max_retries=CLIENT_RETRIES, timeout=TIMEOUT_S) as client:
        reply = client.chat.completions.create(model="policy", messages=list(messages))
    return reply.choices[0].message.content or ""


def _ask_anthropic(opened: Mapping[str, Any], messages: Sequence[Any]) -> str:
    url, key = opened["anthropic_base_url"], opened["api_key"]
    with anthropic.Anthropic(base_url=url, api_key=key, max_retries=CLIENT_RETRIES, timeout=TIMEOUT_S) as client:
        reply = client.messages.create(model="policy", max_tokens=60, messages=list(messages))
    return "".join(block.text for block in reply.content if block.type == "text")


def retried(url: str, body: dict[str, Any], *, for_s: float = RETRIES_S) -> dict[str, Any]:
    began = time.monotonic()
    while True:
        try:
            return _post(url, body)
        except (requests.RequestException, CutError) as error:
            is_over = isinstance(error, CutError) and error.status < 500 and error.status != 429
            if is_over or time.monotonic() - began > for_s:
                raise
        time.sleep(RETRY_S)


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = requests.post(url, json=body, timeout=TIMEOUT_S)
    if reply.status_code == 400:
        raise RolloutBufferError(f"a right request was refused: {reply.text[:300]}")
    if not reply.ok:
        raise CutError(reply.status_code, reply.text)
    answer: dict[str, Any] = reply.json()
    return answer


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
