"""A small agent with the plain ``openai`` client: its turns become a trajectory with exact ids.

    rollout-buffer engine --port 30000
    rollout-buffer serve --gateway-port 8890
    python examples/proxy/openai_client.py --tokenizer TOKENIZER_FOLDER

It starts a job of sums, plays each slot in its own session, closes it with a reward, and prints the rows for a trainer.
"""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any

import openai
import requests

from slime.utils.mask_utils import pack_training_rows
from slime_plugins.rollout_buffer.client import RolloutBufferClient


def play(session: dict[str, Any]) -> str:
    """Asks the question, asks once more whether the answer is right, and returns the second answer."""
    client = openai.OpenAI(base_url=session["base_url"], api_key=session["api_key"])
    messages: list[Any] = [{"role": "user", "content": session["instance"]["question"]}]
    answer = ""
    for doubt in ("Are you sure? " + session["instance"]["question"], ""):
        reply = client.chat.completions.create(model=session["model"], messages=messages)
        answer = reply.choices[0].message.content or ""
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": doubt}]
    client.close()
    return answer


def reward_of(session: dict[str, Any], answer: str) -> float:
    """Returns 1 for the right number in a box, else 0."""
    boxed = re.findall(r"\\boxed\{(-?\d+)\}", answer)
    return float(bool(boxed) and boxed[-1] == session["instance"]["answer"])


def start_job(buffer: RolloutBufferClient, engine_url: str, tokenizer: str) -> str:
    """Starts a job for sessions: three sums, four members each."""
    lines = [
        {"instance_id": f"sum-{a}", "question": f"What is {a} + {b}? Answer in \\boxed{{}}.", "answer": str(a + b)}
        for a, b in ((12, 30), (7, 8), (100, 1))
    ]
    payload = {
        "task_type": "external",
        "instances": lines,
        "num_repeat_per_sample": 4,
        "remote_engine_url": engine_url,
        "tokenizer_path": tokenizer,
        "max_tokens": 512,
        "fresh": True,
        "job_id": "proxy-example",
    }
    return buffer.start_rollout(payload).job_id


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--buffer", default="http://127.0.0.1:8889")
    parser.add_argument("--gateway", default="http://127.0.0.1:8890")
    parser.add_argument("--engine", default="http://127.0.0.1:30000")
    parser.add_argument("--tokenizer", required=True, help="The policy's tokenizer: a folder on the buffer host.")
    options = parser.parse_args()
    buffer = RolloutBufferClient(options.buffer)
    job_id = start_job(buffer, options.engine, options.tokenizer)
    for _ in range(12):  # the slots of three sums
        session = requests.post(f"{options.gateway}/sessions", json={"job_id": job_id}, timeout=30).json()
        reward = reward_of(session, play(session))
        close = f"{options.gateway}/sessions/{session['session_id']}/close"
        requests.post(close, json={"reward": reward}, timeout=30).raise_for_status()
    for item in buffer.get_rollout_data(job_id=job_id, wait_s=10).items:
        rows = pack_training_rows(item.generations)
        trained = sum(sum(row.loss_mask) for row in rows)
        sys.stdout.write(
            f"{item.uid:12} {item.instance_id:8} reward {item.reward}  rows {len(rows)}  trained {trained}\n"
        )


if __name__ == "__main__":
    main()
