"""A browser page as a device: one MiniWoB++ task in Chromium with touch, reloaded for every episode.

A page that crashes, hangs, or navigates away is a device error, never a reward.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from slime_plugins.rollout_buffer.devices.interface import Observation
from slime_plugins.rollout_buffer.errors import DeviceError, EnvironmentSetupError
from slime_plugins.rollout_buffer.generator.gui_agent.device_actions import Action, ActionKind, SystemButton
from slime_plugins.rollout_buffer.generator.miniwob.browser import LaunchOptions, find_chromium, shared_browsers
from slime_plugins.rollout_buffer.generator.miniwob.config import POINTS, MiniWobSettings
from slime_plugins.rollout_buffer.generator.miniwob.elements import in_words
from slime_plugins.rollout_buffer.generator.miniwob.package import find_pages, page_of
from slime_plugins.rollout_buffer.types import Image

PAGE_SCRIPT = Path(__file__).with_name("page.js")
LIFTED_LIMIT_MS = 2_000_000_000
"""The limit of a page whose time limit is lifted, about 23 days: a browser's timer accepts at most 2^31 ms."""
HEALTH_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 10.0
PAUSE_BEFORE_LIFT_S = 0.15
DRAG_STEPS = 8
DEFAULT_PRESS_S = 1.0

_Result = TypeVar("_Result")


def from_options(options: Mapping[str, Any], index: int) -> BrowserPage:
    """MiniWoB's ``DeviceKind``: ``options`` come from ``MiniWobSettings.for_devices``."""
    del index
    return BrowserPage(MiniWobSettings.model_validate(options))


class BrowserPage:
    """One page. ``params_idx`` of a task is its seed: equal seeds give equal pages."""

    def __init__(self, settings: MiniWobSettings) -> None:
        """Opens the page.

        Raises:
            ConfigError: MiniWoB++, Playwright or Chromium is missing.
            DeviceError: the browser did not start.
        """
        self._settings = settings
        self._folder = find_pages()
        self._browsers = shared_browsers()
        self._opened = self._browsers.open(launch_options(settings, self._folder))
        self._closed = False
        self._task_name = ""

    def reset(self, task_name: str, params_idx: int) -> Observation:
        """As ``Device.reset``: loads the page, seeds it and starts its episode."""
        page = page_of(self._folder, task_name)
        self._task_name = task_name
        return self._do(lambda: self._reset(page, params_idx), self._settings.reset_timeout_s, f"loading {task_name}")

    def step(self, action: Action) -> Observation:
        """As ``Device.step``; actions that a page does not support are reported in ``note``."""
        limit_s = self._settings.step_timeout_s + (action.duration_s or 0.0)
        return self._do(lambda: self._step(action), limit_s, f"the action {action.kind}")

    def score(self) -> float:
        """As ``Device.score``, from -1 to 1: the page's own score, 0 until the page has ended the episode."""
        state = self._do(self._state, self._settings.score_timeout_s, "reading the score")
        return float(state["reward" if self._settings.time_penalty else "raw_reward"]) if state["done"] else 0.0

    def health(self) -> Mapping[str, str]:
        if self._closed:
            raise DeviceError("the page is closed")
        return {"browser": self._do(self._version, HEALTH_TIMEOUT_S, "the health check of the page")}

    def lost(self) -> str:
        return "" if self._closed else self._opened.lost

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._browsers.close(self._opened, CLOSE_TIMEOUT_S)

    # ---- on the browsers' loop ---------------------------------------------------------------------------------------

    def _do(self, work: Callable[[], Coroutine[Any, Any, _Result]], limit_s: float, doing: str) -> _Result:
        if self._closed:
            raise DeviceError("the page is closed")
        return self._browsers.call(work, self._opened, limit_s, doing)

    async def _reset(self, page: Path, seed: int) -> Observation:
        settings = self._settings
        limit_ms = LIFTED_LIMIT_MS if settings.time_limit_s is None else round(settings.time_limit_s * 1000)
        await self._opened.page.goto(page.as_uri())
        await self._evaluate(
            "([seed, mode, limit]) => rollout.start(seed, mode, limit)", [seed, settings.data_mode.value, limit_ms]
        )
        await self._opened.page.wait_for_function("() => WOB_TASK_READY")
        observation = await self._observe()
        if not observation.goal:
            raise EnvironmentSetupError(f"the MiniWoB task {self._task_name} with seed {seed} has no goal")
        return observation

    async def _step(self, action: Action) -> Observation:
        return await self._observe(await self._act(action))

    async def _act(self, action: Action) -> str:
        """Executes the action; returns a note for the agent."""
        if action.kind is ActionKind.CLICK:
            await self._opened.page.touchscreen.tap(*self._points(action.point))
        elif action.kind is ActionKind.LONG_PRESS:
            await self._press(self._points(action.point), action.duration_s or DEFAULT_PRESS_S)
        elif action.kind is ActionKind.SWIPE:
            await self._swipe(self._points(action.point), self._points(action.end_point))
        elif action.kind is ActionKind.TYPE:
            return await self._type(action.text or "")
        elif action.kind is ActionKind.SYSTEM_BUTTON and action.button is SystemButton.ENTER:
            await self._opened.page.keyboard.press("Enter")
        elif action.kind is ActionKind.WAIT:
            await asyncio.sleep(action.duration_s or 0.0)
        elif action.kind is ActionKind.SYSTEM_BUTTON:
            return f"The button {action.button} does nothing on this page."
        elif action.kind is ActionKind.OPEN:
            return "There are no apps here, only this page."
        return ""

    async def _press(self, point: tuple[float, float], duration_s: float) -> None:
        await self._touch("touchStart", point)
        await asyncio.sleep(duration_s)
        await self._touch("touchEnd")

    async def _touch(self, event: str, *points: tuple[float, float]) -> None:
        touch_points = [{"x": x, "y": y} for x, y in points]
        await self._opened.protocol.send("Input.dispatchTouchEvent", {"type": event, "touchPoints": touch_points})

    async def _swipe(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Scrolls a scrollable element; elsewhere drags with the mouse, for which these pages were written."""
        (x, y), (to_x, to_y) = start, end
        if await self._evaluate("([x, y, dx, dy]) => rollout.scrolls(x, y, dx, dy)", [x, y, to_x - x, to_y - y]):
            await self._drag_finger(start, end)
            return
        mouse = self._opened.page.mouse
        await mouse.move(x, y)
        await mouse.down()
        await mouse.move(to_x, to_y, steps=DRAG_STEPS)
        await mouse.up()

    async def _drag_finger(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Pauses before the finger lifts, so that no momentum scrolling follows."""
        (x, y), (to_x, to_y) = start, end
        await self._touch("touchStart", start)
        for step in range(1, DRAG_STEPS + 1):
            share = step / DRAG_STEPS
            await self._touch("touchMove", (x + (to_x - x) * share, y + (to_y - y) * share))
        await asyncio.sleep(PAUSE_BEFORE_LIFT_S)
        await self._touch("touchEnd")

    async def _type(self, text: str) -> str:
        if not await self._evaluate("() => rollout.focused()"):
            return "No text was entered, because nothing on the page has the focus."
        await self._opened.page.keyboard.type(text)
        return ""

    async def _observe(self, note: str = "") -> Observation:
        state = self._checked_state(await self._evaluate("() => rollout.observe()"))
        scale = self._settings.pixels_per_point
        clip = {"x": 0, "y": 0, "width": POINTS[0], "height": POINTS[1], "scale": scale}
        capture = await self._opened.protocol.send(
            "Page.captureScreenshot", {"format": "png", "optimizeForSpeed": True, "clip": clip}
        )
        return Observation(
            goal=state["goal"],
            screenshot=Image(data=base64.b64decode(capture["data"])),
            screen_width=POINTS[0] * scale,
            screen_height=POINTS[1] * scale,
            note=note,
            elements=in_words(state["elements"]),
            done=state["done"],
            details={"app": self._task_name},
        )

    async def _state(self) -> Mapping[str, Any]:
        return self._checked_state(await self._evaluate("() => rollout.state()"))

    def _checked_state(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns ``state`` if the page is still in the episode that ``reset`` began; else raises ``DeviceError``."""
        if not state["begun"]:
            raise DeviceError(f"the page of {self._task_name} was reloaded during its task")
        return state

    async def _version(self) -> str:
        await self._evaluate("() => 1 + 1")
        return self._opened.browser.version

    async def _evaluate(self, script: str, argument: Any = None) -> Any:
        return await self._opened.page.evaluate(script, argument)

    def _points(self, pixel: tuple[int, int] | None) -> tuple[float, float]:
        x, y = pixel or (0, 0)
        scale = self._settings.pixels_per_point
        return x / scale, y / scale


def launch_options(settings: MiniWobSettings, folder: Path) -> LaunchOptions:
    """Returns the launch options of pages with these settings.

    Raises:
        ConfigError: there is no Chromium.
    """
    width, height = POINTS
    return LaunchOptions(
        executable=find_chromium(settings.chromium),
        folder=folder.parent,
        script=PAGE_SCRIPT.read_text(encoding="utf-8"),
        width=width,
        height=height,
        scale=settings.pixels_per_point,
        pages_per_browser=settings.pages_per_browser,
        timeout_s=settings.boot_timeout_s,
    )
