"""Finds the pages of MiniWoB++ in the package ``miniwob``, without importing it.

An import would load Selenium and Gymnasium; only its HTML files are needed.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from slime_plugins.rollout_buffer.errors import ConfigError, EnvironmentSetupError
from slime_plugins.rollout_buffer.install_hints import install_extra

NOT_PLAYED = {
    "flight.AA": "an airline's whole site in a frame, which a browser shows only from a web server",
    "flight.Alaska": "an airline's whole site in a frame, which a browser shows only from a web server",
    "flight.Alaska-auto": "an airline's whole site in a frame, which a browser shows only from a web server",
    "flight.Alaska-auto-medium": "an airline's whole site in a frame, which a browser shows only from a web server",
}
"""Tasks of the package that are not supported, and why."""


def find_pages() -> Path:
    """Returns the folder of the tasks' pages.

    Raises:
        ConfigError: the package is not installed, or holds no pages.
    """
    spec = importlib.util.find_spec("miniwob")
    roots = None if spec is None else spec.submodule_search_locations
    for root in roots or ():
        folder = Path(root) / "html" / "miniwob"
        if folder.is_dir():
            return folder
    raise ConfigError(f"the pages of MiniWoB++ are not installed: {install_extra('miniwob')}")


def task_names(folder: Path) -> list[str]:
    """Returns the names of the tasks whose pages are in this folder, sorted."""
    return sorted(path.stem for path in folder.glob("*.html"))


def page_of(folder: Path, task_name: str) -> Path:
    """Returns the page of a task.

    Raises:
        EnvironmentSetupError: there is no such task, or it is not supported.
    """
    if task_name in NOT_PLAYED:
        raise EnvironmentSetupError(f"the MiniWoB task {task_name} is not supported: it is {NOT_PLAYED[task_name]}")
    if task_name not in task_names(folder):
        raise EnvironmentSetupError(f"there is no MiniWoB task {task_name[:80]!r}")
    return folder / f"{task_name}.html"
