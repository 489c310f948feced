"""Commands that serve until they are stopped: buffer, gateway, remote rollout protocol."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from slime_plugins.rollout_buffer.cli.common import (
    AndroidConfig,
    AndroidSetting,
    check_holds_buffer,
    errors,
    report_errors,
)
from slime_plugins.rollout_buffer.cli.settings_options import with_settings
from slime_plugins.rollout_buffer.gateway.settings import GatewaySettings
from slime_plugins.rollout_buffer.observability.logs import LOG_FORMAT_VARIABLE, LogFormat, set_up_logging
from slime_plugins.rollout_buffer.remote_rollout.settings import RemoteRolloutSettings
from slime_plugins.rollout_buffer.serve_settings import ServeSettings, build_serve_settings, build_settings

logger = logging.getLogger(__name__)

# --- options ---------------------------------------------------------------------------------------------------------

LogFormatOption = Annotated[
    LogFormat,
    typer.Option(
        "--log-format",
        envvar=LOG_FORMAT_VARIABLE,
        help="Lines of text, or of JSON with job, group and uid where known; children inherit it.",
    ),
]
LogMasks = Annotated[bool, typer.Option("--log-masks", help="Log each turn's mask, and the tokens it covers.")]


# --- commands --------------------------------------------------------------------------------------------------------


@with_settings(ServeSettings, "ROLLOUT_BUFFER_SERVE")
def serve(
    given: dict[str, Any],
    log_format: LogFormatOption = LogFormat.TEXT,
    android_config: AndroidConfig = None,
    android: AndroidSetting = None,
) -> None:
    """Serve the buffer: the supervisor with its gunicorn workers and its runners, until SIGTERM or Ctrl-C."""
    from slime_plugins.rollout_buffer.supervisor.supervisor import Supervisor

    set_up_logging(log_format)
    with report_errors():
        settings = build_serve_settings(**given)
        set_android_settings(android_config, android)

        def say_ready(url: str) -> None:
            _print_ready(f"settings: {settings.model_dump_json()}", log_format)
            _print_ready(f"rollout buffer serving on {url}", log_format)

        Supervisor(settings, on_ready=say_ready).run()


@with_settings(GatewaySettings, "ROLLOUT_BUFFER_GATEWAY")
def gateway(given: dict[str, Any], log_format: LogFormatOption = LogFormat.TEXT) -> None:
    """Serve the OpenAI-compatible gateway alone, for a buffer on this host, until SIGTERM or Ctrl-C."""
    from slime_plugins.rollout_buffer.supervisor.gateway_processes import serve_gateway

    set_up_logging(log_format)
    with report_errors():
        check_holds_buffer(given["data_dir"])
        settings = build_settings(GatewaySettings, given)
        serve_gateway(settings, on_ready=lambda url: _print_ready(f"gateway serving on {url}", log_format))


@with_settings(RemoteRolloutSettings, "ROLLOUT_BUFFER_REMOTE_ROLLOUT")
def remote_rollout(
    given: dict[str, Any], log_masks: LogMasks = False, log_format: LogFormatOption = LogFormat.TEXT
) -> None:
    """Serve the remote rollout protocol: play rollouts for trainers; with an engine, serve the trainer's side, too."""
    from slime_plugins.rollout_buffer.remote_rollout.main import serve as serve_rollouts

    set_up_logging(log_format)
    if log_masks:
        logging.getLogger("rollout_server").setLevel(logging.DEBUG)
    with report_errors():
        settings = build_settings(RemoteRolloutSettings, given)
        serve_rollouts(settings, on_ready=lambda url: _print_ready(f"remote rollout serving on {url}", log_format))


def set_android_settings(config: Path | None, assignments: list[str] | None) -> None:
    """Validates the settings and sets them in the environment of this process and its children.

    Raises:
        ConfigError: a setting is invalid.
    """
    from slime_plugins.rollout_buffer.generator.android_world.config import environment_for

    os.environ.update(environment_for(config, assignments or []))


def _print_ready(text: str, log_format: LogFormat) -> None:
    """Prints a message on stderr, or logs it with ``--log-format json``."""
    if log_format is LogFormat.JSON:
        logger.info("%s", text)
    else:
        errors.print(text, highlight=False, soft_wrap=True)
