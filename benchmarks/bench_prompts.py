"""Overhead of the prompt check: comparing a turn's prompt, id by id, with the ids that the engine ran.

    python -m benchmarks.bench_prompts --json prompts.json

The same client with and without the check, alternating, against a server with the latency of a short reply that returns
canned bytes: with the ids of the prompt, or without.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console

from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.engine.base import GenerateReply, GenerateRequest
from slime_plugins.rollout_buffer.engine.prompt_check import PromptChecker
from slime_plugins.rollout_buffer.engine.sglang import SglangEngine
from slime_plugins.rollout_buffer.engine.sglang_protocol import SampledPart
from slime_plugins.rollout_buffer.tokenizer_loading import load_tokenizer
from slime_plugins.rollout_buffer.types import Image, PromptCheck, SamplingParams

TEXT_IDS = 32_000
IMAGES, IMAGE_TOKENS, IMAGE_BYTES = 25, 930, 100_000
SAMPLED = 100


class BlindEngine(SglangEngine):
    """The client without the check."""

    async def _with_receipt(
        self, request: GenerateRequest, parts: Sequence[SampledPart], reply: GenerateReply
    ) -> GenerateReply:
        return reply


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turn-seconds", type=float, default=0.5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = asyncio.run(measure(options.turns, options.rounds, options.turn_seconds))
    Console().print_json(data=results)
    if options.json is not None:
        options.json.write_text(json.dumps(results), encoding="utf-8")


async def measure(turns: int, rounds: int, turn_s: float) -> dict[str, Any]:
    """Returns the seconds of a turn in each round, by prompt: with and without the check."""
    checker = PromptChecker(load_tokenizer(str(DEMO_TOKENIZER_PATH)))
    results = {}
    for name, (sent, run, images) in prompts(checker.placeholder_id or 0).items():
        request = GenerateRequest(
            input_ids=sent, sampling_params=SamplingParams(max_new_tokens=SAMPLED), session_id="one", images=images
        )
        seconds: dict[str, list[float]] = {"compared": [], "blind": []}
        async with TestServer(server(run, turn_s)) as running:
            compared = SglangEngine(str(running.make_url("/with_ids")), prompts=checker)
            blind = BlindEngine(str(running.make_url("/without_ids")))
            reply = await compared.generate(request)
            assert reply.prompt_receipt is not None
            assert reply.prompt_receipt.check is PromptCheck.EQUAL
            for _ in range(rounds):
                of_round: dict[str, list[float]] = {"compared": [], "blind": []}
                for _ in range(turns):
                    for contender, engine in (("compared", compared), ("blind", blind)):
                        begun = time.perf_counter()
                        await engine.generate(request)
                        of_round[contender].append(time.perf_counter() - begun)
                for contender, times in of_round.items():
                    seconds[contender].append(statistics.median(times))
            await compared.close()
            await blind.close()
        results[name] = seconds
    return {"turn_seconds": turn_s, "prompts": results}


def prompts(placeholder: int) -> dict[str, tuple[list[int], list[int], tuple[Image, ...]]]:
    """Returns, by name, the ids sent, the ids run, and the images."""
    text = [1000 + index % 20_000 for index in range(TEXT_IDS)]
    sent, run = [], []
    for number in range(IMAGES):
        text_ids = [1000 + number] * 20
        sent += [*text_ids, placeholder]
        run += [*text_ids, *[placeholder] * IMAGE_TOKENS]
    images = tuple(Image(data=bytes([number]) * IMAGE_BYTES) for number in range(IMAGES))
    return {f"{TEXT_IDS:,} ids of text": (text, text, ()), f"{IMAGES} images, {len(run):,} ids": (sent, run, images)}


def server(run: list[int], turn_s: float) -> web.Application:
    """Answers ``/with_ids/generate`` with the ids run, ``/without_ids/generate`` without."""
    meta = {
        "finish_reason": {"type": "stop"},
        "weight_version": "1",
        "prompt_tokens": len(run),
        "output_token_logprobs": [[-0.5, token_id, None] for token_id in range(SAMPLED)],
    }
    reply = {"output_ids": list(range(SAMPLED)), "meta_info": meta}
    bodies = {"with_ids": orjson.dumps(reply | {"prompt_token_ids": run}), "without_ids": orjson.dumps(reply)}

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(turn_s)
        return web.Response(body=bodies[request.match_info["kind"]], content_type="application/json")

    application = web.Application(client_max_size=1 << 28)
    application.router.add_post("/{kind}/generate", generate)
    return application


if __name__ == "__main__":
    main()
