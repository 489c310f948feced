"""Formats the elements of a page as text, for language-only agents."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from slime_plugins.rollout_buffer.generator.gui_agent.mobile_use import COORDINATE_MAX
from slime_plugins.rollout_buffer.generator.miniwob.config import POINTS


def in_words(elements: Iterable[Mapping[str, Any]]) -> str:
    """Returns one line for each element: number, kind, attributes, states, and box.

    A box is in the agent's coordinates: ``[left, top, right, bottom]``, from 0 to 999.
    """
    return "\n".join(f"{number}. {_line(element)}" for number, element in enumerate(elements, start=1))


def _line(element: Mapping[str, Any]) -> str:
    facts = {name: element[name] for name in ("id", "name", "classes") if element[name]} | element["facts"]
    if element["text"]:
        facts = {"text": element["text"], **facts}
    states = [state for state in ("focused", "disabled") if element[state]]
    attributes = [f"{name}={json.dumps(fact, ensure_ascii=False)}" for name, fact in facts.items()]
    return " ".join([element["kind"], *attributes, *states, json.dumps(_scaled(element["box"]))])


def _scaled(box: Iterable[float]) -> list[int]:
    """Converts a box from CSS points to the agent's coordinates, clipped to the screen."""
    sizes = (*POINTS, *POINTS)
    return [
        min(max(round(edge / size * COORDINATE_MAX), 0), COORDINATE_MAX) for edge, size in zip(box, sizes, strict=True)
    ]
