"""Errors of generators' code: their traceback without the caller's frames, or their place and message in one line."""

from __future__ import annotations

import traceback
from pathlib import Path

from slime_plugins.rollout_buffer.errors import RolloutBufferError

MAX_FRAMES = 20
MAX_TRACEBACK = 8000
"""Limit in characters; a longer traceback keeps its end."""

_PACKAGE = Path(__file__).parents[1]
_CALLERS = (str(_PACKAGE / "runner"), str(_PACKAGE / "generator" / "registry.py"), "<frozen importlib")


def own_traceback(error: BaseException) -> str:
    """Returns the traceback of an error without the frames of runner and registry."""
    summary = traceback.TracebackException.from_exception(error)
    frames = list(summary.stack)
    while frames and frames[0].filename.startswith(_CALLERS):
        del frames[0]
    summary.stack = traceback.StackSummary.from_list(frames[-MAX_FRAMES:])
    return "".join(summary.format()).strip()[-MAX_TRACEBACK:]


def with_place(error: BaseException, file: Path | None = None) -> str:
    """Returns an error in one line with the file and line that raised it, of the last frame in ``file`` if any."""
    message = traceback.format_exception_only(error)[-1].strip()
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: {message}"
    frames = list(traceback.extract_tb(error.__traceback__))
    own = [frame for frame in frames if frame.filename == str(file)] or frames
    return f"{own[-1].filename}, line {own[-1].lineno}: {message}" if own else message


def place_and_traceback(error: BaseException, file: Path | None = None) -> str:
    """Returns the error in one line, then its traceback; only its class and message if it is of this package."""
    if isinstance(error, RolloutBufferError):
        return f"{type(error).__name__}: {error}"
    return f"{with_place(error, file)}\n{own_traceback(error)}"
