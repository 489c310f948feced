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
    found = asyncio.run(measured(options.turns, options.rounds, options.turn_seconds))
    Console().print_json(data=found)
    if options.json is not None:
        options.json.write_text(json.dumps(found), encoding="utf-8")


async def measured(turns: int, rounds: int, turn_s: float) -> dict[str, Any]:
    """Returns the seconds of a turn in each round, by prompt: with and without the check."""
    checker = PromptChecker(load_tokenizer(str(DEMO_TOKENIZER_PATH)))
    found = {}
    for name, (sent, ran, images) in prompts(checker.placeholder_id or 0).items():
        request = GenerateRequest(
            input_ids=sent, sampling_params=SamplingParams(max_new_tokens=SAMPLED), session_id="one", images=images
        )
        seconds: dict[str, list[float]] = {"compared": [], "blind": []}
        async with TestServer(server(ran, turn_s)) as running:
            compared = SglangEngine(str(running.make_url("/told")), prompts=checker)
            blind = BlindEngine(str(running.make_url("/untold")))
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
                for contender, taken in of_round.items():
                    seconds[contender].append(statistics.median(taken))
            await compared.close()
            await blind.close()
        found[name] = seconds
    return {"turn_seconds": turn_s, "prompts": found}


def prompts(placeholder: int) -> dict[str, tuple[list[int], list[int], tuple[Image, ...]]]:
    """Returns, by name, the ids sent, the ids run, and the images."""
    text = [1000 + at % 20_000 for at in range(TEXT_IDS)]
    sent, ran = [], []
    for number in range(IMAGES):
        around = [1000 + number] * 20
        sent += [*around, placeholder]
        ran += [*around, *[placeholder] * IMAGE_TOKENS]
    images = tuple(Image(data=bytes([number]) * IMAGE_BYTES) for number in range(IMAGES))
    return {f"{TEXT_IDS:,} ids of text": (text, text, ()), f"{IMAGES} images, {len(ran):,} ids": (sent, ran, images)}


def server(ran: Sequence[int], turn_s: float) -> web.Application:
    """Answers ``/told/generate`` with the ids run, ``/untold/generate`` without."""
    meta = {
        "finish_reason": {"type": "stop"},
        "weight_version": "1",
        "prompt_tokens": len(ran),
        "output_token_logprobs": [[-0.5, token_id, None] for token_id in range(SAMPLED)],
    }
    reply = {"output_ids": list(range(SAMPLED)), "meta_info": meta}
    bodies = {"told": orjson.dumps(reply | {"prompt_token_ids": list(ran)}), "untold": orjson.dumps(reply)}

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(turn_s)
        return web.Response(body=bodies[request.match_info["kind"]], content_type="application/json")

    application = web.Application(client_max_size=1 << 28)
    application.router.add_post("/{kind}/generate", generate)
    return application


if __name__ == "__main__":
    main()
