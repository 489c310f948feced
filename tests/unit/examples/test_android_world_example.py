"""What guides to Android World name lies in ``examples/android_world/``, is thin, and does what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples.android_world.env_android_world import AndroidWorldEnv
from examples.android_world.env_worker import ParsedAction, parse_ui_action_from_response
from examples.android_world.prompts import (
    ANDROID_WORLD_SYSTEM_PROMPT,
    ANDROID_WORLD_TEMPLATE,
    ANDROID_WORLD_TEMPLATE_NO_HIS,
    ANDROID_WORLD_TEMPLATE_STEP,
)
from slime_plugins.rollout_buffer.devices.interface import Observation
from slime_plugins.rollout_buffer.types import Image

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "android_world"
NAMED = (
    *("README.md", "__init__.py", "config.yaml", "cleanup.sh", "multi_node_ray_start.sh"),
    *("env_android_world.py", "env_pool.py", "env_worker.py", "prompts.py", "rollout.py", "rollout_history.py"),
    *("run_android_world.py", "run_android_world.sh", "run_android_world_history.sh", "run_android_world_opt.sh"),
    *("data/generate_tasks.py", "data/task_list.txt", "data/tasks.jsonl"),
    *("tests/test_env_pool.py", "tests/test_imports.py", "tests/test_rollout.py"),
)


@pytest.mark.parametrize("name", NAMED)
def test_what_a_guide_names_is_there(name: str) -> None:
    assert (EXAMPLE / name).is_file()
    assert (
        name in ("README.md", "__init__.py")
        or name.startswith(("data/", "tests/"))
        or f"`{name}`" in (EXAMPLE / "README.md").read_text(encoding="utf-8")
    )


@pytest.mark.parametrize("name", ["test_env_pool.py", "test_rollout.py"])
def test_a_script_in_a_python_without_the_packages_says_what_to_install(name: str) -> None:
    environment = {"SLIME_TEST_MODEL": "m", "SLIME_TEST_SGLANG_PORT": "1"}
    command = [sys.executable, "-S", str(EXAMPLE / "tests" / name)]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 1
    assert "lacks a package (No module named" in ended.stderr
    assert "[android]'" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_templates_take_the_documented_fields() -> None:
    first = ANDROID_WORLD_TEMPLATE_NO_HIS.format(task_description="Add a contact.")
    later = ANDROID_WORLD_TEMPLATE_STEP.format(current_step=2, max_steps=10)
    whole = ANDROID_WORLD_TEMPLATE.format(
        task_description="Add a contact.", step_count=1, action_history="Step 1: Opened Contacts.", current_step=2
    )

    assert first.startswith("The user query: Add a contact.\n\nBefore answering, explain your reasoning step-by-step")
    assert first.endswith("\n\n<image>")
    assert later == "Step 2 of 10: <image>"
    assert whole.startswith(
        "The user query: Add a contact.\n\nTask progress (You have done the following 1 operations "
    )
    assert "Step 1: Opened Contacts.\n\nBefore answering," in whole
    assert whole.endswith("\n\nStep 2: <image>")
    assert ANDROID_WORLD_SYSTEM_PROMPT.startswith("You are a helpful assistant.\n\n# Tools\n\n")


ARGUMENTS = [
    {"action": "click", "coordinate": [500, 300]},
    {"action": "long_press", "coordinate": [500, 300], "time": 2},
    {"action": "swipe", "coordinate": [500, 800], "coordinate2": [500, 200]},
    {"action": "type", "text": "Hello"},
    {"action": "open", "text": "Chrome"},
    {"action": "system_button", "button": "Back"},
    {"action": "wait", "time": 2},
    {"action": "wait"},
    {"action": "terminate", "status": "success"},
    {"action": "answer", "text": "42"},
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=lambda arguments: str(arguments["action"]))
def test_every_documented_action_is_read(arguments: dict[str, object]) -> None:
    call = json.dumps({"name": "mobile_use", "arguments": arguments})
    reply = f"<thinking>\nI see it.\n</thinking>\n<tool_call>\n{call}\n</tool_call>\n<conclusion>\nDone.\n</conclusion>"
    parsed = parse_ui_action_from_response(reply)

    assert isinstance(parsed, ParsedAction)
    assert parsed.action.kind == arguments["action"]


def test_an_observation_in_the_published_shape_has_the_image_first_and_its_place_in_the_whole_text() -> None:
    env = object.__new__(AndroidWorldEnv)
    seen = Observation(goal="Turn Wi-Fi on.", screenshot=Image(data=b"png"), screen_width=1080, screen_height=2400)
    pictures = {"image": [object()]}
    observation = {"seen": seen, "step": 1, "max_steps": 10, "multi_modal_data": pictures}
    first = env.format_observation(observation, is_initial=True)
    assert first == {
        "role": "user",
        "content": [
            {"type": "image", "image": pictures["image"][0]},
            {"type": "text", "text": ANDROID_WORLD_TEMPLATE_NO_HIS.format(task_description="Turn Wi-Fi on.")},
        ],
    }
    later = env.format_observation({**observation, "step": 2}, is_initial=False)
    assert [part["type"] for part in later["content"]] == ["image", "text"]
    assert later["content"][1]["text"] == "Step 2 of 10: <image>"
