"""The store: one SQLite database in WAL mode and two folders of files. It keeps bytes safe and decides nothing.

Order of a write: image files, then the payload file, each fsynced with its folder, then the row, then the commit (WAL
with ``synchronous=FULL``: the commit is an fsync). A reader that sees a row therefore finds its files, whatever was
killed in between. Every process opens its own ``Store``; every thread gets its own connection.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

from slime_plugins.rollout_buffer.errors import ConfigError, StorageFullError, UnavailableError
from slime_plugins.rollout_buffer.types import Image

__all__ = ["Store"]

SCHEMA_VERSION = 1
SCHEMA_FILE = Path(__file__).with_name("schema.sql")
INLINE_BODY_BYTES = 32 * 1024
"""Payloads up to here live in their row: one fsync less. Larger ones would bloat the database's pages."""
BUSY_TIMEOUT_S = 30.0
NETWORK_FILE_SYSTEMS = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "fuse.sshfs", "lustre", "ceph", "glusterfs"})
MIGRATIONS: dict[int, str] = {}
"""SQL that takes a database from the version named by the key to the next one."""


class Store:
    """The single truth on disk. Safe to use from many threads and processes at once."""

    def __init__(self, data_dir: Path) -> None:
        """Opens the store under ``data_dir`` and creates it when it is not there.

        Raises:
            ConfigError: the folder is on a network file system, or was written by a newer version.
        """
        self.data_dir = data_dir.resolve()
        self.images_dir = self.data_dir / "images"
        self.payloads_dir = self.data_dir / "payloads"
        self._local = threading.local()
        self._open_connections: list[sqlite3.Connection] = []
        self._lock = threading.Lock()
        for folder in (self.data_dir, self.images_dir, self.payloads_dir):
            folder.mkdir(parents=True, exist_ok=True)
        _refuse_network_file_system(self.data_dir)
        self._create_or_migrate()

    # --- transactions ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """Runs a block in one write transaction: all of it is durable when the block ends, or none of it happened.

        Raises:
            StorageFullError: the disk is full. Nothing of the block was kept.
            UnavailableError: other writers held the database for longer than ``BUSY_TIMEOUT_S``.
        """
        connection = self._connection()
        with _translated_errors():
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """Runs a block on one consistent snapshot."""
        connection = self._connection()
        with _translated_errors():
            connection.execute("BEGIN")
            try:
                yield connection
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    def data_version(self) -> int:
        """Returns a number that changes when another connection commits: the cheapest way to wait for news."""
        row = self._connection().execute("PRAGMA data_version").fetchone()
        return int(row[0])

    def close(self) -> None:
        """Closes every connection of this process; a second call does nothing."""
        with self._lock:
            connections, self._open_connections = self._open_connections, []
        for connection in connections:
            connection.close()
        self._local = threading.local()

    # --- files -------------------------------------------------------------------------------------------------------

    def put_image(self, image: Image) -> None:
        """Makes a screenshot durable under its hash; one that is there already is not written again."""
        path = self.image_path(image.sha256)
        if not path.exists():
            _write_durably(path, image.data)

    def image_path(self, sha256: str) -> Path:
        """Returns where the screenshot of that hash is, or would be."""
        return self.images_dir / sha256[:2] / sha256

    def put_payload(self, body: bytes) -> tuple[bytes | None, str | None]:
        """Keeps a payload: returns (bytes for the row, None) when small, else (None, name of its durable file)."""
        if len(body) <= INLINE_BODY_BYTES:
            return body, None
        name = uuid.uuid4().hex
        _write_durably(self.payload_path(name), body)
        return None, name

    def payload_path(self, name: str) -> Path:
        """Returns where the payload file of that name is."""
        return self.payloads_dir / name[:2] / name

    def get_payload(self, body: bytes | None, name: str | None) -> bytes:
        """Returns a payload from its row or its file."""
        if body is not None:
            return body
        if name is None:
            raise UnavailableError("a stored trajectory has neither a body nor a file")
        return self.payload_path(name).read_bytes()

    def drop_payload(self, name: str | None) -> None:
        """Removes the file of a payload whose row was not kept."""
        if name is not None:
            self.payload_path(name).unlink(missing_ok=True)

    # --- connections -------------------------------------------------------------------------------------------------

    def _connection(self) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._connect()
            self._local.connection = connection
            with self._lock:
                self._open_connections.append(connection)
        return connection

    def _connect(self) -> sqlite3.Connection:
        # check_same_thread: each thread uses its own connection; only close() reaches into the others, at the end.
        connection = sqlite3.connect(
            self.data_dir / "buffer.sqlite3", timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute("PRAGMA temp_store=MEMORY")
        return connection

    def _create_or_migrate(self) -> None:
        with self.write() as connection:
            version = int(connection.execute("PRAGMA user_version").fetchone()[0])
            if version > SCHEMA_VERSION:
                raise ConfigError(
                    f"{self.data_dir} was written by a newer version (schema {version}, this one knows "
                    f"{SCHEMA_VERSION}): use that version, or another --data-dir"
                )
            if version == 0:
                _run_script(connection, SCHEMA_FILE.read_text("utf-8"))
            else:
                for step in range(version, SCHEMA_VERSION):
                    _run_script(connection, MIGRATIONS[step])
            connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")


def _run_script(connection: sqlite3.Connection, script: str) -> None:
    """Runs statements inside the open transaction; ``executescript`` would commit it first."""
    without_comments = re.sub(r"--[^\n]*", "", script)
    for statement in without_comments.split(";"):
        if statement.strip():
            connection.execute(statement)


def _write_durably(path: Path, data: bytes) -> None:
    """Writes a file that is either complete under its name or absent, and survives a power cut."""
    with _translated_errors():
        if not path.parent.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            _sync_folder(path.parent.parent)
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _translated_errors() -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        if "full" in str(error):
            raise StorageFullError(f"the disk under the data directory is full: {error}") from error
        if "locked" in str(error) or "busy" in str(error):
            raise UnavailableError(f"the store is busy: {error}") from error
        raise
    except OSError as error:
        if error.errno in (28, 122):  # ENOSPC, EDQUOT
            raise StorageFullError(f"the disk under the data directory is full: {error}") from error
        raise


def _refuse_network_file_system(folder: Path) -> None:
    """SQLite's locks do not hold on network file systems; better to refuse than to corrupt."""
    kind = _file_system_of(folder)
    if kind in NETWORK_FILE_SYSTEMS:
        raise ConfigError(f"--data-dir {folder} is on a network file system ({kind}): use a folder on a local disk")


def _file_system_of(folder: Path) -> str:
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    best, kind = "", ""
    for line in mounts:
        fields = line.split()
        mount_point = fields[1].replace("\\040", " ")
        if len(mount_point) >= len(best) and folder.is_relative_to(mount_point):
            best, kind = mount_point, fields[2]
    return kind
