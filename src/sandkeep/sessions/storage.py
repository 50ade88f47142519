"""The index of what clients keep under `/storage`: whose, which name, how large, its SHA-256, and where its bytes are.

A row exists before its bytes and until they are gone. Without a name it is seen by nobody: its bytes are arriving or leaving.
Bytes are never written twice to one place, so a name moves from one whole object to the next in one transaction.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, delete, func, insert, or_, select, text, update

from sandkeep.errors import StoreFull, StoreUnreachable
from sandkeep.sessions.database import Database
from sandkeep.sessions.records import Scope
from sandkeep.sessions.tables import now, objects

_BATCH = 500


@dataclass(frozen=True)
class Stored:
    place: str
    owner: str
    project: str
    name: str | None
    size: int
    sha256: str
    at: float


class Storage:
    def __init__(self, database: Database, quota: int = 0) -> None:
        self._db = database
        self._quota = quota

    def arrive(self, scope: Scope, name: str, size: int, sha256: str) -> str:
        """A place for bytes that are about to be stored."""
        place = secrets.token_hex(16)
        with self._db.write() as connection:
            if self._quota:
                _alone(connection, scope)
                others = or_(objects.c.name.is_(None), objects.c.name != name)
                used = connection.execute(select(func.sum(objects.c.size)).where(_of(scope), others)).scalar() or 0
                if used + size > self._quota:
                    raise StoreFull(
                        f"this would make {used + size} bytes of {self._quota}", "forget checkpoints and run gc"
                    )
            row = {"place": place, "owner": scope.user, "project": scope.project or "", "size": size, "sha256": sha256}
            connection.execute(insert(objects).values(at=now(), **row))
        return place

    def publish(self, scope: Scope, name: str, place: str) -> list[str]:
        """The bytes are durable: give them their name. The places that had it, whose bytes are to go."""
        with self._db.write() as connection:
            _alone(connection, scope)
            left = _unname(connection, and_(_of(scope), objects.c.name == name))
            named = update(objects).where(objects.c.place == place, objects.c.name.is_(None))
            if connection.execute(named.values(name=name, at=now())).rowcount != 1:
                raise StoreUnreachable(f"{name} took too long to be stored", "send it again")
            return left

    def withdraw(self, scope: Scope, names: Sequence[str]) -> list[str]:
        """Nobody sees these names any more. Their places, whose bytes are to go."""
        left: list[str] = []
        with self._db.write() as connection:
            for some in _batches(names):
                left += _unname(connection, and_(_of(scope), objects.c.name.in_(some)))
        return left

    def gone(self, places: Sequence[str]) -> None:
        """Their bytes are no more."""
        with self._db.write() as connection:
            for some in _batches(places):
                connection.execute(delete(objects).where(objects.c.place.in_(some), objects.c.name.is_(None)))

    def lapsed(self, seconds: float) -> list[Stored]:
        """What a server that died left arriving or leaving, that long ago."""
        wanted = select(objects).where(objects.c.name.is_(None), objects.c.at < now() - seconds).limit(_BATCH)
        with self._db.read() as connection:
            return [Stored(**row) for row in connection.execute(wanted).mappings()]

    def find(self, scope: Scope, name: str) -> Stored | None:
        with self._db.read() as connection:
            row = connection.execute(select(objects).where(_of(scope), objects.c.name == name)).mappings().first()
            return None if row is None else Stored(**row)

    def list(self, scope: Scope, prefix: str, after: str, limit: int) -> list[tuple[str, int, float]]:
        """(name, size, time) in order of name, those after `after`."""
        within = and_(objects.c.name >= prefix, objects.c.name < f"{prefix}\x7f", objects.c.name > after)
        wanted = select(objects.c.name, objects.c.size, objects.c.at).where(_of(scope), within)
        with self._db.read() as connection:
            return [tuple(row) for row in connection.execute(wanted.order_by(objects.c.name).limit(limit))]


def _of(scope: Scope) -> ColumnElement[bool]:
    return and_(objects.c.owner == scope.user, objects.c.project == (scope.project or ""))


def _unname(connection: Connection, which: ColumnElement[bool]) -> list[str]:
    changed = update(objects).where(which).values(name=None, at=now()).returning(objects.c.place)
    return list(connection.execute(changed).scalars())


def _alone(connection: Connection, scope: Scope) -> None:
    """One writer of a space at a time. SQLite has one writer anyway."""
    if connection.dialect.name == "postgresql":
        key: dict[str, Any] = {"space": f"{len(scope.user)} {scope.user} {scope.project or ''}"}
        connection.execute(text("SELECT pg_advisory_xact_lock(hashtextextended(:space, 0))"), key)


def _batches(names: Sequence[str]) -> Iterator[Sequence[str]]:
    for at in range(0, len(names), _BATCH):
        yield names[at : at + _BATCH]
