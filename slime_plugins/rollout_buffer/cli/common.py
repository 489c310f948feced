"""Options, output, errors and exit codes that all commands share."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from contextvars import ContextVar
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer
from rich.console import Console, RenderableType
from typer.core import TyperGroup

from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.errors import (
    BusyError,
    ConfigError,
    ConflictError,
    RequestError,
    RolloutBufferError,
    StorageFullError,
    UnavailableError,
)
from slime_plugins.rollout_buffer.serve_settings import DEFAULT_HOST, DEFAULT_PORT, token_from_environment

if TYPE_CHECKING:  # importing HTTP libraries would dominate the time of `--help`
    from slime_plugins.rollout_buffer.client import RolloutBufferClient
    from slime_plugins.rollout_buffer.storage.store import Store


class ExitCode(IntEnum):
    NO = 1  # a check failed (unhealthy, something is missing), or the command failed
    WRONG_CALL = 2  # an option, a file, a name or the token is wrong: the same call will fail again
    OUT_OF_REACH = 3  # the buffer does not answer
    REFUSED = 4  # the buffer cannot do it in its present state; the same call may succeed later


EXIT_CODES = (
    "Exit codes: 0 done; 1 a check or the command failed; 2 the call is wrong (option, file, name, token); "
    "3 the buffer does not answer; 4 the buffer refuses it in its present state (conflict, busy, full)."
)
WIDTH_OF_A_FILE = 120
"""Columns of the output if it goes to a file or a pipe."""
# Names and messages that come from users are printed verbatim: "[/x]" is no markup, ":x:" is no emoji.
console = Console(
    width=None if sys.stdout is not None and sys.stdout.isatty() else WIDTH_OF_A_FILE, markup=False, emoji=False
)
errors = Console(stderr=True, markup=False, emoji=False)

DEFAULT_URL = f"http://{DEFAULT_HOST}:{DEFAULT_PORT}"
Url = Annotated[
    str,
    typer.Option("--url", envvar="ROLLOUT_BUFFER_URL", help="Address of the buffer. Its token: ROLLOUT_BUFFER_TOKEN."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
GeneratorDirs = Annotated[
    list[Path] | None, typer.Option("--generator-dir", help="Folder with generator files of your own; repeatable.")
]
RayAddress = Annotated[
    str | None, typer.Option(help="Ray cluster that holds the devices. [default: a local one, started when needed]")
]
RayCpus = Annotated[int | None, typer.Option(help="CPUs of the local Ray cluster.")]
AndroidConfig = Annotated[
    Path | None,
    typer.Option(
        envvar="ROLLOUT_BUFFER_ANDROID_WORLD_CONFIG",
        help="File with the settings of Android World and its devices. [default: the included file]",
    ),
]
AndroidSetting = Annotated[
    list[str] | None,
    typer.Option(
        "--android",
        metavar="KEY=VALUE",
        help="An Android World setting, overriding file and environment; repeatable. Sections with dots.",
    ),
]
ServedDataDir = Annotated[Path, typer.Option(help="The data directory of `serve`, on this host; it may be serving.")]
JobId = Annotated[str, typer.Argument(help="The job's id, as `rollout-buffer jobs` lists it.")]


_json_is_wanted: ContextVar[bool] = ContextVar("json_is_wanted", default=False)


class CommandLine(TyperGroup):
    """The typer group; prints errors as JSON if ``--json`` was given."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Remembers whether ``--json`` was given."""
        _json_is_wanted.set("--json" in args)
        rest: list[str] = super().parse_args(ctx, args)
        return rest

    def invoke(self, ctx: Any) -> Any:
        """Runs the command; reports usage errors like all others."""
        try:
            return super().invoke(ctx)
        except _UsageError as error:
            _print_error("usage", error.format_message(), {})
            raise


_UsageError: Any = typer.BadParameter.__mro__[1]
"""The base class of usage errors in typer's copy of click; typer exports only some of its subclasses."""


@contextmanager
def report_errors() -> Iterator[None]:
    """Converts expected errors into one message, also as JSON with ``--json``, and an exit code.

    Raises:
        typer.Exit: an expected error occurred; it was printed.
    """
    try:
        yield
    except BrokenPipeError:
        raise  # the reader of the output has closed it
    except (RolloutBufferError, OSError, ValueError) as error:
        raise exit_after(*_printed_error_and_code(error)) from error


def _printed_error_and_code(error: Exception) -> tuple[RolloutBufferError, ExitCode]:
    """Returns the error to print, with its message, and the exit code."""
    import requests

    from slime_plugins.rollout_buffer.client import why_no_answer

    if isinstance(error, BusyError | ConflictError | StorageFullError | UnavailableError):
        return error, ExitCode.REFUSED
    if isinstance(error, ConfigError | RequestError):
        return error, ExitCode.WRONG_CALL
    if isinstance(error, RolloutBufferError):
        return error, ExitCode.NO
    errors_of_url = requests.exceptions
    if isinstance(error, errors_of_url.InvalidURL | errors_of_url.MissingSchema | errors_of_url.InvalidSchema):
        return ConfigError(f"--url is not an address: use one like {DEFAULT_URL}"), ExitCode.WRONG_CALL
    if isinstance(error, requests.RequestException) and not isinstance(error, ValueError):
        advice = ". Is `rollout-buffer serve` up? Give --url when it is elsewhere."
        is_up = isinstance(error, errors_of_url.SSLError)
        return _NoAnswerError(f"{why_no_answer(error)}{'' if is_up else advice}"), ExitCode.OUT_OF_REACH
    if isinstance(error, wire.InvalidReplyError):
        return _NoBufferError(f"there is no rollout buffer at --url ({error})"), ExitCode.NO
    if isinstance(error, ValueError):
        return RolloutBufferError(str(error)), ExitCode.NO
    assert isinstance(error, OSError)
    explanation = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
    return ConfigError(explanation), ExitCode.WRONG_CALL


class _NoAnswerError(RolloutBufferError):
    """The buffer does not answer."""

    code = "no_answer"


class _NoBufferError(RolloutBufferError):
    """Another service answers at the address."""

    code = "no_buffer"


def answer_in_json(wanted: bool) -> None:
    """Sets whether errors are printed as JSON from now on, for commands that only print JSON."""
    _json_is_wanted.set(wanted)


def exit_after(error: RolloutBufferError, code: ExitCode) -> typer.Exit:
    """Prints an error; returns the exception that ends the command with ``code``."""
    explanation = _with_commands(error.message)
    _print_error(error.code, explanation, error.detail)
    errors.print(f"rollout-buffer: {explanation}", style="red", highlight=False, soft_wrap=True)
    return typer.Exit(code.value)


def _print_error(code: str, message: str, detail: Mapping[str, Any]) -> None:
    """Prints an error in the JSON form of the HTTP API, if JSON is wanted."""
    if _json_is_wanted.get():
        print_json(wire.encode_error(code, message, detail))


_ROUTES_AS_COMMANDS = {
    "GET /jobs/<job_id>/deliveries lists": "`rollout-buffer deliveries JOB` lists",
    "GET /jobs/<job_id>/groups lists": "`rollout-buffer groups JOB` lists",
    "GET /trajectories lists": "`rollout-buffer trajectories` lists",
    "GET /jobs lists": "`rollout-buffer jobs` lists",
}


def _with_commands(explanation: str) -> str:
    """Replaces routes in an error message by the commands that call them."""
    for route, command in _ROUTES_AS_COMMANDS.items():
        explanation = explanation.replace(route, command)
    return explanation


def connect(url: str) -> RolloutBufferClient:
    """Returns a client with the token of the environment."""
    from slime_plugins.rollout_buffer.client import RolloutBufferClient

    return RolloutBufferClient(url, token=token_from_environment(), timeout_s=30.0)


def check_holds_buffer(data_dir: Path) -> None:
    """Refuses a ``--data-dir`` without a database.

    Raises:
        ConfigError: it has none.
    """
    if not (data_dir / "buffer.sqlite3").is_file():
        raise ConfigError(f"--data-dir {data_dir} holds no buffer: give the folder that `serve` was given")


@contextmanager
def opened_store(data_dir: Path) -> Iterator[Store]:
    """Opens the store of a ``--data-dir``, which a server may be using; raises as ``check_holds_buffer``."""
    from slime_plugins.rollout_buffer.storage.store import Store

    check_holds_buffer(data_dir)
    with closing(Store(data_dir)) as store:
        yield store


def print_json(value: Mapping[str, Any]) -> None:
    """Prints an object as indented JSON."""
    typer.echo(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode())


def print_page(content: RenderableType, page: Mapping[str, Any]) -> None:
    """Prints a page of a list, and the option for the next one."""
    console.print(content)
    if page["next_cursor"] is not None:
        console.print(f"more with --cursor {page['next_cursor']}")


def local_time(seconds: float) -> str:
    """Formats a time in the local time zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def refuse_existing(path: Path, *, overwrite: bool) -> None:
    """Refuses an output that exists, unless ``overwrite`` is True.

    Raises:
        ConfigError: it exists.
    """
    if path.exists() and not overwrite:
        raise ConfigError(f"{path} exists: give another --output, or --overwrite to replace it")


def assignments(flag: str, texts: Sequence[str] | None) -> dict[str, Any]:
    """Parses ``KEY=JSON`` texts; a value that is not JSON is a string.

    Raises:
        ConfigError: a text has no key or no ``=``.
    """
    values: dict[str, Any] = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise ConfigError(f"{flag} {text!r} is not KEY=VALUE")
        try:
            values[key] = json.loads(value)
        except ValueError:
            values[key] = value
    return values
