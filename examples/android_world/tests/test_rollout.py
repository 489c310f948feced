"""Tests that an episode with a model becomes a training row. Needs devices, and an SGLang server of the model.

    SLIME_TEST_MODEL=/root/models/Qwen3-VL-8B-Instruct SLIME_TEST_SGLANG_PORT=30000 \
        python examples/android_world/tests/test_rollout.py

SLIME_TEST_SGLANG_HOST names the server's host. Devices as in ``test_env_pool.py``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from argparse import Namespace
from pathlib import Path

HERE = Path(__file__).resolve()
SAMPLING = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "max_new_tokens": 512, "stop": None}


async def main(model: str, host: str, port: int) -> int:
    """Plays one episode in each mode and checks the result; returns 1 if an episode failed."""
    from examples.android_world import rollout, rollout_history
    from slime.utils.types import Sample
    from slime_plugins.rollout_buffer.generator.android_world.custom_generate import close_resources

    args = Namespace(
        hf_checkpoint=model, sglang_router_ip=host, sglang_router_port=port, max_turns=3, n_samples_per_prompt=1
    )
    passed = True
    for name, generate in (("incremental", rollout.generate), ("history", rollout_history.generate)):
        metadata = {"task_name": "SystemWifiTurnOff", "params_idx": 0}
        samples = await generate(args, Sample(index=0, prompt="", metadata=metadata), dict(SAMPLING))
        for sample in samples if isinstance(samples, list) else [samples]:
            mask = sample.loss_mask or []
            passed = passed and not sample.remove_sample and sum(mask) > 0 and len(mask) == sample.response_length
            facts = (name, sample.status.value, len(sample.tokens), sum(mask), sample.reward)
            logging.info("%s: %s, %d tokens, %d trained, reward %s", *facts)
    await close_resources()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parents[3]))
    os.environ.setdefault("ROLLOUT_BUFFER_ANDROID_WORLD_CONFIG", str(HERE.parents[1] / "config.yaml"))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    wanted = ("SLIME_TEST_MODEL", "SLIME_TEST_SGLANG_PORT")
    if not all(os.environ.get(variable) for variable in wanted):
        sys.exit(f"set {' and '.join(wanted)}: a model's folder, and the port of an SGLang server of it")
    host = os.environ.get("SLIME_TEST_SGLANG_HOST", "127.0.0.1")
    from slime_plugins.rollout_buffer.errors import RolloutBufferError
    from slime_plugins.rollout_buffer.install_hints import install_extra

    try:
        sys.exit(asyncio.run(main(os.environ[wanted[0]], host, int(os.environ[wanted[1]]))))
    except RolloutBufferError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except ImportError as error:
        sys.exit(f"{sys.executable} lacks a package ({error}): {install_extra('android')}")
