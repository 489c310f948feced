"""Validated settings of ``rollout-buffer serve`` and its processes. Units are in the names; None is unlimited."""

from __future__ import annotations

import contextlib
import difflib
import ipaddress
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from slime_plugins.rollout_buffer.errors import ConfigError

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8889
MAX_TURN_BYTES = 64 * 1024 * 1024
"""Default limit of a body with a turn: a request to the gateway or a rollout server, or a trainer's reply to one."""
SETTINGS_VARIABLE = "ROLLOUT_BUFFER_SERVE_SETTINGS"
"""Environment variable that passes ``ServeSettings`` to the server's processes, as JSON."""

Settings = TypeVar("Settings", bound="ListenerSettings")


class ListenerSettings(BaseModel):
    """Settings of any process of this project that serves an address."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field(
        default=DEFAULT_HOST, description="Address to serve on; anything but loopback needs --token-file."
    )
    token_file: Path | None = Field(
        default=None, description="File whose first line is the bearer token that clients must send."
    )
    allowed_hosts: tuple[str, ...] = Field(
        default=(),
        description="Host name, in addition to loopback's, that a server without a token accepts; repeatable.",
        json_schema_extra={"flag": "--allowed-host"},
    )

    @model_validator(mode="after")
    def _only_loopback_without_a_token(self) -> Self:
        if why := why_exposed(self.host, self.token_file):
            raise ValueError(why)
        return self


class ServeSettings(ListenerSettings):
    """Settings of ``rollout-buffer serve``, also read by its gunicorn workers and runners."""

    data_dir: Path = Field(
        default=Path("rollout_buffer_data"),
        description="Everything that must survive: database, payloads, screenshots, logs. A local disk.",
    )
    data_roots: tuple[Path, ...] = Field(
        default=(),
        description="Folder that input files may lie under; repeatable. [default: the working directory]",
        json_schema_extra={"flag": "--data-root"},
    )
    allowed_tokenizers: tuple[str, ...] = Field(
        default=(),
        description="Folder that a job's tokenizer_path may be in, in addition to --data-root, or an allowed name of "
        "the model hub; repeatable.",
        json_schema_extra={"flag": "--allow-tokenizer"},
    )
    port: int = Field(default=DEFAULT_PORT, ge=0, le=65535, description="Port to serve on.")
    workers: int = Field(default=2, ge=1, le=64, description="gunicorn worker processes.")
    threads: int = Field(
        default=16, ge=2, le=512, description="Threads of each worker for the routes that carry no data."
    )
    max_connections: int = Field(
        default=2048, ge=16, le=60_000, description="Requests under way in each worker; one more is answered 503."
    )
    max_body_bytes: int = Field(default=256 * 1024 * 1024, ge=1024, description="Largest request body.")
    # must exceed the age of the oldest checkpoint to which a trainer may return
    retain_delivered_s: float | None = Field(
        default=None, gt=0, description="Purge the payloads of trajectories delivered longer ago. [default: never]"
    )
    max_data_bytes: int | None = Field(
        default=None,
        ge=1_000_000,
        description="Size limit of --data-dir; further writes are answered 507, and runners wait until there is "
        "space. [default: unlimited]",
    )
    runner_heartbeat_timeout_s: float = Field(
        default=120.0, gt=0, description="Seconds without a heartbeat after which a runner is killed and started again."
    )
    service_heartbeat_timeout_s: float = Field(
        default=60.0, gt=0, description="The same for the gateway, for gunicorn's parent process and for the local Ray."
    )
    writer_turn_limit_s: float = Field(
        default=10.0,
        gt=0,
        description="Seconds after which a process frozen in the middle of a write is killed, the supervisor too.",
    )
    generator_dirs: tuple[Path, ...] = Field(
        default=(),
        description="Folder with generator files of your own; repeatable.",
        json_schema_extra={"flag": "--generator-dir"},
    )
    ray_address: str | None = Field(
        default=None, description="Ray cluster that holds the devices. [default: a local one, started when needed]"
    )
    ray_num_cpus: int | None = Field(default=None, ge=1, description="CPUs of the local Ray cluster.")
    gateway_port: int | None = Field(
        default=None,
        ge=1,
        le=65535,
        description="Also serve the OpenAI-compatible gateway, on this port. [default: no gateway]",
    )
    gateway_workers: int = Field(default=1, ge=1, le=64, description="Processes of the gateway.")
    gateway_public_url: str | None = Field(
        default=None,
        description="Base URL of the gateway for agents. [default: the address at which a session is opened]",
    )
    scoring_hosts: tuple[str, ...] = Field(
        default=(),
        description="Host (host, host:port, *.domain, network) that a gateway session's scoring_url may name; "
        "repeatable.",
        json_schema_extra={"flag": "--scoring-host"},
    )

    @property
    def base_url(self) -> str:
        """URL of the server for processes on this host."""
        return url_of(self.host, self.port)

    def resolved_data_roots(self) -> tuple[Path, ...]:
        """Returns the data roots as absolute real paths."""
        return tuple(root.resolve() for root in (self.data_roots or (Path.cwd(),)))


def url_of(host: str, port: int) -> str:
    """Returns the URL by which processes of this host reach an address that is listened on."""
    name = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def build_serve_settings(**values: object) -> ServeSettings:
    """Builds the settings; raises as ``build_settings``, also for a folder that does not exist."""
    settings = build_settings(ServeSettings, values)
    for flag, folders in (("--data-root", settings.data_roots), ("--generator-dir", settings.generator_dirs)):
        for folder in folders:
            if not folder.is_dir():
                raise ConfigError(f"{flag} {folder} is not an existing folder")
    return settings


def build_settings(kind: type[Settings], values: Mapping[str, object]) -> Settings:
    """Builds the settings of a server, and checks its ``token_file``, if it has one.

    Raises:
        ConfigError: a setting is invalid (the message names each), or as ``read_token``.
    """
    try:
        settings = kind.model_validate(values)
    except ValidationError as error:
        raise ConfigError("; ".join(validation_messages(error))) from error
    if settings.token_file is not None:
        read_token(settings.token_file)
    return settings


def why_exposed(host: str, token_file: Path | None) -> str:
    """Returns an error message if other machines can reach ``host`` and there is no token; else an empty text."""
    if token_file is not None or is_loopback(host):
        return ""
    return (
        f"host {host} can be reached from other machines: give --token-file FILE (one line, the token), "
        "or serve on 127.0.0.1"
    )


def is_loopback(host: str) -> bool:
    """Returns True if only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_token(path: Path) -> str:
    """Returns the token in a file.

    Raises:
        ConfigError: the file cannot be read, or its first line has fewer than 16 characters or not only ASCII.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file {path} cannot be read: {error}") from error
    token = lines[0].strip() if lines else ""
    if not token.isascii():
        raise ConfigError(f"--token-file {path} must hold ASCII characters only: headers carry no others reliably")
    if len(token) < 16:
        raise ConfigError(f"--token-file {path} must hold a token of at least 16 characters on its first line")
    return token


def generator_files(folders: Iterable[Path]) -> dict[str, str]:
    """Returns the Python files in the folders of ``--generator-dir``, each with its times and size as a text."""
    states = {}
    for path in (path for folder in folders for path in folder.glob("*.py")):
        with contextlib.suppress(OSError):  # it was deleted a moment ago
            state = path.stat()
            states[str(path)] = f"{state.st_mtime_ns} {state.st_ctime_ns} {state.st_size}"
    return states


def token_from_environment() -> str | None:
    """Returns the client's token: the value of ``ROLLOUT_BUFFER_TOKEN``, None if it is not set."""
    return os.environ.get("ROLLOUT_BUFFER_TOKEN", "").strip() or None


def validation_messages(error: ValidationError, known: Iterable[str] = ()) -> list[str]:
    """Converts pydantic's errors to messages that start with the field's name; ``known`` are the valid fields."""
    messages = []
    for entry in error.errors():
        # In a union (num_process: a number or "auto") pydantic's path also has the names of its validators.
        path = [str(part)[:100] for part in entry["loc"] if not str(part).startswith(("function-", "literal["))]
        where = ".".join(path) or "the request"
        if entry["type"] == "extra_forbidden":
            near = difflib.get_close_matches(where, list(known), n=1)
            messages.append(f"{where} is not known{f'; did you mean {near[0]}?' if near else ''}")
            continue
        message = entry["msg"].removeprefix("Value error, ")
        messages.append(f"{where}: {message}" if entry["loc"] else message)
    return messages
