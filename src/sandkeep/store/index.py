"""The local index: which blob lies where, kept in SQLite as a cache of the store's index objects.

It may be shared by many processes, deleted at any time, or stale; nothing is ever only here. One process at a time brings
it up to date (a file lock), everybody reads it at once.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from sandkeep.errors import BadArgument, Corrupt, NotFound, StoreError
from sandkeep.store.format import PackIndex, Place
from sandkeep.store.looking import read_index
from sandkeep.store.objects import Objects

T = TypeVar("T")

WINDOW = 1000  # the newest names listed again at each refresh: one page of an S3 listing
ENOUGH = 32  # known names in a row, where names can be had from the newest on

_SCHEMA = """
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TABLE source(name TEXT PRIMARY KEY, bad INT NOT NULL) WITHOUT ROWID;
CREATE TABLE pack(number INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT UNIQUE NOT NULL, raw INT NOT NULL, layout BLOB NOT NULL);
CREATE TABLE names(source TEXT, pack INT, PRIMARY KEY(source, pack)) WITHOUT ROWID;
CREATE INDEX names_pack ON names(pack);
CREATE TABLE blob(id BLOB, pack INT, number INT, PRIMARY KEY(id, pack)) WITHOUT ROWID;
CREATE TABLE record(kind TEXT, name TEXT, data BLOB, PRIMARY KEY(kind, name)) WITHOUT ROWID;
"""
_SCHEMA_VERSION = "2"
_LAYOUTS = 512  # packs whose insides are kept in memory
_NUMBERS = "WITH RECURSIVE k(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM k WHERE n + 1 < ?1) "
_ID = "substr(?2, 32 * n + 1, 32)"  # of many ids, one after the other
_PASSES = 100  # each keeps what it found, and only what a collector made meanwhile is left for the next

DAMAGE = (sqlite3.DatabaseError, UnicodeDecodeError)  # the second: an error message that quotes a damaged schema


@dataclass(frozen=True)
class Marks:
    """What collectors have left in the store: which removals happened, and which are announced."""

    epoch: str
    condemned: tuple[str, ...]


def read_marks(objects: Objects) -> Marks:
    names = [name for name, _, _ in objects.list("gc/")]
    epoch = " ".join(name for name in names if name.startswith("gc/epoch-"))
    return Marks(epoch, tuple(name for name in names if name.startswith("gc/condemned-")))


class Index:
    def __init__(self, objects: Objects, folder: Path, store_id: str) -> None:
        self.objects = objects
        self.folder = folder
        self._store_id = store_id
        self._mutex = threading.RLock()
        self._held = 0
        self._layouts: OrderedDict[int, PackIndex] = OrderedDict()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock_file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise self._unusable(error) from error
        with self.locked():
            self._open()

    def close(self) -> None:
        with self._mutex:
            self._db.close()
            if self._lock_file >= 0:
                os.close(self._lock_file)
            self._lock_file = -1

    # the file itself

    def _open(self) -> None:
        try:
            self._connect()
        except DAMAGE:
            self._renew()

    def _renew(self) -> None:
        """An empty cache in place of a damaged one."""
        self._db.close()
        self._layouts.clear()
        try:
            for suffix in ("", "-wal", "-shm"):
                (self.folder / f"index.db{suffix}").unlink(missing_ok=True)
            self._connect()
        except (OSError, *DAMAGE) as error:
            raise self._unusable(error) from error

    def _unusable(self, error: Exception) -> StoreError:
        return StoreError(
            f"the cache folder {self.folder} can't be used: {error}",
            "check its owner and the space on its disk, or delete it",
        )

    def _connect(self) -> None:
        self._db = sqlite3.connect(self.folder / "index.db", timeout=120, isolation_level=None, check_same_thread=False)
        try:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute("PRAGMA temp_store=FILE")
            tables = {row[0] for row in self._db.execute("SELECT name FROM sqlite_master")}
            if "meta" not in tables:
                self._db.executescript(f"BEGIN IMMEDIATE;{_SCHEMA}COMMIT;")
                self._set("store", self._store_id)
                self._set("schema", _SCHEMA_VERSION)
            if (self._get("store"), self._get("schema")) != (self._store_id, _SCHEMA_VERSION):
                raise sqlite3.DatabaseError("the cache of another store, or of another Sandkeep")
            self._db.create_function("length_of", 2, self._length_of, deterministic=True)
        except DAMAGE:
            self._db.close()
            raise

    def rebuild(self) -> None:
        """Throw the cache away and read it from the store again."""
        with self.locked():
            self._renew()
            self.sync(full=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One writer of the cache at a time, over all threads and processes. May be nested."""
        with self._mutex:
            if not self._held:
                fcntl.flock(self._lock_file, fcntl.LOCK_EX)
            self._held += 1
            try:
                yield
            finally:
                self._held -= 1
                if not self._held:
                    fcntl.flock(self._lock_file, fcntl.LOCK_UN)

    @contextmanager
    def change(self) -> Iterator[sqlite3.Connection]:
        with self.locked():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.rollback()
                raise
            self._db.commit()

    def attempt(self, work: Callable[[], T]) -> T:
        """Do this, and once more with a rebuilt cache if the cache turns out to be damaged."""
        with self._mutex:
            try:
                return work()
            except sqlite3.ProgrammingError as error:
                raise BadArgument(f"the repository can't be used: {error}", "it was closed: open it again") from error
            except DAMAGE:
                self.rebuild()
            try:
                return work()
            except DAMAGE as error:
                raise self._unusable(error) from error

    def rows(self, sql: str, args: Sequence[object] = ()) -> list[tuple[object, ...]]:
        return self.attempt(lambda: self._db.execute(sql, args).fetchall())

    def write(self, sql: str, args: Sequence[object]) -> None:
        def once() -> None:
            with self.change() as db:
                db.execute(sql, args)

        self.attempt(once)

    def _get(self, key: str) -> str | None:
        row = self._db.execute("SELECT value FROM meta WHERE key=?", (key,)).fetchone()
        return str(row[0]) if row else None

    def _set(self, key: str, value: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES(?,?)", (key, value))

    # from the store

    def sync(self, full: bool = False, marks: Marks | None = None) -> None:
        """Bring the cache up to date. When no collector has removed anything since, only the newest names are listed. `marks` are
        those the caller has just read."""
        renewed = False
        with self.locked():
            for _ in range(_PASSES):
                try:
                    if self._sync(marks or read_marks(self.objects), full):
                        return
                    marks, full = None, True
                except DAMAGE as error:
                    if renewed:
                        raise self._unusable(error) from error
                    self._renew()
                    renewed = True
            raise StoreError("the store's index keeps changing while it is read", "try again")

    def _sync(self, marks: Marks, full: bool) -> bool:
        """False if a collector has merged away some of the index objects before they were read."""
        after = ""
        if full or marks.epoch != self._get("epoch"):
            listed = [name for name, _, _ in self.objects.list("index/")]
        elif (newest := self.objects.newest("index/")) is not None:
            listed, after = self._until_known(newest)
        else:
            row = self._db.execute(
                "SELECT name FROM source ORDER BY name DESC LIMIT 1 OFFSET ?", (WINDOW - 1,)
            ).fetchone()
            after = row[0] if row else ""
            listed = [name for name, _, _ in self.objects.list("index/", after=after)]
        known = {row[0] for row in self._db.execute("SELECT name FROM source WHERE name > ? AND NOT bad", (after,))}
        fresh, gone = [name for name in listed if name not in known], known.difference(listed)
        if not fresh and not gone and marks.epoch == self._get("epoch"):
            return True
        whole = True
        with self.change() as db:
            db.execute("DELETE FROM source WHERE bad AND name > ?", (after,))
            for name, packs in _fetch(self.objects, fresh):
                if packs is _GONE:
                    whole = False
                else:
                    self._insert(db, name, packs)
            self._drop(db, gone)
            if whole:
                self._set("epoch", marks.epoch)
        return whole

    def _until_known(self, newest: Iterator[str]) -> tuple[list[str], str]:
        """Names down to the last of some in a row that the cache knows, and the one before which nothing was looked at."""
        rows = self._db.execute("SELECT name FROM source WHERE NOT bad ORDER BY name DESC LIMIT ?", (4 * ENOUGH,))
        known = {row[0] for row in rows}
        listed: list[str] = []
        in_a_row = 0
        for name in newest:
            in_a_row = in_a_row + 1 if name in known else 0
            if in_a_row > ENOUGH:
                return listed, name
            listed.append(name)
        return listed, ""

    def add(self, name: str, packs: Iterable[PackIndex]) -> None:
        """An index object this process has just written."""
        made = list(packs)

        def once() -> None:
            with self.change() as db:
                self._insert(db, name, made)

        self.attempt(once)

    def _insert(self, db: sqlite3.Connection, name: str, packs: list[PackIndex] | None) -> None:
        db.execute("INSERT OR REPLACE INTO source VALUES(?,?)", (name, packs is None))
        for pack in packs or ():
            row = db.execute("SELECT number FROM pack WHERE name=?", (pack.name,)).fetchone()
            if row is None:
                raw = sum(pack.lengths)
                values = (pack.name, raw, pack.encode(ids=False))
                number = db.execute("INSERT INTO pack(name, raw, layout) VALUES(?,?,?)", values).lastrowid or 0
                if pack.lengths:
                    db.execute(
                        f"{_NUMBERS} INSERT OR IGNORE INTO blob SELECT {_ID} AS id, ?3, n FROM k ORDER BY id",
                        (len(pack.lengths), pack.ids, number),
                    )
            else:
                number = row[0]
            db.execute("INSERT OR IGNORE INTO names VALUES(?,?)", (name, number))

    def _drop(self, db: sqlite3.Connection, sources: Iterable[str]) -> None:
        for name in sources:
            db.execute("DELETE FROM source WHERE name=?", (name,))
            db.execute("DELETE FROM names WHERE source=?", (name,))
        if db.execute("DELETE FROM pack WHERE number NOT IN (SELECT pack FROM names)").rowcount:
            db.execute("DELETE FROM blob WHERE pack NOT IN (SELECT number FROM pack)")

    # questions

    def bad(self) -> list[str]:
        """Index objects that could not be read: what they name is not found until gc has mended them."""
        return [str(row[0]) for row in self.rows("SELECT name FROM source WHERE bad")]

    def known(self, ids: Sequence[bytes], without: frozenset[str] = frozenset()) -> set[bytes]:
        """Those of these blobs that some pack holds, `without` counting the packs so named."""
        rows = (
            self._rows("blob.id, pack.name", "JOIN pack ON pack.number = pack", ids)
            if without
            else self._rows("id, 0", "", ids)
        )
        return {blob for blob, pack in rows if pack not in without}  # type: ignore[misc]

    def places(self, ids: Sequence[bytes]) -> list[Place]:
        """Every copy of every one of these blobs."""
        return self._trusted(
            lambda: [
                self._layout(pack).place(blob, number)  # type: ignore[arg-type]
                for blob, pack, number in self._rows("id, pack, number", "ORDER BY pack", ids)
            ]
        )

    def length(self, blob: bytes) -> int | None:
        found = self.rows("SELECT pack, number FROM blob WHERE id=? LIMIT 1", (blob,))
        return self._trusted(lambda: self._length_of(*found[0])) if found else None  # type: ignore[arg-type]

    def _rows(self, columns: str, more: str, ids: Sequence[bytes]) -> list[tuple[object, ...]]:
        if not ids:
            return []
        return self.rows(
            f"{_NUMBERS} SELECT {columns} FROM k CROSS JOIN blob ON blob.id = {_ID} {more}", (len(ids), b"".join(ids))
        )

    def _trusted(self, work: Callable[[], T]) -> T:
        """What the cache says, and once more from a rebuilt one if that makes no sense."""
        try:
            return work()
        except (Corrupt, LookupError, TypeError, ValueError):
            self.rebuild()
        return work()

    def _length_of(self, pack: int, number: int) -> int:
        return self._layout(pack).lengths[number]

    def _layout(self, number: int) -> PackIndex:
        with self._mutex:
            found = self._layouts.get(number)
            if found is None:
                ((name, data),) = self.rows("SELECT name, layout FROM pack WHERE number=?", (number,))
                found = self._layouts[number] = PackIndex.decode(str(name), data, ids=False)  # type: ignore[arg-type]
                if len(self._layouts) > _LAYOUTS:
                    self._layouts.popitem(last=False)
            return found


_GONE: list[PackIndex] = []


def _fetch(objects: Objects, names: Sequence[str]) -> Iterator[tuple[str, list[PackIndex] | None]]:
    """Index objects, several at once; None for one that is damaged, `_GONE` for one that is no longer there."""

    def one(name: str) -> tuple[str, list[PackIndex] | None]:
        try:
            return name, read_index(objects, name)
        except NotFound:
            return name, _GONE
        except Corrupt:
            return name, None

    if len(names) <= 2:
        yield from map(one, names)
        return
    with ThreadPoolExecutor(objects.parallel) as pool:
        for at in range(0, len(names), 64):
            yield from pool.map(one, names[at : at + 64])
