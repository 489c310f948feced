"""gunicorn's configuration file: its log format, and modules shared by all workers."""

from __future__ import annotations

import importlib
import os
from typing import Any

from gunicorn.glogging import Logger as GunicornLogger

from slime_plugins.rollout_buffer.observability.liveness import READY_VARIABLE, Heartbeat
from slime_plugins.rollout_buffer.observability.logs import LogFormat, formatter, log_format, set_up_logging


class Logger(GunicornLogger):  # type: ignore[misc]  # gunicorn brings no types
    """gunicorn's logger with the application's log format."""

    def setup(self, cfg: Any) -> None:
        """Sets up gunicorn's loggers, then changes their format."""
        super().setup(cfg)
        if log_format() is LogFormat.JSON:
            set_up_logging(LogFormat.JSON)
            for handler in self.error_log.handlers:
                handler.setFormatter(formatter(LogFormat.JSON))


logger_class = Logger


def on_starting(arbiter: Any) -> None:
    """Imports the application before workers are forked, which then start faster and share its memory."""
    importlib.import_module("slime_plugins.rollout_buffer.server.asgi")


def post_worker_init(worker: Any) -> None:
    """Tells the supervisor that requests are answered."""
    Heartbeat(int(os.environ[READY_VARIABLE])).beat()
