"""The ``mobile_use`` tool for web pages; the actions of all screen agents are in ``gui_agent/device_actions.py``.

Name and fields are those of the phone's tool. Actions that only a phone has are left out.
"""

from __future__ import annotations

import copy
from typing import Any

from slime_plugins.rollout_buffer.generator.gui_agent.mobile_use import COORDINATE_MAX, MOBILE_USE_TOOL

_ACTION_HELP = """What to do on the page, one of:
* `click`: tap the point `coordinate`.
* `long_press`: hold the point `coordinate` down for `time` seconds.
* `swipe`: move a finger from `coordinate` to `coordinate2`. It scrolls where the page can scroll, and drags elsewhere.
* `type`: enter `text` where the focus is: tap an input field first. Where an option is chosen from a list, its name.
* `system_button`: press the key `button`.
* `wait`: do nothing for `time` seconds, so that the page can change.
* `answer`: give `text` as the answer to the user's question. This ends the task.
* `terminate`: end the task and report its `status`."""

_ONLY_ON_PHONES = {"open"}


def _web_page_tool() -> dict[str, Any]:
    tool = copy.deepcopy(MOBILE_USE_TOOL)
    function = tool["function"]
    function["description"] = (
        "Operates a web page by touch and shows it as it is now.\n"
        f"* The screen is {COORDINATE_MAX}x{COORDINATE_MAX}: x grows from left to right, y from top to bottom.\n"
        "* The task is over as soon as the page has seen its end, right or wrong: look before you tap.\n"
        "* Aim at the middle of a button, link or field, not at its edge."
    )
    properties = function["parameters"]["properties"]
    action = properties["action"]
    action["description"] = _ACTION_HELP
    action["enum"] = [name for name in action["enum"] if name not in _ONLY_ON_PHONES]
    properties["text"]["description"] = "Needed by `type` and `answer`."
    properties["button"]["enum"] = ["Enter"]
    return tool


WEB_PAGE_TOOL = _web_page_tool()
