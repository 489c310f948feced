"""Event loops whose time jumps to what is next, so that a test of waiting neither waits nor depends on promptness."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any


class _JumpingSelector(selectors.DefaultSelector):
    """Moves time on instead of waiting for it. What real files and threads have to say is still waited for."""

    passed_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """As ``BaseSelector.select``, but a wait that has an end is over at once."""
        if timeout is None:
            return super().select(None)
        found = super().select(0)
        if not found and timeout > 0:
            self.passed_s += timeout
        return found


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Starts at 0 s. Only for code that stays in this thread: for it nothing happens between two timers."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Returns the seconds that have passed for whoever lives in this loop."""
        return self._jumping.passed_s


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a coroutine test in a loop of its own, in which time passes only while everybody sleeps."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.run(test(*arguments, **named))

    return run
