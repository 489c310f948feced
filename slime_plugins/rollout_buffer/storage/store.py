"""The store: one SQLite database in WAL mode and a folder of packs.

Order of a write: payloads and screenshots into a pack, fsync, then the rows, then the commit (WAL with
``synchronous=FULL``: the commit is an fsync), then the reply. A reader that sees a row therefore finds its bytes,
whichever process was killed in between. Concurrent writes share both fsyncs. Every process opens its own ``Store``;
each thread has a connection for reads, and all threads share one for writes, so that its page cache is up to date.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, TypeVar

from slime_plugins.rollout_buffer.errors import ConfigError, DamagedError, RolloutBufferError, StorageFullError
from slime_plugins.rollout_buffer.storage import migrations
from slime_plugins.rollout_buffer.storage.data_dir import DATABASE, is_owned, prepare
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
from slime_plugins.rollout_buffer.storage.storage_errors import StorageErrors, database_damaged_error
from slime_plugins.rollout_buffer.storage.write_lock import WriteLock, WriteLockOwner

Result = TypeVar("Result")
Work = Callable[[sqlite3.Connection], Any]

BUSY_TIMEOUT_S = 8.0
"""Time that SQLite waits for its own locks. A write lock that is held for longer is reported as trouble."""
PACKS_OF_A_QUOTA = 32
"""A quota has room for at least this many packs, unless they would be smaller than ``MIN_PACK_BYTES``."""
MIN_PACK_BYTES = 1024 * 1024
CHECKPOINT_PAGES = 4000
"""16 MB of WAL between checkpoints: pages that change often are copied into the database once."""
CHECKPOINT_PAGES_ON_RESERVE = 100
"""On a full disk the WAL must stay small."""


class Store:
    """Transactions on the database, and bytes in packs. Safe to use from many threads and processes."""

    def __init__(
        self, data_dir: Path, *, disk: Disk | None = None, max_bytes: int | None = None, owned: bool = False
    ) -> None:
        """Opens the store under ``data_dir``, also on a full disk; creates it if it is missing.

        ``max_bytes`` is the quota of the folder; None is unlimited. ``owned`` is true if the caller holds the
        directory's lock (``acquire_ownership``): a store whose lock another process holds is never migrated.

        Raises:
            ConfigError: the folder is on a network file system, was written by a newer version, or belongs to a running
                supervisor of another version.
            UnavailableError, StorageFullError: the disk does not allow it, or the database is damaged.
        """
        self.data_dir = data_dir.resolve()
        self.packs_dir = self.data_dir / "packs"
        self._max_bytes = max_bytes
        self._used_bytes = (0.0, 0)  # (monotonic time of the measurement, bytes)
        self._disk_tried_at = 0.0
        self._local = threading.local()
        self._open_connections: list[sqlite3.Connection] = []
        self._write_connection: sqlite3.Connection | None = None
        self._on_reserve = False
        self._lock = threading.Lock()
        self._commits: GroupCommit[Work] = GroupCommit(self._commit_batch)
        self._errors = StorageErrors(self.data_dir)
        with self._errors:
            prepare(self.data_dir)
            self.packs_dir.mkdir(exist_ok=True, mode=0o700)
            self._reserve = DiskReserve(self.data_dir)
            self._reserve.release_if_full()
            self._write_lock = WriteLock(self.data_dir)
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
        """Runs a block in one write transaction, which is durable when the context ends; an error rolls it back.

        On a full disk it uses the reserved space: callers of large writes call ``check_room`` before.

        Raises:
            StorageFullError: the disk is full. Nothing was written.
            UnavailableError: the write lock could not be acquired in time, or the disk does not work.
        """
        with self._errors, self._write_lock.hold():
            connection = self._write_connection = self._write_connection or self._connect()
            self._set_checkpoint_interval(connection)
            with _transaction(connection):
                yield connection

    def _set_checkpoint_interval(self, connection: sqlite3.Connection) -> None:
        if (on_reserve := self._reserve.release_if_full()) != self._on_reserve:
            self._on_reserve = on_reserve
            pages = CHECKPOINT_PAGES_ON_RESERVE if on_reserve else CHECKPOINT_PAGES
            connection.execute(f"PRAGMA wal_autocheckpoint={pages}")

    def commit(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """Runs ``work`` in one transaction together with the work of other threads (group commit); for frequent writes.

        Each work has its own savepoint: a work that raises is rolled back alone.

        Raises:
            StorageFullError, UnavailableError: as ``write``; and any exception of ``work``.
        """
        result: Result = self._commits.run(work)
        return result

    def commit_each(self, works: Sequence[Callable[[sqlite3.Connection], Result]]) -> list[Result | Exception]:
        """Runs each work in a savepoint of one transaction; returns the result or exception of each.

        An error of the database is returned for all of them.
        """
        if not works:
            return []
        tickets: list[Ticket[Work]] = [Ticket(work) for work in works]
        try:
            self._commit_batch(tickets)
        except Exception as error:  # noqa: BLE001 - returned for each work
            return [error for _ in works]
        return [ticket.result if ticket.error is None else _as_exception(ticket.error) for ticket in tickets]

    def _commit_batch(self, batch: Sequence[Ticket[Work]]) -> None:
        self.check_room()
        with self.write() as connection:
            if len(batch) == 1:
                batch[0].result = batch[0].work(connection)  # if it raises, the transaction is rolled back
                return
            for ticket in batch:
                _run_in_savepoint(connection, ticket)

    @contextlib.contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """Runs a block in one read transaction, which sees one consistent snapshot."""
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
        """Runs a block with one SELECT statement, which needs no transaction."""
        with self._errors:
            yield self._connection()

    def data_version(self) -> int:
        """Returns a number that changes when another connection commits: a cheap way to detect changes."""
        with self._errors:
            return int(self._connection().execute("PRAGMA data_version").fetchone()[0])

    # --- packs -------------------------------------------------------------------------------------------------------

    def append(self, blobs: Sequence[Blob]) -> list[BlobRef]:
        """Makes bytes durable and returns refs to them, for the rows that are written next.

        Raises:
            StorageFullError: the disk is full, or the quota is used up. Nothing was stored.
        """
        self.check_room()
        with self._errors:
            return self._writer.append(blobs)

    def fetch(self, ref: BlobRef) -> bytes:
        """Returns appended bytes.

        Raises:
            DamagedError: they are missing or differ from what was written.
        """
        return self._reader.read(ref)

    def fetch_each(self, refs: Iterable[BlobRef]) -> Iterator[tuple[BlobRef, memoryview]]:
        """Yields every distinct ref with its bytes, in disk order; they are valid until the next step.

        Raises:
            DamagedError: as ``fetch``, at the first damaged record.
        """
        return self._reader.each(refs)

    def fetch_ahead(self, refs: Iterable[BlobRef], pool: Executor) -> Reading:
        """Starts fetching in threads of a pool; ``Reading.each`` yields as ``fetch_each``."""
        return self._reader.begin(refs, pool)

    def get_payload(self, body: bytes | None, ref: str | None) -> bytes:
        """Returns a payload from its row or its pack.

        Raises:
            DamagedError: its bytes are missing or differ from what was written.
        """
        if body is not None:
            return checked_body(body)
        if ref is None:
            raise DamagedError("the payload of this trajectory was purged by retention")
        return self.fetch(BlobRef.parse(ref))

    def _next_pack(self) -> int:
        """Returns a number that no pack ever had, lost packs included: it is durable before the file is created."""
        query = "UPDATE counters SET last = max(last, ?) + 1 WHERE name = 'pack' RETURNING last"
        with self.write() as connection:
            return int(connection.execute(query, (highest_number(self.packs_dir),)).fetchone()[0])

    def _pack_bytes(self) -> int:
        """Returns the size limit of a pack: small under a quota, since a pack that is written to cannot be removed."""
        if self._max_bytes is None:
            return PACK_LIMIT_BYTES
        return min(PACK_LIMIT_BYTES, max(MIN_PACK_BYTES, self._max_bytes // PACKS_OF_A_QUOTA))

    def check_room(self) -> None:
        """Checks that the disk and the quota have space for large writes.

        Raises:
            StorageFullError: there is space for small writes only.
        """
        try:
            self._check_room()
        except StorageFullError:
            self._writer.seal()  # so that retention may remove the pack
            raise

    def _check_room(self) -> None:
        self._reserve.check()
        if self._max_bytes is not None and (used := self.used_bytes()) >= self._max_bytes:
            raise StorageFullError(
                f"the data directory uses {used} of {self._max_bytes} bytes: raise --max-data-bytes, or "
                "let delivered payloads be purged with --retain-delivered-s"
            )

    def used_bytes(self) -> int:
        """Returns the size of database and packs without free pages of the database; cached for a second."""
        measured_at, used = self._used_bytes
        if time.monotonic() - measured_at > 1.0:
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

    # --- health ------------------------------------------------------------------------------------------------------

    def allocate_reserve(self) -> bool:
        """Allocates the disk reserve if there is space; returns True if it is allocated. The supervisor calls it."""
        with self._errors:
            return self._reserve.allocate()

    def write_lock_owner(self) -> WriteLockOwner | None:
        """Returns the living process that holds the write lock; None if it is free."""
        return self._write_lock.owner()

    def trouble(self) -> str | None:
        """Returns a message on why writes are refused, with advice; None if they are not."""
        try:
            self._check_room()
            with self.read() as connection:
                connection.execute("SELECT 1 FROM jobs LIMIT 1").fetchone()
            self._try_the_disk()
        except RolloutBufferError as error:
            return error.message
        except OSError as error:
            return f"the data directory {self.data_dir} cannot be used: {error.strerror}"
        owner = self.write_lock_owner()
        return f"nothing can be written: {owner}" if owner is not None and owner.held_s > BUSY_TIMEOUT_S else None

    def _try_the_disk(self) -> None:
        """Makes a minimal write, which a read-only file system refuses; at most once a second."""
        if time.monotonic() - self._disk_tried_at > 1.0:
            with self._errors:
                os.utime(self.data_dir)
            self._disk_tried_at = time.monotonic()

    def close(self) -> None:
        """Closes every file and connection of this process; a second call does nothing."""
        self._writer.close()
        self._reader.close()
        self._write_lock.close()
        self.clock.close()
        with self._lock:
            connections, self._open_connections = self._open_connections, []
        for connection in connections:
            connection.close()
        self._local = threading.local()
        self._write_connection = None

    # --- connections -------------------------------------------------------------------------------------------------

    def _connection(self) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = self._connect()
        return connection

    def _connect(self) -> sqlite3.Connection:
        # check_same_thread: each thread uses its own connection; only close() uses those of other threads.
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

    def _create_or_migrate(self, *, owned: bool) -> None:
        exists, version = (self.data_dir / DATABASE).exists(), 0
        if exists:
            with self.read() as connection:
                version = migrations.version_of(connection)
            if version == migrations.SCHEMA_VERSION:
                return  # also on a full disk, where nothing could be written
            if version == 0:
                raise database_damaged_error("it has no tables", self.data_dir)
        if version > migrations.SCHEMA_VERSION:
            raise ConfigError(
                f"{self.data_dir} was written by a newer version (schema {version}, this version knows "
                f"{migrations.SCHEMA_VERSION}): use that version, or another --data-dir"
            )
        if not owned and is_owned(self.data_dir):
            raise ConfigError(
                f"{self.data_dir} belongs to a running rollout-buffer serve of another version: stop it first, or use "
                "its version"
            )
        if not exists:
            with self._errors:
                migrations.create_database(self.data_dir)
        try:
            with self.write() as connection:
                migrations.migrate(connection)
        except sqlite3.OperationalError as error:  # none of the disk: those are translated
            raise ConfigError(
                f"{self.data_dir} (schema {version}) cannot be migrated, and was not changed ({error}): no released "
                "version wrote it; use the version that did, or another --data-dir"
            ) from error


def checked_body(body: bytes) -> bytes:
    """Returns a payload from a row after a check of its form, because a payload in a row has no checksum.

    Raises:
        DamagedError: it is not a JSON object in UTF-8.
    """
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


def _run_in_savepoint(connection: sqlite3.Connection, ticket: Ticket[Work]) -> None:
    connection.execute("SAVEPOINT one")
    try:
        ticket.result = ticket.work(connection)
    except BaseException as error:
        if isinstance(error, sqlite3.Error) and not isinstance(error, sqlite3.IntegrityError):
            raise  # such as a full disk: the whole batch is rolled back
        ticket.error = error  # raised in the thread of the work's caller
        connection.execute("ROLLBACK TO one")
    connection.execute("RELEASE one")


def _as_exception(error: BaseException) -> Exception:
    """Returns an exception of a work; raises an exception that ends the process again."""
    if isinstance(error, Exception):
        return error
    raise error
