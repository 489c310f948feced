"""The definition of a task: parameters from a seed, a goal in words, a set-up, and success read from the device."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollout_buffer_lab.simulated_phone.device_state.state import DeviceState

Params = Mapping[str, Any]
Success = Callable[[DeviceState, Params, str | None], float]


def no_set_up(state: DeviceState, params: Params, rng: random.Random) -> None:
    """Leaves the device unchanged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One task template under AndroidWorld's name.

    ``make_params`` draws the parameters; ``goal`` is a format string over them. ``set_up`` changes a clean device with
    the same random source afterwards. ``success`` gets state, parameters and the agent's last answer.
    """

    name: str
    step_budget: int
    goal: str
    success: Success
    make_params: Callable[[random.Random], Params] = lambda rng: {}
    set_up: Callable[[DeviceState, Params, random.Random], None] = no_set_up


def rng_for(task_name: str, params_idx: int) -> random.Random:
    """Returns the random source of one variation: the same in every process, on every machine."""
    digest = hashlib.sha256(f"simulated_phone/{task_name}/{params_idx}".encode()).digest()
    return random.Random(int.from_bytes(digest[:8], "big"))


def all_hold(*conditions: bool) -> float:
    """Returns 1.0 if all conditions hold, else 0.0."""
    return 1.0 if all(conditions) else 0.0


def same_text(first: str, second: str) -> bool:
    """Returns True if both are equal apart from case and the blanks around each line."""
    return _bare(first) == _bare(second)


def _bare(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines()).casefold()
