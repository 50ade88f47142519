"""The SQLite file under the saver: its schema, its version, its transactions, and its errors as ours.

checkpoint  one row for each checkpoint; `sequence` is the order of arrival and the only order we trust
channel     which content each channel of a checkpoint has
content     channel values by SHA-256 within a thread: an unchanged channel costs one small row, and two
            branches that use the same version number never overwrite each other
pending     the writes of tasks between two checkpoints
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from sandkeep.errors import Busy, Corrupt, SandkeepError, StoreDenied, StoreError, StoreFull, Unsupported
from sandkeep.workflow import files

FILE_NAME = "threads.sqlite"
VERSION = 1
PATIENCE = 60.0

SCHEMA = """
CREATE TABLE checkpoint (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    thread TEXT NOT NULL, namespace TEXT NOT NULL, id TEXT NOT NULL, parent TEXT, run TEXT,
    kind TEXT NOT NULL, body BLOB NOT NULL, metadata_kind TEXT NOT NULL, metadata BLOB NOT NULL,
    UNIQUE (thread, namespace, id)
) STRICT;
CREATE INDEX checkpoint_run ON checkpoint (run) WHERE run IS NOT NULL;
CREATE TABLE channel (
    sequence INTEGER NOT NULL REFERENCES checkpoint ON DELETE CASCADE,
    name TEXT NOT NULL, version TEXT NOT NULL, thread TEXT NOT NULL, digest BLOB NOT NULL,
    PRIMARY KEY (sequence, name)
) STRICT, WITHOUT ROWID;
CREATE INDEX channel_content ON channel (thread, digest);
CREATE TABLE content (
    thread TEXT NOT NULL, digest BLOB NOT NULL, kind TEXT NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY (thread, digest)
) STRICT;
CREATE TABLE pending (
    thread TEXT NOT NULL, namespace TEXT NOT NULL, id TEXT NOT NULL, task TEXT NOT NULL, place INTEGER NOT NULL,
    path TEXT NOT NULL, channel TEXT NOT NULL, kind TEXT NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY (thread, namespace, id, task, place)
) STRICT;
"""

_ERRORS: dict[int, tuple[type[SandkeepError], str]] = {
    sqlite3.SQLITE_FULL: (StoreFull, "free some space; everything saved before is intact"),
    sqlite3.SQLITE_BUSY: (Busy, "another process is writing; try again"),
    sqlite3.SQLITE_READONLY: (StoreDenied, "check the owner and mode of the file and its folder"),
    sqlite3.SQLITE_PERM: (StoreDenied, "check the owner and mode of the file and its folder"),
    sqlite3.SQLITE_CANTOPEN: (StoreDenied, "check the owner and mode of the file and its folder"),
    sqlite3.SQLITE_CORRUPT: (Corrupt, "restore the file from a copy"),
    sqlite3.SQLITE_NOTADB: (Corrupt, "give the path of a file that this saver made"),
}


@contextlib.contextmanager
def typed_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        primary = getattr(error, "sqlite_errorcode", 0) & 0xFF
        kind, remedy = _ERRORS.get(primary, (StoreError, ""))
        raise kind(f"{path.name}: {error}", remedy) from error


class Database:
    """One connection, one user at a time; other processes wait their turn at SQLite's own lock."""

    def __init__(self, where: str | os.PathLike[str]) -> None:
        path = Path(where)
        self.path = path if path.suffix in (".sqlite", ".db") else path / FILE_NAME
        self._guard = threading.RLock()
        with typed_errors(self.path), files.typed_errors("open the file", self.path):
            files.make_folder(self.path.parent)
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            files.sync_folder(self.path.parent)
            self._connection = sqlite3.connect(
                self.path, timeout=PATIENCE, isolation_level=None, check_same_thread=False
            )
            try:
                self._prepare()
            except BaseException:
                self._connection.close()
                raise

    def _prepare(self) -> None:
        self._write_ahead()
        self._connection.execute("PRAGMA synchronous = FULL")
        self._connection.execute("PRAGMA foreign_keys = ON")
        with self.transaction() as connection:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version > VERSION:
                raise Unsupported(
                    f"{self.path.name} has format {version}; this Sandkeep reads up to {VERSION}", "upgrade sandkeep"
                )
            if version == 0:
                if connection.execute("SELECT 1 FROM sqlite_schema").fetchone():
                    raise Corrupt(f"{self.path.name} is somebody else's database", "give another path")
                for statement in SCHEMA.split(";\n"):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {VERSION}")

    def _write_ahead(self) -> None:
        """Two openers of a new file collide here, and SQLite's own patience does not cover this statement."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                self._connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All of it durable afterwards, or none."""
        with self._guard, typed_errors(self.path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """One consistent view."""
        with self._guard, typed_errors(self.path):
            self._connection.execute("BEGIN")
            try:
                yield self._connection
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")

    def close(self) -> None:
        with self._guard, typed_errors(self.path):
            self._connection.close()
