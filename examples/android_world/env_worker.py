"""The reply parser and the device worker, under the names of the guides."""

from slime_plugins.rollout_buffer.devices.worker import DeviceWorker as AndroidWorldWorker
from slime_plugins.rollout_buffer.generator.gui_agent.reply_parser import (
    MalformedAction,
    ParsedAction,
    parse_reply,
    to_pixels,
)

__all__ = ["AndroidWorldWorker", "MalformedAction", "ParsedAction", "parse_ui_action_from_response", "rescale_fn"]

SCREEN = (1080, 2400)


def parse_ui_action_from_response(
    response: str, screen_width: int = SCREEN[0], screen_height: int = SCREEN[1]
) -> ParsedAction | MalformedAction:
    """Returns the action in the reply's ``<tool_call>``, in pixels, or the reason why there is none; never raises."""
    return parse_reply(response, screen_width=screen_width, screen_height=screen_height).action


def rescale_fn(
    coordinate: tuple[float, float], screen_width: int = SCREEN[0], screen_height: int = SCREEN[1]
) -> tuple[int, int]:
    """Returns the pixel of a point in the model's 999x999 space: (999, 999) is the last pixel."""
    return to_pixels(coordinate, screen_width, screen_height)
