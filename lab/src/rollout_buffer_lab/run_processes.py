"""The buffer and the engine of a run of ``demo`` or ``learn``, in a folder that each run empties first."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from slime_plugins.rollout_buffer.errors import ConfigError, RolloutBufferError
from slime_plugins.rollout_buffer.storage.data_dir import OWNER_LOCK, is_owned
from slime_plugins.rollout_buffer.supervisor.child_processes import ChildProcess, free_ports
from slime_plugins.rollout_buffer.supervisor.child_startup import wait_until_healthy

PACKAGE = "slime_plugins.rollout_buffer"
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 40.0


def refuse_if_served(data_dir: Path) -> None:
    """Checks that no ``serve`` uses the data directory of an earlier run.

    Raises:
        ConfigError: a supervisor holds its lock.
    """
    if (data_dir / OWNER_LOCK).exists() and is_owned(data_dir):
        raise ConfigError(
            f"a rollout-buffer serve uses {data_dir}, which would be emptied first: stop it, or give another --folder"
        )


@contextmanager
def buffer_and_engine(
    run: Path,
    *,
    serve: Sequence[str],
    engine: Sequence[str] | None,
    error: type[RolloutBufferError],
    environment: Mapping[str, str],
) -> Iterator[tuple[str, str]]:
    """Runs ``serve`` and ``engine`` with these arguments on free ports; stops both at the end of the context.

    Yields the URLs of the buffer and of the engine. Logs and the buffer's data are in the folder ``run``. With None for
    ``engine`` only the buffer runs, and nothing answers at the engine's URL.

    Raises:
        RolloutBufferError: a process does not start. The exception is an ``error``; its message has the end of the log.
    """
    # A local run: a token for another buffer must be neither required nor sent.
    os.environ.pop("ROLLOUT_BUFFER_TOKEN", None)
    buffer_url, engine_url = (f"http://127.0.0.1:{port}" for port in free_ports(2))
    commands = {} if engine is None else {engine_url: ("engine", ["engine", *engine])}
    commands[buffer_url] = ("buffer", ["serve", "--data-dir", str(run / "data"), *serve])
    children: dict[str, ChildProcess] = {}
    try:
        for url, (name, arguments) in commands.items():
            command = [sys.executable, "-m", PACKAGE, *arguments, "--port", url.rpartition(":")[2]]
            children[url] = ChildProcess(name, command, log_file=run / f"{name}.log", environment=environment)
        for url, child in children.items():
            wait_until_healthy(child, f"{url}/health", timeout_s=START_TIMEOUT_S, error=error)
        yield buffer_url, engine_url
    finally:
        for child in reversed(children.values()):
            child.stop(STOP_TIMEOUT_S)
