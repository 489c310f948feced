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
    console,
    errors,
    report_errors,
)
from slime_plugins.rollout_buffer.cli.settings_options import with_settings
from slime_plugins.rollout_buffer.gateway.settings import GatewaySettings, build_gateway_settings
from slime_plugins.rollout_buffer.observability.logs import LOG_FORMAT_VARIABLE, LogFormat, set_up_logging
from slime_plugins.rollout_buffer.serve_settings import (
    DEFAULT_HOST,
    ServeSettings,
    build_serve_settings,
    token_from_environment,
)

logger = logging.getLogger(__name__)

# --- options ---------------------------------------------------------------------------------------------------------

Host = Annotated[str, typer.Option(help="Address to serve on; anything but loopback needs --token-file.")]
Port = Annotated[int, typer.Option(help="Port to serve on.")]
LogFormatOption = Annotated[
    LogFormat,
    typer.Option(
        "--log-format",
        envvar=LOG_FORMAT_VARIABLE,
        help="Lines of text, or of JSON with job, group and uid where known; children inherit it.",
    ),
]
LogMasks = Annotated[bool, typer.Option("--log-masks", help="Log each turn's mask, and the tokens it covers.")]
TestFile = Annotated[Path, typer.Argument(help="A Python file with test_… functions, async or plain.")]
TestEngine = Annotated[
    str | None,
    typer.Option(
        "--engine-url", help="SGLang server to sample with. [default: a scripted engine that calls the calculator]"
    ),
]
TestTokenizer = Annotated[
    Path | None,
    typer.Option("--tokenizer", help="Folder of the engine's tokenizer. [default: that of the scripted engine]"),
]

AllowedHosts = Annotated[
    list[str] | None,
    typer.Option(
        "--allowed-host", help="Host name, besides loopback's, that a server without a token accepts; repeatable."
    ),
]
RemoteToken = Annotated[
    Path | None, typer.Option(help="File whose first line is the bearer token that requests must send.")
]
CallbackHosts = Annotated[
    list[str] | None,
    typer.Option(
        "--callback-host",
        help="Host (host, host:port, *.domain, network) that a server_url may name; repeatable. "
        "[default: this machine]",
    ),
]
TokenizerRoots = Annotated[
    list[Path] | None,
    typer.Option("--tokenizer-root", help="Folder below which requests may name tokenizers; repeatable."),
]
NamedTokenizers = Annotated[
    list[str] | None,
    typer.Option("--tokenizer", help="NAME=FOLDER: the folder of a tokenizer that requests name NAME; repeatable."),
]
DefaultTokenizer = Annotated[
    str | None,
    typer.Option(help="Name of the tokenizer of requests that name none. [default: such requests are refused]"),
]
TrustedNames = Annotated[
    list[str] | None,
    typer.Option("--trust-remote-code", help="Name of a tokenizer whose own code may run; repeatable."),
]
Download = Annotated[bool, typer.Option("--download-tokenizers", help="Fetch named tokenizers from the model hub.")]
RemoteEngine = Annotated[
    str | None, typer.Option(help="SGLang server: enables the trainer's side. [default: the agent's side only]")
]
RemoteBuffer = Annotated[
    str | None, typer.Option(help="The buffer that the trainer's side writes trajectories to. [default: none]")
]
Tools = Annotated[
    str | None,
    typer.Option(help="MODULE:NAME: the object that provides the tools of rollouts. [default: a calculator]"),
]
OnlyOpened = Annotated[
    bool, typer.Option("--only-opened", help="Refuse turns of rollouts that were not opened by POST /rollouts.")
]
OnlyExact = Annotated[
    bool,
    typer.Option(
        "--only-exact-counts",
        help="Refuse the guide's count if it differs from the exact one because of re-tokenising.",
    ),
]
RolloutIdle = Annotated[float, typer.Option(min=1.0, help="Seconds without a turn after which a rollout expires.")]


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
        settings = build_gateway_settings(**given)
        serve_gateway(settings, on_ready=lambda url: _print_ready(f"gateway serving on {url}", log_format))


def remote_rollout(
    host: Host = DEFAULT_HOST,
    port: Port = 8891,
    token_file: RemoteToken = None,
    allowed_hosts: AllowedHosts = None,
    callback_hosts: CallbackHosts = None,
    tokenizer_roots: TokenizerRoots = None,
    tokenizers: NamedTokenizers = None,
    default_tokenizer: DefaultTokenizer = None,
    trusted_names: TrustedNames = None,
    download_tokenizers: Download = False,
    engine_url: RemoteEngine = None,
    buffer_url: RemoteBuffer = None,
    tools: Tools = None,
    only_opened: OnlyOpened = False,
    only_exact_counts: OnlyExact = False,
    idle_s: RolloutIdle = 3600.0,
    log_masks: LogMasks = False,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Serve the remote rollout protocol: play rollouts for trainers; with an engine, serve the trainer's side, too."""
    from slime_plugins.rollout_buffer.remote_rollout import main as remote
    from slime_plugins.rollout_buffer.remote_rollout.settings import TokenizerSettings

    set_up_logging(log_format)
    if log_masks:
        logging.getLogger("rollout_server").setLevel(logging.DEBUG)
    with report_errors():
        settings = remote.RemoteRolloutSettings(
            host=host,
            port=port,
            token_file=token_file,
            allowed_hosts=tuple(allowed_hosts or ()),
            engine_url=engine_url,
            buffer_url=buffer_url,
            buffer_token=token_from_environment(),
            tokenizers=TokenizerSettings(
                roots=tuple(tokenizer_roots or ()),
                folders=remote.named_folders(tokenizers or []),
                remote_code_names=frozenset(trusted_names or ()),
                download=download_tokenizers,
                default_name=default_tokenizer,
            ),
            open_unknown=not only_opened,
            text_counts=not only_exact_counts,
            idle_s=idle_s,
            tools=tools,
            **({"callback_hosts": tuple(callback_hosts)} if callback_hosts else {}),
        )
        remote.serve(settings, on_ready=lambda url: _print_ready(f"remote rollout serving on {url}", log_format))


def mask_tests(file: TestFile, engine_url: TestEngine = None, tokenizer: TestTokenizer = None) -> None:
    """Run a file with tests of response masks against this rollout server, its trainer, and an engine."""
    from slime_plugins.rollout_buffer.cli.mask_tests import run_mask_tests

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    with report_errors():
        failed = run_mask_tests(
            file,
            engine_url,
            tokenizer,
            lambda message, passed: console.print(
                message, style=None if passed else "red", highlight=False, markup=False
            ),
        )
    if failed:
        raise typer.Exit(1)


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
