"""Tests that every name of the guides can be imported. Needs neither emulators nor GPUs.

python examples/android_world/tests/test_imports.py
"""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path

NAMES = (
    "examples.android_world.prompts:ANDROID_WORLD_SYSTEM_PROMPT",
    "examples.android_world.prompts:ANDROID_WORLD_TEMPLATE",
    "examples.android_world.prompts:ANDROID_WORLD_TEMPLATE_NO_HIS",
    "examples.android_world.prompts:ANDROID_WORLD_TEMPLATE_STEP",
    "examples.android_world.env_worker:AndroidWorldWorker",
    "examples.android_world.env_worker:parse_ui_action_from_response",
    "examples.android_world.env_worker:rescale_fn",
    "examples.android_world.env_pool:AndroidWorldEnvPool",
    "examples.android_world.env_android_world:AndroidWorldEnv",
    "examples.android_world.env_android_world:build_env",
    "examples.android_world.rollout:generate",
    "examples.android_world.rollout_history:generate",
    "slime.rollout.agent_rollout:generate_rollout",
    "slime.rollout.agent_rollout:post_process_rewards",
)


def main() -> int:
    """Imports every name and prints failures; returns 1 if there are any."""
    is_complete = True
    for name in NAMES:
        module, _, attribute = name.partition(":")
        try:
            getattr(importlib.import_module(module), attribute)
            logging.info("ok       %s", name)
        except (ImportError, AttributeError) as error:
            is_complete = False
            logging.error("missing  %s: %s", name, error)
    return 0 if is_complete else 1


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    sys.exit(main())
