"""The connection to the sessions' database: SQLite in a file, or PostgreSQL. Owns the engine, its transactions, its
threads, its migrations, and the translation of a driver's errors into ours.

Synchronous inside; async callers go through `call`, which runs a function on this database's own threads, so that a
cancelled caller never cuts a transaction in two.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import URL, Connection, create_engine, event, make_url, select, text
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from sandkeep.errors import BadArgument, DatabaseFailed, DatabaseUnreachable, Unsupported
from sandkeep.sessions.tables import now

P = ParamSpec("P")
T = TypeVar("T")

_THREADS = 8
_WAIT = 30.0
_MIGRATING = 0x53414E444B454550
"""The advisory lock that one server holds while it migrates; any fixed number will do."""


_opening = threading.Lock()
"""Alembic keeps the migration under way in a module's globals."""


class Database:
    """`Database(url).open()`; the url is `sqlite:///path` or `postgresql://user:password@host/name`."""

    def __init__(self, url: str) -> None:
        self._url = _parse(url)
        self.name = self._url.set(query={}).render_as_string(hide_password=True)
        self._lite = self._url.get_backend_name() == "sqlite"
        self._writer = threading.Lock() if self._lite else nullcontext()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="sandkeep-db")
        options: dict[str, Any] = {"timeout": _WAIT, "check_same_thread": False}
        if not self._lite:
            options = {"connect_timeout": 10, "tcp_user_timeout": int(_WAIT * 1000)}
        self._engine = create_engine(
            self._url,
            pool_size=_THREADS,
            max_overflow=_THREADS,
            pool_timeout=_WAIT,
            pool_pre_ping=not self._lite,
            connect_args=options,
        )
        if self._lite:
            event.listen(self._engine, "connect", _lite_connected)
            event.listen(self._engine, "begin", _lite_begin)

    def open(self) -> Database:
        """Bring the schema up to date. Several servers may do so at once: one migrates, the others wait for it."""
        with self._typed(), _opening, self._alone():
            with self.write() as connection:
                if not self._lite:
                    connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _MIGRATING})
                config = Config()
                config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
                config.attributes["connection"] = connection
                try:
                    command.upgrade(config, "head")
                except CommandError as error:
                    raise Unsupported(
                        f"the database was made by another version of Sandkeep: {error}",
                        "run the newest version that has used it",
                    ).at(self.name) from error
        return self

    def close(self) -> None:
        self._threads.shutdown(wait=True)
        self._engine.dispose()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        with self._typed(), self._engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def write(self, *, durable: bool = True) -> Iterator[Connection]:
        """One transaction. `durable=False` is for activity and heartbeats: a power cut may forget the last of them."""
        with self._typed(), self._writer, self._engine.connect() as connection:
            connection = connection.execution_options(sandkeep_write="FULL" if durable else "NORMAL")
            with connection.begin():
                if not self._lite and not durable:
                    connection.execute(text("SET LOCAL synchronous_commit = off"))
                yield connection

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run one of our synchronous functions on a database thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(function, *args, **kwargs))

    def now(self) -> float:
        with self.read() as connection:
            return connection.execute(select(now())).scalar_one()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """SQLite: hold a lock file while the database is first made; turning WAL on ignores the busy time-out."""
        if not self._lite:
            yield
            return
        path = Path(self._url.database or "")
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise DatabaseUnreachable(
                f"the database can't be opened: {error.strerror}", "check its folder's owner and space"
            ).at(path) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                path.touch(0o600)
            with self._engine.connect() as connection:
                driver: Any = connection.connection.dbapi_connection
                driver.execute("PRAGMA journal_mode = WAL")
            yield
        finally:
            os.close(lock)

    @contextmanager
    def _typed(self) -> Iterator[None]:
        try:
            yield
        except IntegrityError:
            raise
        except PoolTimeout as error:
            raise DatabaseUnreachable(f"no free connection to the database in {_WAIT:g} s", "try again").at(
                self.name
            ) from error
        except DBAPIError as error:
            said = str(error.orig).strip().partition("\n")[0]
            if error.connection_invalidated or isinstance(error, (OperationalError, InterfaceError)):
                raise DatabaseUnreachable(
                    "the database does not answer", "see that it runs and has space, then try again"
                ).at(f"{self.name}: {said}") from error
            raise DatabaseFailed("the database refused").at(f"{self.name}: {said}") from error


def _parse(url: str) -> URL:
    remedy = "write sqlite:///path/to/file or postgresql://user@host/name"
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise BadArgument("the database's address can't be read", remedy) from error
    if parsed.drivername in ("postgresql", "postgres", "postgresql+psycopg"):
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername == "sqlite" and parsed.database and parsed.database != ":memory:":
        return parsed
    raise BadArgument(f"no database of the kind {parsed.drivername!r}, or without a file", remedy)


def _lite_connected(connection: sqlite3.Connection, _: Any) -> None:
    connection.isolation_level = None
    connection.create_function("sandkeep_now", 0, time.time)
    connection.execute("PRAGMA foreign_keys = ON")


def _lite_begin(connection: Connection) -> None:
    """Writers take the write lock at once: upgrading a read lock later fails at once when another writer got in between."""
    mode = connection.get_execution_options().get("sandkeep_write")
    if mode is None:
        connection.exec_driver_sql("BEGIN")
        return
    connection.exec_driver_sql(f"PRAGMA synchronous = {mode}")
    connection.exec_driver_sql("BEGIN IMMEDIATE")
