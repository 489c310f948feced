"""A task for a tiny policy that reads: tap the one of three fields that a web page asks for.

    user: Focus into the 2nd input textbox. [three fields, each with its box]    assistant: click [131, 437]

It is MiniWoB++'s page ``focus-text-2``, played by the MiniWoB++ generator in a headless Chromium, with its elements in
words. The fields stand elsewhere on every page. The page scores: 1 for the field that was asked for, -1 for another
one, 0 for a tap on none of them. The prompt is the generator's own; its fixed parts are single tokens of the policy.

Needs the extra ``miniwob`` and a Chromium.
"""

from __future__ import annotations

import random
import re
from typing import Any

from slime_plugins.rollout_buffer.devices.local_pool import LocalDevicePool
from slime_plugins.rollout_buffer.devices.settings import PoolKind
from slime_plugins.rollout_buffer.generator.gui_agent.prompting.context import View
from slime_plugins.rollout_buffer.generator.gui_agent.prompting.prompts import (
    PromptObservation,
    first_turn_message,
    system_prompt,
)
from slime_plugins.rollout_buffer.generator.gui_agent.settings import ObservationMode
from slime_plugins.rollout_buffer.generator.miniwob.browser import find_chromium
from slime_plugins.rollout_buffer.generator.miniwob.config import load_settings
from slime_plugins.rollout_buffer.generator.miniwob.elements import in_words
from slime_plugins.rollout_buffer.generator.miniwob.package import find_pages
from slime_plugins.rollout_buffer.generator.miniwob.tool import WEB_PAGE_TOOL
from slime_plugins.rollout_buffer.generator.miniwob_generator import MiniWobGenerator
from slime_plugins.rollout_buffer.types import Message

TASK_TYPE = "miniwob_page"
REWARD_RANGE = (-1.0, 1.0)
MAX_NEW_TOKENS = 14
"""Longest reply: a tap is eleven tokens."""
PAGE = "focus-text-2"
PAGES = 8
"""How many pages are open at once, in one browser."""
FIELDS = ("1st", "2nd", "3rd")
LEFT, GAP, WIDTH, HEIGHT = (7, 21), (5, 29), 128, 21
"""Where the page puts its fields, in points: ranges of the left edge and of the gap between two fields; their size."""
RIGHT_AT_FIRST = 0.6
"""How often the scripted player taps the field that was asked for."""
WARM_UP_EPISODES = 2000
WARM_UP = {"updates": 400, "batch": 32, "learning_rate": 2e-3}
MODES = {"elements": {"miniwob": {"observation": ObservationMode.ELEMENTS.value, "max_turns": 1}}}

_CLICK = '<tool_call>\n{"name": "mobile_use", "arguments": {"action": "click", "coordinate": ['
_CLICK_END = "]}}\n</tool_call>"
_BOX = re.compile(r"\[(\d+), (\d+), (\d+), (\d+)\]")


def _fixed_parts() -> list[str]:
    """Returns the texts around the goal and the elements, which are the same in every first prompt."""
    (part,) = first_turn_message("@", PromptObservation(elements="@"))["content"]
    return [text for text in part["text"].split("@") if len(text) > 1]


PHRASES = (
    system_prompt(WEB_PAGE_TOOL),
    *_fixed_parts(),
    *(f'. input text id="tt{place}" value="" [' for place in range(1, len(FIELDS) + 1)),
    _CLICK,
    _CLICK_END,
)
"""Texts that are one token each."""


def create_generator() -> MiniWobGenerator:
    """Returns the MiniWoB++ generator on pages of its own.

    Raises:
        ConfigError: MiniWoB++ or Chromium is missing; the message names the package to install.
    """
    find_pages()
    settings = load_settings({})
    find_chromium(settings.chromium)
    overrides = {"device_pool": PoolKind.LOCAL, "num_workers": PAGES, "boots_at_once": PAGES, "pixels_per_point": 1}
    return MiniWobGenerator(LocalDevicePool(settings.model_copy(update=overrides).for_devices()))


def instances(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Returns that many input lines: seeds of the page."""
    return [{"metadata": {"task_name": PAGE, "params_idx": rng.randrange(2**31)}} for _ in range(count)]


def warm_up_traces(rng: random.Random) -> list[list[Message]]:
    """Returns conversations of a player who taps the middle of a field, in six of ten episodes of the one asked for.

    Their pages are made up, in the page's own form, so that no browser is needed for thousands of them.
    """
    return [_trace(rng) for _ in range(WARM_UP_EPISODES)]


def _trace(rng: random.Random) -> list[Message]:
    boxes, top = [], 50
    for _ in FIELDS:
        left, top = rng.randint(*LEFT), top + rng.randint(*GAP)
        boxes.append((left, top, left + WIDTH, top + HEIGHT))
        top += HEIGHT
    target = rng.randrange(len(FIELDS))
    wrong = [field for field in range(len(FIELDS)) if field != target]
    field = {"kind": "input text", "name": "", "classes": "", "text": "", "focused": False, "disabled": False}
    elements = in_words(
        {**field, "id": f"tt{place}", "facts": {"value": ""}, "box": box} for place, box in enumerate(boxes, start=1)
    )
    tapped = target if rng.random() < RIGHT_AT_FIRST else rng.choice(wrong)
    left, top, right, bottom = map(int, _BOX.findall(elements)[tapped])
    return [
        View(tool=WEB_PAGE_TOOL).system(),
        first_turn_message(f"Focus into the {FIELDS[target]} input textbox.", PromptObservation(elements=elements)),
        {"role": "assistant", "content": f"{_CLICK}{(left + right) // 2}, {(top + bottom) // 2}{_CLICK_END}"},
    ]
