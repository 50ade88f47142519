"""Records: small immutable objects with unique names, and a local copy of their names and contents."""

from __future__ import annotations

import time
from collections.abc import Iterator

from sandkeep.errors import Corrupt, NotFound
from sandkeep.store.format import record_name, seal, unseal
from sandkeep.store.index import WINDOW, Index
from sandkeep.store.looking import read_payload
from sandkeep.store.objects import Objects

FULL_EVERY = 3600.0
_PAGE = 200


class Records:
    def __init__(self, objects: Objects, index: Index) -> None:
        self._objects, self._index = objects, index

    def get(self, kind: str, full: str, cached: bool) -> bytes:
        name = full.rsplit("/", 1)[1]
        if cached:
            found = self._index.rows(
                "SELECT data FROM record WHERE kind=? AND name=? AND data IS NOT NULL", (kind, name)
            )
            if found:
                try:
                    return unseal(full, found[0][0])  # type: ignore[arg-type]
                except Corrupt:
                    pass  # the copy, not the record
        try:
            data = read_payload(self._objects, full)
        except NotFound:
            self._forget(kind, name)
            raise NotFound(f"{kind} {name} is not in the store") from None
        if cached:
            self._index.write("INSERT OR REPLACE INTO record VALUES(?,?,?)", (kind, name, seal(full, data)))
        return data

    def delete(self, kind: str, full: str) -> None:
        self._objects.delete([full])
        self._forget(kind, full.rsplit("/", 1)[1])

    def _forget(self, kind: str, name: str) -> None:
        self._index.write("DELETE FROM record WHERE kind=? AND name=?", (kind, name))

    def names(self, kind: str, after: str, newest_first: bool, full: bool) -> Iterator[str]:
        if newest_first and not full and (newest := self._objects.newest(f"records/{kind}/")) is not None:
            for found in newest:
                if (last := found.rsplit("/", 1)[1]) <= after:
                    return
                yield last
            return
        self._index.attempt(lambda: self._sync(kind, full))
        at = after
        order, compare = ("DESC", "<") if newest_first else ("ASC", ">")
        first = True
        while True:
            where = "AND name > ?" if newest_first else ""
            args: list[object] = [kind, *([after] if newest_first else [])]
            if not (newest_first and first):
                where += f" AND name {compare} ?"
                args.append(at)
            page = self._index.rows(
                f"SELECT name FROM record WHERE kind=? {where} ORDER BY name {order} LIMIT {_PAGE}", args
            )
            for (name,) in page:
                yield str(name)
            if len(page) < _PAGE:
                return
            at, first = str(page[-1][0]), False

    def _sync(self, kind: str, full: bool) -> None:
        """Names in the cache become those in the store: all of them, or from the newest but `WINDOW` on."""
        prefix, key = f"records/{kind}/", f"listed {kind}"
        with self._index.locked():
            last = self._index.rows("SELECT value FROM meta WHERE key=?", (key,))
            full = full or not last or not 0 <= time.time() - float(str(last[0][0])) < FULL_EVERY
            row = (
                []
                if full
                else self._index.rows(
                    "SELECT name FROM record WHERE kind=? ORDER BY name DESC LIMIT 1 OFFSET ?", (kind, WINDOW - 1)
                )
            )
            after = str(row[0][0]) if row else ""
            names = self._objects.list(prefix, after=record_name(kind, after) if after else "")
            listed = {name.rsplit("/", 1)[1] for name, _, _ in names}
            known = {
                str(row[0])
                for row in self._index.rows("SELECT name FROM record WHERE kind=? AND name > ?", (kind, after))
            }
            with self._index.change() as db:
                db.executemany("DELETE FROM record WHERE kind=? AND name=?", ((kind, name) for name in known - listed))
                db.executemany(
                    "INSERT OR IGNORE INTO record VALUES(?,?,NULL)", ((kind, name) for name in listed - known)
                )
                if full:
                    db.execute("INSERT OR REPLACE INTO meta VALUES(?,?)", (key, str(time.time())))
