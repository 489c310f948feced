"""The store: one SQLite database in WAL mode and a folder of packs. It keeps bytes safe and decides nothing.

Order of a write: payloads and screenshots into a pack, fsync, then the rows, then the commit (WAL with
``synchronous=FULL``: the commit is an fsync), then the answer. A reader that sees a row therefore finds its bytes,
whatever was killed in between. Writes that wait at the same time share both fsyncs. Every process opens its own
``Store``; every thread gets its own connection to read with, and writes in turn with one that all share: what it has
in its cache is then what the last writer left there.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, TypeVar

from slime_plugins.rollout_buffer.errors import ConfigError, DamagedError, RolloutBufferError, StorageFullError
from slime_plugins.rollout_buffer.storage.data_dir import APPLICATION_ID, DATABASE, is_owned, prepare
from slime_plugins.rollout_buffer.storage.disk_reserve import DiskReserve
from slime_plugins.rollout_buffer.storage.group_commit import GroupCommit, Ticket
from slime_plugins.rollout_buffer.storage.pack_reader import PackReader, Reading
from slime_plugins.rollout_buffer.storage.pack_writer import (
    PACK_LIMIT_BYTES,
    Blob,
    BlobRef,
    Disk,
    PackWriter,
    highest_number,
)
from slime_plugins.rollout_buffer.storage.shared_clock import SharedClock
from slime_plugins.rollout_buffer.storage.storage_errors import StorageErrors, damaged
from slime_plugins.rollout_buffer.storage.write_lock import WriteLock, WriteLockOwner

Result = TypeVar("Result")
Work = Callable[[sqlite3.Connection], Any]

SCHEMA_VERSION = 1
SCHEMA_FILE = Path(__file__).with_name("schema.sql")
MIGRATIONS = Path(__file__).with_name("migrations")
"""One file of SQL for each version after the first: ``to_2.sql``. One that was released never changes again."""
BUSY_TIMEOUT_S = 8.0
PACKS_OF_A_QUOTA = 32
MIN_PACK_BYTES = 1024 * 1024
CHECKPOINT_PAGES = 4000
"""16 MB of log between checkpoints: pages that change again and again are copied into the database once."""
CHECKPOINT_PAGES_ON_RESERVE = 100
"""On a full disk the log starts again soon: it is to grow no further."""


class Store:
    """The single truth on disk. Safe to use from many threads and processes at once."""

    def __init__(
        self, data_dir: Path, *, disk: Disk | None = None, max_bytes: int | None = None, owned: bool = False
    ) -> None:
        """Opens the store under ``data_dir`` and creates it when it is not there, also on a full disk.

        ``max_bytes`` caps what lies in the folder; None is unlimited. ``owned`` says that the caller holds the
        directory's ``OwnerLock``: what another process holds is never migrated.

        Raises:
            ConfigError: the folder is on a network file system, was written before 0.1.0 or by a newer version, or is
                of another version whose supervisor still lives.
            UnavailableError, StorageFullError: the disk does not let it be opened, or the database is damaged.
        """
        self.data_dir = data_dir.resolve()
        self.packs_dir = self.data_dir / "packs"
        self._max_bytes = max_bytes
        self._used_bytes = (0.0, 0)
        self._tried_at = 0.0
        self._local = threading.local()
        self._open_connections: list[sqlite3.Connection] = []
        self._writing: sqlite3.Connection | None = None
        self._on_reserve = False
        self._lock = threading.Lock()
        self._commits: GroupCommit[Work] = GroupCommit(self._commit_batch)
        self._errors = StorageErrors(self.data_dir)
        with self._errors:
            prepare(self.data_dir)
            self.packs_dir.mkdir(exist_ok=True, mode=0o700)
            self._reserve = DiskReserve(self.data_dir)
            self._reserve.is_used()  # on a full disk: makes room for what is opened now
            self._turns = WriteLock(self.data_dir)
            self.clock = SharedClock(self.data_dir)
        self._writer = PackWriter(
            self.packs_dir, disk=disk, limit_bytes=self._pack_bytes(), next_number=self._next_pack
        )
        self._reader = PackReader(self.packs_dir)
        try:
            self._create_or_migrate(owned=owned)
        except BaseException:
            self.close()
            raise

    # --- transactions ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """Runs a block in one write transaction: all of it is durable when the block ends, or none of it happened.

        On a full disk it writes into the room that was kept for it; what takes much room asks ``check_room`` before.

        Raises:
            StorageFullError: the disk is full. Nothing of the block was kept.
            UnavailableError: other writers held the turn for too long, or the disk does not work.
        """
        with self._errors, self._turns.turn():
            connection = self._writing = self._writing or self._connect()
            self._spare_room(connection)
            with _transaction(connection):
                yield connection

    def _spare_room(self, connection: sqlite3.Connection) -> None:
        if (on_reserve := self._reserve.is_used()) != self._on_reserve:
            self._on_reserve = on_reserve
            pages = CHECKPOINT_PAGES_ON_RESERVE if on_reserve else CHECKPOINT_PAGES
            connection.execute(f"PRAGMA wal_autocheckpoint={pages}")

    def commit(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """Runs ``work`` as ``write`` would, in one transaction with what other threads bring at the same time.

        Each work stands in a savepoint of its own: one that raises is undone alone. For writes that come in numbers.

        Raises:
            StorageFullError, UnavailableError: as ``write``; and whatever ``work`` raises.
        """
        result: Result = self._commits.run(work)
        return result

    def commit_each(self, works: Sequence[Callable[[sqlite3.Connection], Result]]) -> list[Result | Exception]:
        """Runs works in one transaction, each in a savepoint; returns what each returned or raised.

        An error of the database itself is everybody's.
        """
        if not works:
            return []
        tickets: list[Ticket[Work]] = [Ticket(work) for work in works]
        try:
            self._commit_batch(tickets)
        except Exception as error:  # noqa: BLE001 - told to everybody who waits for it
            return [error for _ in works]
        return [ticket.result if ticket.error is None else _as_exception(ticket.error) for ticket in tickets]

    def _commit_batch(self, batch: Sequence[Ticket[Work]]) -> None:
        self.check_room()
        with self.write() as connection:
            if len(batch) == 1:
                batch[0].result = batch[0].work(connection)  # undone with its transaction, should it raise
                return
            for ticket in batch:
                _run_in_savepoint(connection, ticket)

    @contextlib.contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """Runs a block on one consistent snapshot."""
        with self._errors:
            connection = self._connection()
            connection.execute("BEGIN")
            try:
                yield connection
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    @contextlib.contextmanager
    def read_one(self) -> Iterator[sqlite3.Connection]:
        """Runs a block that makes one single SELECT, which needs no transaction around it."""
        with self._errors:
            yield self._connection()

    def data_version(self) -> int:
        """Returns a number that changes when another connection commits: the cheapest way to wait for news."""
        with self._errors:
            row = self._connection().execute("PRAGMA data_version").fetchone()
            return int(row[0])

    # --- packs -------------------------------------------------------------------------------------------------------

    def append(self, blobs: Sequence[Blob]) -> list[BlobRef]:
        """Makes bytes durable and returns where they are. Rows that name the places come after.

        Raises:
            StorageFullError: the disk is full, or its quota used up. Nothing of it was kept.
        """
        self.check_room()
        with self._errors:
            return self._writer.append(blobs)

    def _next_pack(self) -> int:
        """Returns a number that no pack ever had, also none that was lost: it is durable before a file has it."""
        query = "UPDATE counters SET last = max(last, ?) + 1 WHERE name = 'pack' RETURNING last"
        with self.write() as connection:
            return int(connection.execute(query, (highest_number(self.packs_dir),)).fetchone()[0])

    def _pack_bytes(self) -> int:
        """How large a pack becomes: under a quota small, since one that is written to is not given back."""
        if self._max_bytes is None:
            return PACK_LIMIT_BYTES
        return min(PACK_LIMIT_BYTES, max(MIN_PACK_BYTES, self._max_bytes // PACKS_OF_A_QUOTA))

    def check_room(self) -> None:
        """Raises ``StorageFullError`` when the disk, or the quota on it, has no room but for small writes."""
        try:
            self._check_room()
        except StorageFullError:
            self._writer.seal()  # retention may now take what it holds
            raise

    def _check_room(self) -> None:
        self._reserve.check()
        if self._max_bytes is not None and (used := self.used_bytes()) >= self._max_bytes:
            raise StorageFullError(
                f"the data directory holds {used} bytes of the {self._max_bytes} it may: raise --max-data-bytes, or "
                "let delivered payloads be purged with --retain-delivered-s"
            )

    def used_bytes(self) -> int:
        """Returns the size of database and packs; looked up at most once a second.

        Pages of the database that retention has emptied do not count: they are used again.
        """
        looked_up, used = self._used_bytes
        if time.monotonic() - looked_up > 1.0:
            files = [*self.data_dir.glob("buffer.sqlite3*"), *self.packs_dir.glob("*.pack")]
            used = -self._empty_bytes()
            for path in files:
                with contextlib.suppress(FileNotFoundError):
                    used += path.stat().st_size
            self._used_bytes = (time.monotonic(), used)
        return used

    def _empty_bytes(self) -> int:
        with self.read() as connection:
            pages, size = (
                connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("freelist_count", "page_size")
            )
        return int(pages) * int(size)

    # --- how it is ---------------------------------------------------------------------------------------------------

    def keep_reserve(self) -> bool:
        """Keeps room for a full disk, where there is room; for the supervisor, now and then. Returns whether it is."""
        with self._errors:
            return self._reserve.keep()

    def turn_owner(self) -> WriteLockOwner | None:
        """Returns the living process that holds the writers' turn; None when nobody does."""
        return self._turns.owner()

    def trouble(self) -> str | None:
        """Says in a sentence why writes are refused, and what to do; None when nothing is wrong."""
        try:
            self._check_room()
            with self.read() as connection:
                connection.execute("SELECT 1 FROM jobs LIMIT 1").fetchone()
            self._try_the_disk()
        except RolloutBufferError as error:
            return error.message
        except OSError as error:
            return f"the data directory {self.data_dir} cannot be used: {error.strerror}"
        owner = self.turn_owner()
        return f"nothing can be written: {owner}" if owner is not None and owner.held_s > BUSY_TIMEOUT_S else None

    def fetch(self, place: BlobRef) -> bytes:
        """Returns bytes that were appended.

        Raises:
            DamagedError: they are gone, or are not what was written.
        """
        return self._reader.read(place)

    def fetch_each(self, places: Iterable[BlobRef]) -> Iterator[tuple[BlobRef, memoryview]]:
        """Yields every place once with its bytes, in the order of the disk; they are valid until the next step.

        Raises:
            DamagedError: as ``fetch``, for the first place that is damaged.
        """
        return self._reader.each(places)

    def fetch_ahead(self, places: Iterable[BlobRef], pool: Executor) -> Reading:
        """Has threads of a pool fetch what is wanted soon; ``each`` of what is returned yields as ``fetch_each``."""
        return self._reader.begin(places, pool)

    def get_payload(self, body: bytes | None, place: str | None) -> bytes:
        """Returns a payload from its row or its pack.

        Raises:
            DamagedError: its bytes are gone, or are not what was written.
        """
        if body is not None:
            return whole_row(body)
        if place is None:
            raise DamagedError("the payload of this trajectory was purged: retention does not keep it any more")
        return self.fetch(BlobRef.parse(place))

    def close(self) -> None:
        """Closes every file and connection of this process; a second call does nothing."""
        self._writer.close()
        self._reader.close()
        self._turns.close()
        self.clock.close()
        with self._lock:
            connections, self._open_connections = self._open_connections, []
        for connection in connections:
            connection.close()
        self._local = threading.local()
        self._writing = None

    # --- connections -------------------------------------------------------------------------------------------------

    def _connection(self) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._connect()
            self._local.connection = connection
        return connection

    def _connect(self) -> sqlite3.Connection:
        # check_same_thread: each thread uses its own connection; only close() reaches into the others, at the end.
        path = self.data_dir / DATABASE
        connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        try:
            _set_up(connection)
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._open_connections.append(connection)
        return connection

    def _try_the_disk(self) -> None:
        """Does the least that a read-only file system refuses; once a second, however often somebody asks."""
        if time.monotonic() - self._tried_at > 1.0:
            with self._errors:
                os.utime(self.data_dir)
            self._tried_at = time.monotonic()

    def _create_or_migrate(self, *, owned: bool) -> None:
        is_there, version = (self.data_dir / DATABASE).exists(), 0
        if is_there:
            with self.read() as connection:
                version = _version(connection)
            if version == SCHEMA_VERSION:
                return  # also on a full disk, where nothing could be written
            if version == 0:
                raise damaged("it has no tables", self.data_dir)
        if version > SCHEMA_VERSION:
            raise ConfigError(
                f"{self.data_dir} was written by a newer version (schema {version}, this one knows {SCHEMA_VERSION}): "
                "use that version, or another --data-dir"
            )
        if not owned and is_owned(self.data_dir):
            raise ConfigError(
                f"{self.data_dir} belongs to a running rollout-buffer serve of another version, and is not changed "
                "under it: stop it first, or use the version that it is of"
            )
        if not is_there:
            with self._errors:
                _create(self.data_dir)
        with self.write() as connection:
            for step in range(_version(connection) + 1, SCHEMA_VERSION + 1):  # another process may have been quicker
                _run_script(connection, (MIGRATIONS / f"to_{step}.sql").read_text("utf-8"))
                connection.execute(f"PRAGMA user_version={step}")


def whole_row(body: bytes) -> bytes:
    """Returns a payload that lay in its row, which has no checksum; raises ``DamagedError`` when it is garbled."""
    if body[:1] + body[-1:] == b"{}" and b"\0" not in body:
        with contextlib.suppress(UnicodeDecodeError):
            if body.isascii() or body.decode():
                return body
    raise DamagedError("its row in the database is not what was written")


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _set_up(connection: sqlite3.Connection) -> None:
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA foreign_keys=ON")
    connection.execute("PRAGMA temp_store=MEMORY")
    connection.execute(f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES}")


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _create(data_dir: Path) -> None:
    """Makes a database of version 1. It appears under its name when it is whole, and once, whoever else makes one."""
    descriptor, name = tempfile.mkstemp(
        prefix=f"{DATABASE}.", dir=data_dir
    )  # mode 0600: SQLite's other files take it on
    os.close(descriptor)
    try:
        with contextlib.closing(sqlite3.connect(name, isolation_level=None)) as connection:
            marks = f"PRAGMA user_version=1; PRAGMA application_id={APPLICATION_ID};"
            connection.execute("PRAGMA journal_mode=OFF")  # nobody sees it before all of it is on the disk
            connection.executescript(f"BEGIN; {SCHEMA_FILE.read_text('utf-8')}; {marks} COMMIT")
        with contextlib.suppress(FileExistsError):
            os.link(name, data_dir / DATABASE)
    finally:
        os.unlink(name)


def _run_in_savepoint(connection: sqlite3.Connection, ticket: Ticket[Work]) -> None:
    connection.execute("SAVEPOINT one")
    try:
        ticket.result = ticket.work(connection)
    except sqlite3.IntegrityError as error:
        ticket.error = error
        connection.execute("ROLLBACK TO one")
    except sqlite3.Error:
        raise  # a full disk or the like: nothing of the batch can be kept
    except BaseException as error:  # noqa: BLE001 - it belongs to the caller who brought the work, and is raised there
        ticket.error = error
        connection.execute("ROLLBACK TO one")
    connection.execute("RELEASE one")


def _as_exception(error: BaseException) -> Exception:
    """Returns what a work raised; what ends a process is not a work's to raise, and ends it."""
    if isinstance(error, Exception):
        return error
    raise error


def _run_script(connection: sqlite3.Connection, script: str) -> None:
    """Runs statements inside the open transaction; ``executescript`` would commit it first."""
    without_comments = re.sub(r"--[^\n]*", "", script)
    statement = ""
    for piece in without_comments.split(";"):
        statement += f"{piece};"
        if sqlite3.complete_statement(statement):  # a trigger holds statements of its own
            if statement.strip() != ";":
                connection.execute(statement)
            statement = ""
