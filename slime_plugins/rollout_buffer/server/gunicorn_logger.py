"""gunicorn's log lines, in the format that the application's have."""

from __future__ import annotations

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
