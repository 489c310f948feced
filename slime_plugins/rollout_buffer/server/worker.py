"""gunicorn's worker class: uvicorn's server in each process, with connections shared out over the workers.

gunicorn starts and replaces processes, uvicorn speaks HTTP. New connections go to the worker that has the fewest: each
has one interpreter, and whoever woke first would take them all.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import mmap
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from gunicorn.glogging import Logger as GunicornLogger
from gunicorn.workers.base import Worker as GunicornWorker

from slime_plugins.rollout_buffer.observability.logs import LogFormat, formatter, log_format, set_up_logging
from slime_plugins.rollout_buffer.server.asgi import Application
from slime_plugins.rollout_buffer.server.connection_limits import (
    HEAD_LIMIT_S,
    IDLE_LIMIT_S,
    Connection,
    ConnectionLimits,
    raise_file_limit,
)
from slime_plugins.rollout_buffer.server.pending_connections import PendingConnections

HEAD_START_S = 0.001
"""What a worker with more connections leaves to the others, which were woken for the same one. If they are stuck or
gone, it takes the connection then."""
NO_FILES_PAUSE_S = 0.1
ACCEPTS_AT_ONCE = 12
"""Then those that were accepted are read from: under a flood, each has its turn before it has to give way."""
CROWDED_ACCEPTS_AT_ONCE = 40
CROWDED_PAUSE_S = 0.01
"""Between them, when there is no room for all: clients that come back at once leave time for those who stay."""
PENDING_INTERVAL_S = 0.05
CLOSE_IDLE_INTERVAL_S = 1.0
NOTIFY_INTERVAL_S = 10
GRACEFUL_TIMEOUT_S = 4
SWITCH_INTERVAL_S = 0.001
"""How long the event loop waits for a thread that parses a large body, each time it wants to go on: a fifth of
Python's own."""
GC_THRESHOLDS = (20_000, 20, 50)
"""Parsed items are many objects and no cycles: looking through them for cycles took a twentieth of a write's time."""

logger = logging.getLogger(__name__)


class Logger(GunicornLogger):  # type: ignore[misc]  # gunicorn brings no types
    """gunicorn's own logger; where lines are to be JSON, its lines and the application's are."""

    def setup(self, cfg: Any) -> None:
        """Sets the loggers up as gunicorn does, then gives them the wanted format."""
        super().setup(cfg)
        if log_format() is LogFormat.JSON:
            set_up_logging(LogFormat.JSON)
            for handler in self.error_log.handlers:
                handler.setFormatter(formatter(LogFormat.JSON))


class ConnectionCounts:
    """How many connections each worker has, in memory that they all see: made before they are forked."""

    _ENTRY = struct.Struct("=qq")
    _ENTRIES = 64

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, self._ENTRIES * self._ENTRY.size)

    def note(self, worker: int, connections: int, pid: int) -> None:
        """Says how many connections a worker has; ``worker`` is gunicorn's number of it."""
        self._ENTRY.pack_into(self._memory, worker % self._ENTRIES * self._ENTRY.size, pid, connections)

    def is_ahead(self, connections: int) -> bool:
        """Tells whether another worker has fewer connections; of many, a few more or less do not count."""
        own, fewer = os.getpid(), connections - connections // 16
        return any(
            have < fewer and pid not in (0, own) and _lives(pid) for pid, have in self._ENTRY.iter_unpack(self._memory)
        )


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


_counts = ConnectionCounts()


class Acceptor:
    """Accepts the connections of one listening socket, and leaves them to workers that have fewer."""

    def __init__(
        self,
        listener: socket.socket,
        make_connection: Callable[[], Connection],
        limits: ConnectionLimits,
        note: Callable[[int], bool],
    ) -> None:
        """``note`` is told how many connections there are, and tells whether another worker has fewer."""
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._make_connection = make_connection
        self._limits = limits
        self._note = note
        self._beginning: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._pending = PendingConnections(limits.most_waiting, HEAD_LIMIT_S, self._begin)
        listener.setblocking(False)
        self._watch()
        self._poll_pending()

    def close_soon(self) -> None:
        """Accepts nothing any more; for signal handlers."""
        self._loop.call_soon_threadsafe(self.close)

    def close(self) -> None:
        """Accepts nothing any more."""
        self._closed = True
        self._loop.remove_reader(self._listener)
        self._pending.close()

    def _watch(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._listener, self._on_readable)

    def _on_readable(self) -> None:
        if self._limits.are_reached:
            if self._pending.takes_more:
                self._accept_some(self._pending.add, CROWDED_ACCEPTS_AT_ONCE)
            self._pause(CROWDED_PAUSE_S, lambda: None)
        elif self._is_ahead():
            self._pause(HEAD_START_S, lambda: self._accept_some(self._begin, 1))
        else:
            self._accept_some(self._begin, ACCEPTS_AT_ONCE)

    def _is_ahead(self) -> bool:
        return self._note(len(self._limits) + len(self._beginning))

    def _pause(self, seconds: float, then: Callable[[], None]) -> None:
        self._loop.remove_reader(self._listener)

        def go_on() -> None:
            if not self._closed:
                then()
                self._watch()

        self._loop.call_later(seconds, go_on)

    def _accept_some(self, take: Callable[[socket.socket], None], most: int) -> None:
        for _ in range(most):
            client = self._accept()
            if client is None:
                break
            take(client)
            if not self._limits.are_reached and self._is_ahead():
                break

    def _accept(self) -> socket.socket | None:
        """Accepts one connection; None when there was none."""
        try:
            client, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return None
        except OSError as error:
            self._out_of_files(error)
            return None
        client.setblocking(False)
        return client

    def _begin(self, client: socket.socket) -> None:
        task = self._loop.create_task(self._connect(client))
        self._beginning.add(task)
        task.add_done_callback(self._beginning.discard)

    async def _connect(self, client: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make_connection, client)
        except OSError:  # the client has gone
            client.close()

    def _poll_pending(self) -> None:
        if self._closed:
            return
        if self._pending:
            self._pending.poll(admits_all=not self._limits.are_reached)
        self._loop.call_later(PENDING_INTERVAL_S, self._poll_pending)

    def _out_of_files(self, error: OSError) -> None:
        """Has somebody give way, and tries again a little later: the listener stays readable all the while."""
        if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
            logger.warning("a connection cannot be accepted: %s", error)
        self._limits.make_room()
        self._pause(NO_FILES_PAUSE_S, lambda: None)


class Server(uvicorn.Server):
    """uvicorn's server, whose connections keep to limits and are shared out over the workers."""

    def __init__(self, config: uvicorn.Config, application: Application, note: Callable[[int], bool]) -> None:
        """``note`` is told how many connections there are, and tells whether another worker has fewer."""
        super().__init__(config)
        self._application = application
        self._note = note
        self._acceptors: list[Acceptor] = []
        self._idle_closer: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to accept connections on the sockets that gunicorn listens on."""
        await super().startup(sockets=[])
        limits = self._application.connections
        self._acceptors = [Acceptor(each, self._connection, limits, self._note) for each in sockets or []]
        self._idle_closer = asyncio.get_running_loop().create_task(self._close_idle_for_ever())

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Accepts nothing more from the moment of the signal on: a successor may be starting already."""
        super().handle_exit(sig, frame)
        for acceptor in self._acceptors:
            acceptor.close_soon()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts nothing more, answers what is under way, and closes."""
        for acceptor in self._acceptors:
            acceptor.close()
        self._application.stop()
        await super().shutdown(sockets=sockets)
        if self._idle_closer is not None:
            self._idle_closer.cancel()

    def _connection(self) -> Connection:
        limits = self._application.connections
        return Connection(
            limits, config=self.config, server_state=self.server_state, app_state=self.lifespan.state, _loop=None
        )

    async def _close_idle_for_ever(self) -> None:
        while True:
            self._application.connections.close_idle()
            self._note(len(self._application.connections))
            await asyncio.sleep(CLOSE_IDLE_INTERVAL_S)


class Worker(GunicornWorker):  # type: ignore[misc]  # gunicorn brings no types
    """A process of gunicorn's that serves the application with uvicorn."""

    def init_process(self) -> None:
        """Prepares the process, loads the application and serves."""
        raise_file_limit()
        gc.freeze()  # what was loaded stays
        gc.set_threshold(*GC_THRESHOLDS)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # what strangers get wrong would fill the log
        super().init_process()

    def init_signals(self) -> None:
        """Leaves signals to uvicorn, which repeats those that it was stopped by when it has stopped."""
        for number in self.SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop_before_serving)
        signal.signal(signal.SIGUSR1, self.handle_usr1)
        signal.siginterrupt(signal.SIGUSR1, False)

    def run(self) -> None:
        """Serves until gunicorn asks it to stop."""
        application: Application = self.wsgi
        config = uvicorn.Config(
            application,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=int(IDLE_LIMIT_S),
            timeout_graceful_shutdown=GRACEFUL_TIMEOUT_S,
            timeout_notify=NOTIFY_INTERVAL_S,
            callback_notify=self._notify,
        )
        server = Server(config, application, self._note)
        try:
            with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
                if self.alive:
                    runner.run(server.serve(sockets=[each.sock for each in self.sockets]))
        finally:
            application.close()

    async def _notify(self) -> None:
        self.notify()

    def _note(self, connections: int) -> bool:
        _counts.note(self.age, connections, self.pid)
        return _counts.is_ahead(connections)

    def _stop_before_serving(self, _signal: int, _frame: object) -> None:
        self.alive = False
