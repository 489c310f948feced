"""The ``mobile_use`` tool of agents on a phone, as the system prompt describes it.

Other kinds of screens describe the tool differently, with the same name and fields (``miniwob/tool.py``).
``reply_parser.py`` parses the calls.
"""

from __future__ import annotations

from typing import Any

from slime_plugins.rollout_buffer.generator.gui_agent.device_actions import ActionKind, SystemButton

COORDINATE_MAX = 999
"""Coordinates are relative to a screen of 999x999, whatever the device has: the corners are (0, 0) and (999, 999)."""

TOOL_NAME = "mobile_use"

_ACTION_HELP = """What to do on the phone, one of:
* `click`: tap the point `coordinate`.
* `long_press`: hold the point `coordinate` down for `time` seconds.
* `swipe`: drag a finger from `coordinate` to `coordinate2`.
* `type`: enter `text` into the input field that has the focus.
* `answer`: give `text` as the answer to the user's question. This ends the task.
* `system_button`: press `button`.
* `open`: start the app whose name is `text`.
* `wait`: do nothing for `time` seconds, so that the screen can change.
* `terminate`: end the task and report its `status`."""

_POINT = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}

MOBILE_USE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "description": (
            "Operates an Android phone by touch and shows its screen as screenshots.\n"
            f"* The screen is {COORDINATE_MAX}x{COORDINATE_MAX}: x grows from left to right, y from top to bottom.\n"
            "* Apps need a moment to open and to react. If a screenshot shows no change yet, wait and look again.\n"
            "* Aim at the middle of a button, link or icon, not at its edge."
        ),
        "parameters": {
            "type": "object",
            "properties": {
                "action": {"type": "string", "description": _ACTION_HELP, "enum": [kind.value for kind in ActionKind]},
                "coordinate": {
                    **_POINT,
                    "description": "[x, y] of the point. Needed by `click`, `long_press` and `swipe` (its start).",
                },
                "coordinate2": {**_POINT, "description": "[x, y] where a `swipe` ends. Needed by `swipe`."},
                "text": {"type": "string", "description": "Needed by `type`, `answer` and `open`."},
                "time": {"type": "number", "description": "Seconds. Needed by `long_press`; `wait` may have it."},
                "button": {
                    "type": "string",
                    "description": "Needed by `system_button`.",
                    "enum": [button.value for button in SystemButton],
                },
                "status": {"type": "string", "description": "Needed by `terminate`.", "enum": ["success", "failure"]},
            },
            "required": ["action"],
        },
    },
}
