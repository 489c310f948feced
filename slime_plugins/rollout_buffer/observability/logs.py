"""Log formats: plain text, or one JSON object a line with fields for job, group and attempt.

``log_fields`` applies to all lines logged in its block, also by tasks started in it. A single line may set its fields
with ``extra={"job": …}``.
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

from slime_plugins.rollout_buffer.credentials import redacted
from slime_plugins.rollout_buffer.errors import ConfigError

LOG_FORMAT_VARIABLE = "ROLLOUT_BUFFER_LOG_FORMAT"
"""Environment variable with the format, for child processes."""
TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
FIELDS = ("job", "group", "instance", "uid", "slot", "attempt")
"""Names of the fields; ``group`` is the number N of ``GET /groups/N``."""

Fields = Mapping[str, str | int]
_fields: contextvars.ContextVar[Fields] = contextvars.ContextVar("rollout_buffer_log_fields")


class LogFormat(StrEnum):
    TEXT = "text"  # for a terminal
    JSON = "json"  # one object a line, for log collectors


@contextlib.contextmanager
def log_fields(**fields: str | int) -> Iterator[None]:
    """Adds fields (of ``FIELDS``) to each line logged in the block."""
    token = _fields.set({**_fields.get({}), **fields})
    try:
        yield
    finally:
        _fields.reset(token)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, process, message, fields, traceback."""

    def format(self, record: logging.LogRecord) -> str:
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
    """Lines for people; passwords in URLs are redacted."""

    def __init__(self) -> None:
        super().__init__(TEXT_FORMAT)

    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record))


def log_format() -> LogFormat:
    """Returns the format of the environment; text by default.

    Raises:
        ConfigError: the format is unknown.
    """
    named = os.environ.get(LOG_FORMAT_VARIABLE) or LogFormat.TEXT
    try:
        return LogFormat(named)
    except ValueError as error:
        known = ", ".join(LogFormat)
        raise ConfigError(f"{LOG_FORMAT_VARIABLE} is {named!r}; there are: {known}") from error


def formatter(wanted: LogFormat) -> logging.Formatter:
    return JsonFormatter() if wanted is LogFormat.JSON else TextFormatter()


def set_up_logging(wanted: LogFormat | None = None) -> None:
    """Logs from INFO on to stderr; child processes get the format from the environment.

    With JSON, warnings of Python are logged too; as text, Python prints them to stderr itself.

    ``wanted`` overrides the environment. An existing handler of the root logger is kept.

    Raises:
        ConfigError: the format of the environment is unknown.
    """
    chosen = log_format() if wanted is None else wanted
    os.environ[LOG_FORMAT_VARIABLE] = chosen
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(chosen))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    if chosen is LogFormat.JSON:
        logging.captureWarnings(True)
