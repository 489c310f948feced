"""The traceback of somebody's generator: without the frames of what called it, and with the place in one line."""

from __future__ import annotations

import traceback
from pathlib import Path

from slime_plugins.rollout_buffer.errors import RolloutBufferError

MAX_FRAMES = 20
MAX_TRACEBACK = 8000
"""Characters; a longer one keeps its end."""

_PACKAGE = Path(__file__).parents[1]
_CALLERS = (str(_PACKAGE / "runner"), str(_PACKAGE / "generator" / "registry.py"), "<frozen importlib")


def own_traceback(error: BaseException) -> str:
    """Returns the traceback of an error, from the first frame that is not the runner's or the registry's."""
    lines = traceback.TracebackException.from_exception(error)
    frames = list(lines.stack)
    while frames and frames[0].filename.startswith(_CALLERS):
        del frames[0]
    lines.stack = traceback.StackSummary.from_list(frames[-MAX_FRAMES:])
    return "".join(lines.format()).strip()[-MAX_TRACEBACK:]


def with_place(error: BaseException, file: Path | None = None) -> str:
    """Returns an error in one line with the file and the line that raised it, ``file`` where it is among the frames."""
    said = traceback.format_exception_only(error)[-1].strip()
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: {said}"
    frames = list(traceback.extract_tb(error.__traceback__))
    own = [frame for frame in frames if frame.filename == str(file)] or frames
    return f"{own[-1].filename}, line {own[-1].lineno}: {said}" if own else said


def place_and_traceback(error: BaseException, file: Path | None = None) -> str:
    """Returns the place in one line, then the traceback; an error of this package is a sentence, and needs neither."""
    if isinstance(error, RolloutBufferError):
        return f"{type(error).__name__}: {error}"
    return f"{with_place(error, file)}\n{own_traceback(error)}"
