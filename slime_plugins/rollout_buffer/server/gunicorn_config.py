"""gunicorn's configuration file: its log lines have the application's format, and its workers share its modules."""

from __future__ import annotations

import importlib
from typing import Any

from gunicorn.glogging import Logger as GunicornLogger

from slime_plugins.rollout_buffer.observability.logs import LogFormat, formatter, log_format, set_up_logging


class Logger(GunicornLogger):  # type: ignore[misc]  # gunicorn brings no types
    """gunicorn's own logger; where lines are to be JSON, its lines and the application's are."""

    def setup(self, cfg: Any) -> None:
        """Sets the loggers up as gunicorn does, then gives them the wanted format."""
        super().setup(cfg)
        if log_format() is LogFormat.JSON:
            set_up_logging(LogFormat.JSON)
            for handler in self.error_log.handlers:
                handler.setFormatter(formatter(LogFormat.JSON))


logger_class = Logger


def on_starting(arbiter: Any) -> None:
    """Imports the application before workers are forked: each starts without doing it again, and shares the memory."""
    importlib.import_module("slime_plugins.rollout_buffer.server.asgi")
