"""Tests that devices are leased, act, and are returned. Needs the devices of the pool's file, and Ray.

    python examples/android_world/tests/test_env_pool.py

The file is ``config.yaml`` next to the scripts, or the one in ROLLOUT_BUFFER_ANDROID_WORLD_CONFIG.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from argparse import Namespace
from pathlib import Path

HERE = Path(__file__).resolve()
TASK, SCREENSHOT_HEADERS = "SystemWifiTurnOff", (b"\x89PNG", b"\xff\xd8\xff\xe0")


async def main() -> int:
    """Leases a device, plays two actions, reads the score, returns it, and leases it again."""
    from examples.android_world.env_pool import AndroidWorldEnvPool
    from examples.android_world.env_worker import ParsedAction, parse_ui_action_from_response

    pool = AndroidWorldEnvPool(Namespace())
    device = await pool.acquire()
    logging.info("lent     %s", device.device_id)
    observation = await device.reset(TASK, 0)
    logging.info("task     %s", observation.goal)
    for arguments in ('{"action": "open", "text": "Settings"}', '{"action": "system_button", "button": "Home"}'):
        call = f'<tool_call>{{"name": "mobile_use", "arguments": {arguments}}}</tool_call>'
        parsed = parse_ui_action_from_response(call, observation.screen_width, observation.screen_height)
        assert isinstance(parsed, ParsedAction), parsed
        observation = await device.step(parsed.action)
        assert observation.screenshot.data[:4] in SCREENSHOT_HEADERS
    logging.info("score    %s", await device.score())
    pool.release(device)
    second = await pool.acquire()
    logging.info("again    %s", second.device_id)
    pool.release(second)
    await pool.shutdown()
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parents[3]))
    os.environ.setdefault("ROLLOUT_BUFFER_ANDROID_WORLD_CONFIG", str(HERE.parents[1] / "config.yaml"))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    from slime_plugins.rollout_buffer.errors import RolloutBufferError
    from slime_plugins.rollout_buffer.install_hints import install_extra

    try:
        sys.exit(asyncio.run(main()))
    except RolloutBufferError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except ImportError as error:
        sys.exit(f"{sys.executable} lacks a package ({error}): {install_extra('android')}")
