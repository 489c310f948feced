"""The capabilities that each task of AndroidWorld needs, and the tasks that a device can play.

``task_needs.json`` has one row per task, derived from the package's source; a test compares it with the package.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from functools import cache
from importlib import resources

from slime_plugins.rollout_buffer.devices.capabilities import Capability
from slime_plugins.rollout_buffer.generator.android_world.device_kinds import DeviceCheck

# The base class of the package's tasks sets the clock, as root.
_NEEDS_OF_OTHER_TASKS = frozenset({Capability.CLOCK, Capability.ROOT})
_MAX_NAMES = 8


@cache
def task_needs() -> Mapping[str, frozenset[Capability]]:
    """Returns what each of the 116 tasks needs in its set-up, score and tear-down."""
    text = resources.files(__package__).joinpath("task_needs.json").read_text("utf-8")
    return {name: frozenset(map(Capability, needs)) for name, needs in json.loads(text).items()}


def needs_of(task_name: str) -> frozenset[Capability]:
    """Returns what a task needs; for a task of another package, what the package's base class of tasks needs."""
    return task_needs().get(task_name, _NEEDS_OF_OTHER_TASKS)


def missing(task_name: str, capabilities: Collection[Capability]) -> list[Capability]:
    """Returns what a connected device with these capabilities lacks for a task."""
    return sorted(needs_of(task_name).difference(capabilities))


def playable(capabilities: Collection[Capability]) -> list[str]:
    """Returns the tasks that a connected device with these capabilities can play."""
    return [name for name in task_needs() if not missing(name, capabilities)]


def check_of_tasks(check_name: str, capabilities: Collection[Capability]) -> DeviceCheck:
    """Returns doctor's line: how many tasks the device can play, and which tasks each missing capability excludes."""
    tasks = playable(capabilities)
    parts = [f"plays {_listed(tasks)} of the {len(task_needs())} tasks"]
    for capability in sorted(set(Capability) - set(capabilities)):
        excluded = [task for task, needs in task_needs().items() if capability in needs]
        parts += [f"{capability} is missing for {_listed(excluded)}"] if excluded else []
    return DeviceCheck(
        name=check_name,
        passed=bool(tasks),
        detail="; ".join(parts),
        remedy="give the device what is missing, or take it out of the inventory",
    )


def _listed(names: list[str]) -> str:
    """Returns the number of tasks, with names unless it is none or all of them. Of many, the first two are named."""
    if not names or len(names) == len(task_needs()):
        return str(len(names))
    return f"{len(names)} ({', '.join(names if len(names) <= _MAX_NAMES else [*names[:2], '…'])})"
