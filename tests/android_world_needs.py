"""Derives the needs of each task from the source of the installed package ``android_world``, as JSON.

Run with a Python that has the package. Follows, from each task's methods, every function of the package that they name.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

NEEDS = {
    "_set_datetime": "clock",
    "advance_system_time": "clock",
    "set_root_if_needed": "root",
    "pull_file": "root",  # a method of the controller, by tmp_directory_from_device
    "text_emulator": "sms",
    "call_emulator": "sms",
    "ui_elements": "accessibility",
    "forest": "accessibility",
    "find_and_click_element": "accessibility",
    # What only the forwarder tells: `uiautomator dump` writes no hints, and refuses while a screen moves.
    "hint_text": "grpc",
    "_is_stopwatch_running": "grpc",
}
"""Names in the package by which a function needs something."""
METHODS = ("__init__", "initialize_task", "is_successful", "tear_down")


def names_in(code: CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(names_in, inner))


def function_of(value: Any) -> FunctionType | None:
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    is_own = isinstance(value, FunctionType) and value.__module__.startswith("android_world")
    return value if is_own else None


def called_by(function: FunctionType, names: set[str], owner: type | None) -> Iterator[tuple[Any, type | None]]:
    """Yields functions and classes that these names may mean, with the task that a method belongs to."""
    named = [function.__globals__[name] for name in names if name in function.__globals__]
    modules = [value for value in named if isinstance(value, ModuleType)]
    named += [getattr(module, name) for module in modules for name in names if hasattr(module, name)]
    enclosed = [cell.cell_contents for cell in function.__closure__ or ()]
    named += [value for value in enclosed if isinstance(value, FunctionType)]  # not the class that super() encloses
    named += [getattr(function, "__wrapped__", None)]  # of a decorator
    yield from ((value, None) for value in named)
    if owner is not None:
        places = [type_.__dict__ for type_ in owner.__mro__]
        at = next((n for n, place in enumerate(places) if function in map(function_of, place.values())), 0)
        above = places[at + 1 :] if "super" in names else []
        for name in names:
            for searched in (places, above):
                yield next((place[name] for place in searched if name in place), None), owner


def needs_of(task: type) -> set[str]:
    needs: set[str] = set()
    seen: set[Any] = set()
    waiting: list[tuple[Any, type | None]] = [(task, None)]
    while waiting:
        value, owner = waiting.pop()
        # The task, or one that it plays as its part. Tasks of information retrieval are made by ``type``.
        if inspect.isclass(value) and (value is task or value.__module__.startswith("android_world.task_evals")):
            methods = [(getattr(value, name), value) for name in METHODS if hasattr(value, name)]
            waiting += methods if value not in seen else []
            seen.add(value)
        elif (function := function_of(value)) is not None and (function, owner) not in seen:
            seen.add((function, owner))
            names = names_in(function.__code__)
            needs |= {NEEDS[name] for name in names if name in NEEDS}
            waiting += called_by(function, names, owner)
    return needs


if __name__ == "__main__":
    from android_world import registry  # only in the device workers' Python

    tasks = registry.TaskRegistry().get_registry("android_world")
    print(json.dumps({name: sorted(needs_of(task)) for name, task in sorted(tasks.items())}))  # noqa: T201
