"""Scores are those of the package's own Gymnasium environment, for the same taps on the same seeds.

Needs a chromedriver, of the Chromium's own version: on the PATH, or named by ``MINIWOB_CHROMEDRIVER``.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from slime_plugins.rollout_buffer.generator.gui_agent.device_actions import Action, ActionKind
from slime_plugins.rollout_buffer.generator.miniwob.browser import find_chromium
from slime_plugins.rollout_buffer.generator.miniwob.config import POINTS
from slime_plugins.rollout_buffer.generator.miniwob.device import BrowserPage
from tests.miniwob_browsers import browser_page, needs_a_browser

CHROMEDRIVER = os.environ.get("MINIWOB_CHROMEDRIVER") or shutil.which("chromedriver")
pytestmark = [
    needs_a_browser,
    pytest.mark.skipif(CHROMEDRIVER is None, reason="no chromedriver: apt install chromium-driver"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

TASKS = [
    "click-button", "click-color", "click-checkboxes", "click-collapsible", "click-dialog-2", "click-link",
    "click-shades", "click-tab", "click-tab-2", "click-widget", "count-sides", "find-greatest",
    "focus-text-2", "identify-shape", "navigate-tree", "odd-or-even", "sign-agreement",
    "social-media", "tic-tac-toe", "unicode-test",
]  # fmt: skip
SEEDS = (3, 8)
TAPS = 3


@pytest.fixture(scope="module")
def device() -> Iterator[BrowserPage]:
    with browser_page() as page:
        yield page


@pytest.fixture
def environments(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes the package's own environment of a task; all are closed in the end."""
    from miniwob.environment import MiniWoBEnvironment
    from miniwob.reward import get_raw_reward

    monkeypatch.setenv("MINIWOB_CHROMEDRIVER", str(CHROMEDRIVER))
    monkeypatch.setenv("MINIWOB_CHROME_BINARY", find_chromium())
    made: list[Any] = []

    def make(task: str) -> Any:
        made.append(MiniWoBEnvironment(subdomain=task, reward_processor=get_raw_reward))
        return made[-1]

    yield make
    for environment in made:
        environment.close()


@pytest.mark.parametrize("task", TASKS)
def test_the_same_taps_are_scored_as_the_package_scores_them(task: str, device: BrowserPage, environments: Any) -> None:
    environment = environments(task)
    for seed in SEEDS:
        seen = device.reset(task, seed)
        theirs, _ = environment.reset(seed=seed)
        assert " ".join(theirs["utterance"].split()) == seen.goal
        for x, y in taps(seen.elements):
            seen = device.step(Action(kind=ActionKind.CLICK, point=(2 * x, 2 * y)))
            action = environment.create_action("CLICK_COORDS", coords=[float(x), float(y)])
            _, reward, done, _, _ = environment.step(action)
            assert (seen.done, device.score()) == (done, reward if done else 0.0)
            if done:
                break


def taps(elements: str) -> list[tuple[int, int]]:
    """The middles of the page's elements in points, the last first: buttons are mostly last.

    What is cut by our screen's edge is left out: the package's window is larger, and shows what lies beyond.
    """
    boxes = [
        [int(edge) for edge in box.split(", ")] for box in re.findall(r"\[(\d+, \d+, \d+, \d+)\]$", elements, re.M)
    ]
    middles = [((left + right) / 2 / 999, (top + bottom) / 2 / 999) for left, top, right, bottom in boxes
               if bottom < 999 and right < 999]  # fmt: skip
    return [(round(x * POINTS[0]), round(y * POINTS[1])) for x, y in reversed(middles)][:TAPS]
