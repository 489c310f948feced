"""What a line of a log looks like: plain text, or an object of JSON that says which job, group and episode it is about.

``log_fields`` holds for everything that is logged within it, also by tasks that are begun there. A single line may name
its fields itself, with ``extra={"job": …}``.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from enum import StrEnum

from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.redaction import redacted

LOG_FORMAT_VARIABLE = "ROLLOUT_BUFFER_LOG_FORMAT"
"""Names the format for processes that nobody gives a flag: servers, runners, the local Ray."""
TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
FIELDS = ("job", "group", "instance", "uid", "slot", "attempt")
"""What a line may be about; ``group`` is the number under which ``GET /groups/<n>`` has it."""

Fields = Mapping[str, str | int]
_fields: contextvars.ContextVar[Fields] = contextvars.ContextVar("rollout_buffer_log_fields")


class LogFormat(StrEnum):
    """How lines are written."""

    TEXT = "text"  # for people at a terminal
    JSON = "json"  # one object a line, for whatever collects logs


@contextlib.contextmanager
def log_fields(**fields: str | int) -> Iterator[None]:
    """Adds fields (of ``FIELDS``) to every line that is logged inside."""
    token = _fields.set({**_fields.get({}), **fields})
    try:
        yield
    finally:
        _fields.reset(token)


class JsonFormatter(logging.Formatter):
    """One line of JSON for each record: time, level, logger, process, message, what it is about, and the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line; what is no JSON is written as text."""
        named = {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
            **_fields.get({}),
            **named,
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        return redacted(json.dumps(line, default=str))


class TextFormatter(logging.Formatter):
    """A line for people, with the traceback behind it, and no password in an address of it."""

    def __init__(self) -> None:
        super().__init__(TEXT_FORMAT)

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line."""
        return redacted(super().format(record))


def log_format() -> LogFormat:
    """Returns the format that the environment names; text when it names none.

    Raises:
        ConfigError: it names one that does not exist.
    """
    named = os.environ.get(LOG_FORMAT_VARIABLE) or LogFormat.TEXT
    try:
        return LogFormat(named)
    except ValueError as error:
        known = ", ".join(LogFormat)
        raise ConfigError(f"{LOG_FORMAT_VARIABLE} is {named!r}; there are: {known}") from error


def formatter(wanted: LogFormat) -> logging.Formatter:
    """Returns what writes the lines of a format."""
    return JsonFormatter() if wanted is LogFormat.JSON else TextFormatter()


def set_up_logging(wanted: LogFormat | None = None) -> None:
    """Logs from INFO on to stderr, here and in the processes that are started from here; warnings as lines, too.

    ``wanted`` comes before the environment. Where the root logger has a handler already, that one stays.

    Raises:
        ConfigError: the environment names a format that does not exist.
    """
    chosen = log_format() if wanted is None else wanted
    os.environ[LOG_FORMAT_VARIABLE] = chosen
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(chosen))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    if chosen is LogFormat.JSON:
        logging.captureWarnings(True)
