"""What all commands share: options, output, errors as sentences, and what an exit code means."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any

import orjson
import requests
import typer
from rich.console import Console, RenderableType

from slime_plugins.rollout_buffer.client import RolloutBufferClient
from slime_plugins.rollout_buffer.config import DEFAULT_HOST, DEFAULT_PORT, token_from_environment
from slime_plugins.rollout_buffer.errors import (
    BusyError,
    ConfigError,
    ConflictError,
    RequestError,
    RolloutBufferError,
    StorageFullError,
    UnavailableError,
)

__all__ = [
    "DEFAULT_URL",
    "EXIT_CODES",
    "AndroidConfig",
    "AndroidSetting",
    "AsJson",
    "ExitCode",
    "JobId",
    "Url",
    "connect",
    "console",
    "errors",
    "local_time",
    "print_json",
    "print_page",
    "refuse_existing",
    "said_plainly",
]


class ExitCode(IntEnum):
    """What a command's end says."""

    WELL = 0  # done
    NO = 1  # the answer is no (not well, something is missing), or it failed
    WRONG_CALL = 2  # an option, a file, a name or the token is wrong: the same call will fail again
    OUT_OF_REACH = 3  # the buffer does not answer
    REFUSED = 4  # the buffer cannot do it in its present state; the same call may be right later


EXIT_CODES = (
    "Exit codes: 0 done; 1 the answer is no, or it failed; 2 the call is wrong (option, file, name, token); "
    "3 the buffer does not answer; 4 the buffer refuses it in its present state (conflict, busy, full)."
)
WIDTH_OF_A_FILE = 120
console = Console(width=None if sys.stdout.isatty() else WIDTH_OF_A_FILE)
errors = Console(stderr=True)

DEFAULT_URL = f"http://{DEFAULT_HOST}:{DEFAULT_PORT}"
Url = Annotated[
    str,
    typer.Option(
        "--url", envvar="ROLLOUT_BUFFER_URL", help="Where the buffer serves. Its token: ROLLOUT_BUFFER_TOKEN."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
AndroidConfig = Annotated[
    Path | None,
    typer.Option(
        envvar="ROLLOUT_BUFFER_ANDROID_WORLD_CONFIG",
        help="File with the settings of Android World and its devices. [default: the one that ships]",
    ),
]
AndroidSetting = Annotated[
    list[str] | None,
    typer.Option(
        "--android",
        metavar="KEY=VALUE",
        help="One of these settings, before file and environment; repeatable. Sections with dots.",
    ),
]
JobId = Annotated[str, typer.Argument(help="The job's id, as `rollout-buffer jobs` lists it.")]


@contextmanager
def said_plainly() -> Iterator[None]:
    """Turns what users can mend into one sentence and an exit code."""
    try:
        yield
    except (BusyError, ConflictError, StorageFullError, UnavailableError) as error:
        raise _ended(error.message, ExitCode.REFUSED) from error
    except (ConfigError, RequestError) as error:
        raise _ended(error.message, ExitCode.WRONG_CALL) from error
    except RolloutBufferError as error:
        raise _ended(error.message, ExitCode.NO) from error
    except requests.RequestException as error:
        says = f"no answer from the buffer ({error}). Is `rollout-buffer serve` up? Give --url when it is elsewhere."
        raise _ended(says, ExitCode.OUT_OF_REACH) from error
    except OSError as error:
        raise _ended(f"{error.filename or 'a file'}: {error.strerror or error}", ExitCode.WRONG_CALL) from error
    except ValueError as error:
        raise _ended(f"{error}. Is --url really a rollout buffer's?", ExitCode.NO) from error


def _ended(says: str, code: ExitCode) -> typer.Exit:
    errors.print(f"rollout-buffer: {says}", style="red", highlight=False, markup=False)
    return typer.Exit(code.value)


def connect(url: str) -> RolloutBufferClient:
    """Returns a client with the token of the environment."""
    return RolloutBufferClient(url, token=token_from_environment(), timeout_s=30.0)


def print_json(value: Any) -> None:
    """Prints a value as indented JSON."""
    typer.echo(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode())


def print_page(content: RenderableType, page: Mapping[str, Any]) -> None:
    """Prints one page of a list, and how to get the next."""
    console.print(content)
    if page["next_cursor"] is not None:
        console.print(f"more with --cursor {page['next_cursor']}")


def local_time(seconds: float) -> str:
    """Says a moment in the time of this machine."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def refuse_existing(path: Path, *, overwrite: bool) -> None:
    """Raises ``ConfigError`` when the output is there already and may not be replaced."""
    if path.exists() and not overwrite:
        raise ConfigError(f"{path} exists: give another --output, or --overwrite to replace it")
