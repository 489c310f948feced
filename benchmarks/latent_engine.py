"""The engine of the scheduler benchmark, as a separate process: waits, and returns scripted replies.

    python -m benchmarks.latent_engine SEED SCALE

Prints its address. It implements the part of SGLang's ``/generate`` that an episode needs. It derives the episode from
the session id and the turn from the number of images; the latency of the turn is drawn from both.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import orjson
from aiohttp import web
from transformers import AutoTokenizer

from benchmarks.latencies import Latencies
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.http_serving import serving

SESSION_HEADER = "X-SMG-Routing-Key"
REPLY = (
    "<thinking>\nThe button in the middle is the one to press.\n</thinking>\n<tool_call>\n"
    '{{"name": "mobile_use", "arguments": {}}}\n</tool_call>\n<conclusion>\nDid it.\n</conclusion><|im_end|>'
)
CLICK = '{"action": "click", "coordinate": [500, 500]}'
END = '{"action": "terminate", "status": "success"}'


def position_of(session: str) -> int:
    """Returns the episode's number in an attempt's uid: job, epoch, position, slot, attempt."""
    return int(session.split(".")[2])


class Script:
    """Prepared replies with made-up log-probs."""

    def __init__(self, latencies: Latencies) -> None:
        tokenizer: Any = AutoTokenizer.from_pretrained(DEMO_TOKENIZER_PATH, local_files_only=True)
        self._latencies = latencies
        self._replies = {last: self._reply(tokenizer, END if last else CLICK) for last in (False, True)}

    async def generate(self, request: web.Request) -> web.Response:
        turn = len(orjson.loads(await request.read()).get("image_data", ()))
        if not turn:  # the runner asks once for a token, to see what the engine can do
            return web.Response(body=self._replies[True], content_type="application/json")
        position = position_of(request.headers[SESSION_HEADER])
        await asyncio.sleep(self._latencies.generation(position, turn))
        last = turn == self._latencies.turns(position)
        return web.Response(body=self._replies[last], content_type="application/json")

    @staticmethod
    def _reply(tokenizer: Any, arguments: str) -> bytes:
        ids = tokenizer.encode(REPLY.format(arguments), add_special_tokens=False)
        meta = {
            "finish_reason": {"type": "stop"},
            "weight_version": "1",
            "output_token_logprobs": [[-0.5, token_id, None] for token_id in ids],
        }
        return orjson.dumps({"output_ids": ids, "meta_info": meta})


async def serve(latencies: Latencies) -> None:
    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/generate", Script(latencies).generate)
    async with serving(app) as url:
        sys.stdout.write(f"{url}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(Latencies(seed=int(sys.argv[1]), scale=float(sys.argv[2]))))
