"""What tests of MiniWoB++ need of the machine, and pages for them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.generator.miniwob.browser import find_chromium
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
needs_a_browser = pytest.mark.skipif(
    bool(MISSING), reason=f"MiniWoB++ is played in a browser, and this is missing: {MISSING}"
)


@contextmanager
def browser_page(**settings: Any) -> Iterator[BrowserPage]:
    """A page that is closed in the end."""
    page = BrowserPage(MiniWobSettings.model_validate(settings))
    try:
        yield page
    finally:
        page.close()
