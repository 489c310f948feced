"""Event loops whose clock jumps to the next timer, so that a test of waiting neither waits nor can be too slow."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any


class _JumpingSelector(selectors.DefaultSelector):
    """Adds a timeout to ``passed_s`` instead of waiting for it. Without a timeout it waits for files and threads."""

    passed_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """As ``BaseSelector.select``, but a wait with a timeout ends at once."""
        if timeout is None:
            return super().select(None)
        found = super().select(0)
        if not found and timeout > 0:
            self.passed_s += timeout
        return found


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Starts at 0 s. Only for code of this one thread: what other threads do takes no time here."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Returns the seconds that have passed for the coroutines of this loop."""
        return self._jumping.passed_s


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a coroutine test in a loop of its own, whose time passes only while all its coroutines sleep."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.run(test(*arguments, **named))

    return run
