"""The loop of slime's ``train_async.py`` without the training; runs in a slime checkout with our files laid over it.

    python -m benchmarks.fully_async_trainer '{"side": "slime", "seed": 1, ...}'

With ``"side": "slime"``, slime's own ``fully_async_rollout`` collects the batches; with ``"buffer"``, ``agent_rollout``
does, from a server that runs already. The next rollout is requested before a step, and awaited before the weights get
their next version. The sglang packages, which need a GPU, are mocks; episodes and training steps are sleeps. Prints one
JSON object: the times, the size of the first batch, and each trained member with its instance, slot and weight lag.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

for name in ("sglang", "sglang.srt", "sglang.srt.constants", "sglang_router"):
    sys.modules.setdefault(name, MagicMock(name=name))

from benchmarks.sleeping_episodes import SleepingEpisode  # noqa: E402 - sglang is replaced before slime is imported
from slime.rollout.data_source import (  # type: ignore[import-not-found]  # noqa: E402 - slime's own, in its checkout
    RolloutDataSourceWithBuffer,
)
from slime.utils.types import Sample  # noqa: E402 - as above

CELL: dict[str, Any] = {}
"""The settings of this run. They are global, because slime calls ``generate``, found by its path, without them."""


async def generate(args: Namespace, sample: Any, sampling_params: Any) -> Any:
    """slime's ``--custom-generate-function-path``: sleeps as long as the episode lasts."""
    instance, slot = sample.group_index, sample.index % args.n_samples_per_prompt
    version = read_version()
    episode = SleepingEpisode.of(CELL["seed"], CELL["sigma"], instance, slot)
    await asyncio.sleep(episode.seconds)
    if episode.fails:
        raise RuntimeError(f"member {slot} of instance {instance} always fails")
    sample.tokens, sample.response_length = [1, 2, 3] + [7] * episode.tokens, episode.tokens
    sample.loss_mask, sample.rollout_log_probs = [1] * episode.tokens, [-0.5] * episode.tokens
    sample.reward, sample.status = episode.reward, Sample.Status.COMPLETED
    sample.metadata = {"instance_id": str(instance), "member": slot, "version": version}
    return sample


def read_version() -> int:
    """Returns the trainer's weight version."""
    return int(Path(CELL["version_file"]).read_text(encoding="utf-8"))


def write_version(version: int) -> None:
    """Gives the weights their next version, for episodes that begin from now on."""
    path = Path(CELL["version_file"])
    path.with_suffix(".new").write_text(str(version), encoding="utf-8")
    path.with_suffix(".new").replace(path)


class Engine(BaseHTTPRequestHandler):
    """Answers what a trainer asks its engine: its weight version."""

    def do_GET(self) -> None:
        """Answers every path alike."""
        body = json.dumps({"weight_version": str(read_version()), "model_path": "none"}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Writes no line for each request."""


def arguments(engine_port: int) -> Namespace:
    """Returns the arguments that both rollout functions read."""
    return Namespace(
        rollout_batch_size=CELL["groups"],
        n_samples_per_prompt=CELL["members"],
        global_batch_size=CELL["groups"] * CELL["members"],
        rollout_global_dataset=True,
        prompt_data=CELL["prompts"],
        num_epoch=1,
        rollout_shuffle=False,
        buffer_filter_path=None,
        save=CELL["folder"],
        load=None,
        hf_checkpoint=CELL["tokenizer"],
        sglang_server_concurrency=CELL["concurrency"],
        rollout_num_engines=1,
        sglang_dp_size=1,
        sglang_router_ip="127.0.0.1",
        sglang_router_port=engine_port,
        rollout_temperature=1.0,
        rollout_top_p=1.0,
        rollout_top_k=-1,
        rollout_max_response_len=65536,
        rollout_stop=None,
        rollout_stop_token_ids=None,
        rollout_skip_special_tokens=True,
        partial_rollout=False,
        group_rm=False,
        custom_generate_function_path="benchmarks.fully_async_trainer.generate" if CELL["side"] == "slime" else None,
        advantage_estimator="grpo",
        rewards_normalization=True,
        grpo_std_normalization=True,
        custom_reward_post_process_path="slime.rollout.agent_rollout.post_process_rewards",
        reward_key=None,
        loss_mask_type="qwen",
        fetch_trajectory_retry_times=3,
        rollout_buffer_url=CELL["buffer_url"],
        rollout_task_type="sleeping",
        rollout_num_process=CELL["concurrency"],
        rollout_buffer_options={
            "sleeping": {key: CELL[key] for key in ("seed", "sigma", "version_file")},
            **CELL["options"],
        },
    )


def members_of(samples: Any) -> list[Any]:
    """Returns the samples of a batch that are trained, however deep it is nested."""
    if isinstance(samples, list):
        return [sample for entry in samples for sample in members_of(entry)]
    return [] if samples.remove_sample else [samples]


def train() -> dict[str, Any]:
    """Collects the batches; returns the trained members, the times of the batches, and the size of the first."""
    write_version(0)
    engine = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    threading.Thread(target=engine.serve_forever, daemon=True).start()
    args = arguments(engine.server_address[1])
    source = RolloutDataSourceWithBuffer(Namespace(**{**vars(args), "prompt_data": None}))
    if CELL["side"] == "slime":
        from slime.rollout.fully_async_rollout import (  # type: ignore[import-not-found]  # slime's own
            generate_rollout_fully_async as generate_rollout,
        )
    else:
        from slime.rollout.agent_rollout import generate_rollout
    trained: list[tuple[int, int, int]] = []
    arrived_s: list[float] = []
    first_batch_size = 0
    began = time.monotonic()
    with ThreadPoolExecutor(max_workers=1) as rollouts:
        next_rollout = rollouts.submit(generate_rollout, args, 0, source)
        for step in range(CELL["steps"]):
            batch = next_rollout.result()
            arrived_s.append(time.monotonic() - began)
            if step + 1 < CELL["steps"]:
                next_rollout = rollouts.submit(generate_rollout, args, step + 1, source)
            for sample in members_of(getattr(batch, "samples", batch)):
                metadata = sample.metadata
                trained.append((int(metadata["instance_id"]), metadata["member"], step - metadata["version"]))
            first_batch_size = first_batch_size or len(trained)
            time.sleep(CELL["step_s"])
            if step + 1 < CELL["steps"]:
                next_rollout.result()
            write_version(step + 1)
    return {"trained": trained, "arrived_s": arrived_s, "first_batch_size": first_batch_size}


if __name__ == "__main__":
    import benchmarks.fully_async_trainer as imported  # slime imports ``generate`` from there

    imported.CELL.update(json.loads(sys.argv[1]))
    sys.stdout.write("\n" + json.dumps(imported.train()) + "\n")
    sys.stdout.flush()
    os._exit(0)  # slime's worker would wait half a minute for its episodes
