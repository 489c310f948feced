"""What tests of MiniWoB++ need of the machine, and pages for them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.generator.miniwob.browser import OpenPage, find_chromium
from slime_plugins.rollout_buffer.generator.miniwob.config import MiniWobSettings
from slime_plugins.rollout_buffer.generator.miniwob.device import BrowserPage


def _what_is_missing() -> str:
    missing = [name for name in ("miniwob", "playwright") if importlib.util.find_spec(name) is None]
    return ", ".join([*missing, *([] if _there_is_a_browser() else ["a Chromium"])])


def _there_is_a_browser() -> bool:
    try:
        find_chromium()
    except ConfigError:
        return False
    return True


MISSING = _what_is_missing()
WITHOUT_A_BROWSER = f"MiniWoB++ is played in a browser, and this is missing: {MISSING}"
needs_a_browser = pytest.mark.skipif(bool(MISSING), reason=WITHOUT_A_BROWSER)


@contextmanager
def browser_page(**settings: Any) -> Iterator[BrowserPage]:
    """A page that is closed in the end."""
    page = BrowserPage(MiniWobSettings.model_validate(settings))
    try:
        yield page
    finally:
        page.close()


async def browser_process(opened: OpenPage) -> int:
    """The process of the browser that shows a page, as the browser itself says."""
    session = await opened.browser.new_browser_cdp_session()
    found = await session.send("SystemInfo.getProcessInfo")
    return next(int(process["id"]) for process in found["processInfo"] if process["type"] == "browser")


def driver_process() -> int:
    """The process of the Playwright driver that this process has started."""
    return next(process.pid for process in processes_below(os.getpid()) if "run-driver" in process.command)


class BelowUs(NamedTuple):
    """A process that this one has started, itself or through another. ``resident`` is in bytes."""

    pid: int
    command: str
    resident: int


def processes_below(pid: int) -> list[BelowUs]:
    """The processes below another one that have not ended."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # it has ended meanwhile
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
                parents.update({} if state == "Z" else {int(folder.name): int(parent)})
    found: list[BelowUs] = []
    wanted = {pid}
    while children := {child for child, parent in parents.items() if parent in wanted} - {one.pid for one in found}:
        found += [_process(child) for child in children]
        wanted = children
    return found


def _process(pid: int) -> BelowUs:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return BelowUs(pid, "", 0)
    return BelowUs(pid, command, pages * os.sysconf("SC_PAGE_SIZE"))
