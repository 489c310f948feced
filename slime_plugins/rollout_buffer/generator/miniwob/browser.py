"""Browsers shared by the devices of one process: launched for the first page, closed after the last.

Playwright's event loop runs in its own thread; devices, which are blocking objects, submit calls to it. Every page has
its own context, and so its own renderer process: a crash affects one page.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from slime_plugins.rollout_buffer.devices.leased_device import device_died
from slime_plugins.rollout_buffer.errors import ConfigError, DeviceError, EpisodeError
from slime_plugins.rollout_buffer.install_hints import install_extra

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserContext, CDPSession, Page, Playwright

logger = logging.getLogger(__name__)

CHROMIUM_VARIABLE = "ROLLOUT_BUFFER_CHROMIUM"
INSTALL = "apt install chromium, or python -m playwright install chromium"
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LAUNCH_ARGUMENTS = (
    # No name outside of this machine is resolved, neither for pages nor for the browser.
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--mute-audio",
    "--disable-dev-shm-usage",
)

CLOSE_TIMEOUT_S = 5.0
"""Time limit for closing a page, a browser or the driver."""
ANSWER_TIMEOUT_S = 15.0
"""A browser that does not answer for this long is abandoned."""
GRACE_S = 10.0
"""Extra time of a call after its limit, for its cleanup."""

_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchOptions:
    """Launch options of a browser and its pages. Pages with equal options may share a browser.

    An empty ``executable`` uses Playwright's own Chromium. Pages load only files below ``folder``. ``script`` runs in
    every page before its own scripts. ``width`` and ``height`` are in CSS points; a point has ``scale`` pixels on a
    side.
    """

    executable: str
    folder: Path
    script: str
    width: int
    height: int
    scale: int
    pages_per_browser: int
    timeout_s: float


@dataclass(kw_only=True, slots=True)
class OpenPage:
    """A page of a shared browser. ``lost`` is the reason of its loss, "" while it works."""

    page: Page
    protocol: CDPSession
    context: BrowserContext
    browser: Browser
    lost: str = ""


@dataclass(kw_only=True, slots=True)
class _SharedBrowser:
    """A browser and its pages. A ``retired`` browser opens no more pages, and is closed after its last page."""

    browser: Browser
    options: LaunchOptions
    pages: list[OpenPage] = field(default_factory=list)
    opening: int = 0
    retired: bool = False

    def has_room_for(self, options: LaunchOptions) -> bool:
        open_pages = len(self.pages) + self.opening
        return self.options == options and not self.retired and open_pages < options.pages_per_browser


def find_chromium(named: str = "") -> str:
    """Returns the path of ``named``, else of the Chromium in ``CHROMIUM_VARIABLE``, else of one on the PATH.

    Returns "" if there is none of these but Playwright has installed its own.

    Raises:
        ConfigError: the named browser does not exist, or no Chromium is installed.
    """
    wanted = named or os.environ.get(CHROMIUM_VARIABLE, "")
    if wanted:
        path = shutil.which(wanted)
        if path is None:
            raise ConfigError(f"there is no browser {wanted}: {INSTALL}")
        return path
    on_path = next((path for name in _NAMES if (path := shutil.which(name))), "")
    if not on_path and not _playwright_has_chromium():
        raise ConfigError(f"there is no Chromium on this machine: {INSTALL}, or name one in {CHROMIUM_VARIABLE}")
    return on_path


def _playwright_has_chromium() -> bool:
    """Returns True if Playwright has installed its own Chromium."""
    folder = os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path.home() / ".cache" / "ms-playwright"
    return any(Path(folder).glob("chromium*"))


class SharedBrowsers:
    """The browsers of this process, and the thread of Playwright's event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._playwright: Playwright | None = None
        self._shared: list[_SharedBrowser] = []
        self._lock = asyncio.Lock()
        self._background: set[asyncio.Task[object]] = set()
        threading.Thread(target=self._loop.run_forever, name="browsers", daemon=True).start()

    def open(self, options: LaunchOptions) -> OpenPage:
        """Returns a new, empty page.

        Raises:
            ConfigError: Playwright or a browser for it is not installed.
            DeviceError: the browser did not come up.
        """
        return self.call(lambda: self._open(options), None, options.timeout_s, "opening a page")

    def close(self, opened: OpenPage, timeout_s: float) -> None:
        """Closes a page, and its browser after the last one; a lost page is ignored."""
        self.call(lambda: self._close(opened), None, timeout_s, "closing a page")

    def call(
        self, work: Callable[[], Coroutine[Any, Any, _Result]], opened: OpenPage | None, timeout_s: float, doing: str
    ) -> _Result:
        """Runs ``work`` on the browsers' loop and returns its result.

        Raises:
            ConfigError, EpisodeError: ``work`` raised it.
            DeviceError: the page or its browser failed, is lost, or exceeded ``timeout_s``.
        """
        if opened is not None and opened.lost:
            raise device_died(opened.lost)
        future = asyncio.run_coroutine_threadsafe(self._limited(work, opened, timeout_s), self._loop)
        try:
            return future.result(timeout_s + ANSWER_TIMEOUT_S + GRACE_S)
        except TimeoutError as timeout:
            future.cancel()
            if opened is not None and opened.lost:
                raise device_died(opened.lost) from timeout
            raise DeviceError(f"{doing} took longer than {timeout_s:g} s") from timeout
        except (ConfigError, EpisodeError):
            raise
        except Exception as error:  # the boundary to Playwright, which also raises errors of its transport
            if opened is not None and opened.lost:
                raise device_died(opened.lost) from error
            raise DeviceError(f"{doing} failed: {_first_line(error)}") from error

    async def _limited(
        self, work: Callable[[], Coroutine[Any, Any, _Result]], opened: OpenPage | None, timeout_s: float
    ) -> _Result:
        """Runs ``work`` under a time limit that applies on the loop, so that cancelled work cleans up before it ends.

        After a failure, browsers that do not answer are abandoned.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await work()
        except (ConfigError, EpisodeError):
            raise
        except Exception:  # including the timeout: a stopped browser raises nothing
            if opened is None or not opened.lost:
                await self._abandon_unresponsive()
            raise

    async def _open(self, options: LaunchOptions) -> OpenPage:
        async with self._lock:
            shared = await self._browser_with_room(options)
            shared.opening += 1
        try:
            opened = await _open_page(shared)
        except BaseException:
            # It is unknown whether this page is open: its browser is closed after its other pages.
            shared.retired = True
            self._spawn(self._tidy())
            raise
        finally:
            shared.opening -= 1
        shared.pages.append(opened)
        if not shared.browser.is_connected():
            _lose(opened, "the browser is gone")
        return opened

    async def _browser_with_room(self, options: LaunchOptions) -> _SharedBrowser:
        """Returns a browser with room for one more page."""
        await self._close_unused()
        for shared in self._shared:
            if shared.has_room_for(options):
                return shared
        started = _SharedBrowser(browser=await self._launch(options), options=options)
        started.browser.on("disconnected", lambda _browser: _lose_all(started))
        self._shared.append(started)
        return started

    async def _launch(self, options: LaunchOptions) -> Browser:
        if self._playwright is None:
            try:
                from playwright.async_api import async_playwright
            except ImportError as error:
                raise ConfigError(f"task type miniwob needs Playwright: {install_extra('miniwob')}") from error
            self._playwright = await async_playwright().start()
        return await self._playwright.chromium.launch(
            executable_path=options.executable or None,
            args=list(LAUNCH_ARGUMENTS),
            # Chromium refuses to run as root inside its sandbox, and in containers it runs as root.
            chromium_sandbox=os.geteuid() != 0,
            timeout=options.timeout_s * 1000,
        )

    async def _close(self, opened: OpenPage) -> None:
        shared = next((shared for shared in self._shared if opened in shared.pages), None)
        if shared is None:
            return
        shared.pages.remove(opened)
        if shared.pages and shared.browser.is_connected() and not await _closed_in_time(opened.context.close()):
            shared.retired = True
        await self._tidy()

    async def _tidy(self) -> None:
        async with self._lock:
            await self._close_unused()

    async def _close_unused(self) -> None:
        """Closes browsers without pages, and the driver without browsers. The caller holds the lock."""
        for shared in [each for each in self._shared if _is_unused(each)]:
            self._shared.remove(shared)
            await _closed_in_time(shared.browser.close())
        if not self._shared:
            await self._stop_driver()

    async def _abandon_unresponsive(self) -> None:
        """Abandons browsers that do not answer, with their pages, and a driver without an answering browser.

        A killed driver is not detected otherwise: its browsers seem connected, but every call fails.
        """
        browsers = list(self._shared)
        answers = await asyncio.gather(*(_answers(shared.browser) for shared in browsers))
        dead = [shared for shared, answered in zip(browsers, answers, strict=True) if not answered]
        for shared in dead:
            shared.retired = True
            _lose_all(shared)
        self._shared = [shared for shared in self._shared if shared not in dead]
        for shared in dead:
            self._spawn(_closed_in_time(shared.browser.close()))
        # A held lock means that a launch is in progress, which handles its own failure.
        if not self._shared and not self._lock.locked():
            await self._stop_driver()

    async def _stop_driver(self) -> None:
        playwright, self._playwright = self._playwright, None
        if playwright is not None:
            await _closed_in_time(playwright.stop())

    def _spawn(self, work: Coroutine[Any, Any, object]) -> None:
        task = self._loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def context_options(options: LaunchOptions) -> dict[str, Any]:
    """Returns the context options: a phone's screen with touch, offline, equal on every machine."""
    return {
        "viewport": {"width": options.width, "height": options.height},
        "device_scale_factor": options.scale,
        "is_mobile": True,
        "has_touch": True,
        "offline": True,
        "locale": "en-US",
        "timezone_id": "UTC",
        "color_scheme": "light",
        "accept_downloads": False,
    }


async def _open_page(shared: _SharedBrowser) -> OpenPage:
    options, browser = shared.options, shared.browser
    context = await browser.new_context(**context_options(options))
    await context.route(lambda url: not url.startswith(f"{options.folder.as_uri()}/"), lambda route: route.abort())
    await context.add_init_script(options.script)
    page = await context.new_page()
    page.set_default_timeout(options.timeout_s * 1000)
    opened = OpenPage(page=page, protocol=await context.new_cdp_session(page), context=context, browser=browser)
    page.on("crash", lambda _page: _lose(opened, "the page crashed"))
    page.on("close", lambda _page: _lose(opened, "the page was closed"))
    return opened


def _is_unused(shared: _SharedBrowser) -> bool:
    return not shared.opening and (not shared.pages or not shared.browser.is_connected())


async def _answers(browser: Browser) -> bool:
    """Returns True if a browser answers a call through the driver."""
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            session = await browser.new_browser_cdp_session()
            await session.send("Browser.getVersion")
            await session.detach()
    except Exception:  # noqa: BLE001 - errors of Playwright and its transport all mean: no answer
        return False
    return True


async def _closed_in_time(closing: Coroutine[Any, Any, object]) -> bool:
    """Returns True if a close call of Playwright succeeded in time."""
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await closing
    except Exception as error:  # noqa: BLE001 - abandoned after any error
        logger.warning("a browser, or a page of it, could not be closed: %s", _first_line(error))
        return False
    return True


def _lose(opened: OpenPage, why: str) -> None:
    opened.lost = opened.lost or why


def _lose_all(shared: _SharedBrowser) -> None:
    for opened in shared.pages:
        _lose(opened, "the browser is gone")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


_browsers: SharedBrowsers | None = None
_browsers_lock = threading.Lock()


def shared_browsers() -> SharedBrowsers:
    """Returns the browsers of this process."""
    global _browsers
    with _browsers_lock:
        if _browsers is None:
            _browsers = SharedBrowsers()
        return _browsers
