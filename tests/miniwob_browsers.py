"""What tests of MiniWoB++ need of the machine, and pages for them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.generator.miniwob.browser import OpenPage, find_chromium
from slime_plugins.rollout_buffer.generator.miniwob.config import MiniWobSettings
from slime_plugins.rollout_buffer.generator.miniwob.device import BrowserPage
from tests.processes import descendants


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
    return next(pid for pid, command in descendants(os.getpid()).items() if "run-driver" in command)
