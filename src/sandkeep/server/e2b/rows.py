"""What E2B knows of a sandbox beside its session: tokens, time to live, policy. One row each, in the sessions' database.

A deadline counts for one generation of the session: whoever puts a sandbox to sleep or wakes it, by whatever API, has no
deadline to mend. Tokens are kept as they are, not as hashes: `connect` must tell them again, and signatures are made from them.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from sqlalchemy import case, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from sandkeep.sessions import Database, SessionState
from sandkeep.sessions.tables import e2b as rows
from sandkeep.sessions.tables import now, sessions

LEAST_AFTER_WAKING = 300.0
_OF = rows.c.sandbox == sessions.c.id


@dataclass(frozen=True)
class Row:
    sandbox: str
    token: str
    traffic: str | None  # what ports want to see, if not everybody may reach them
    generation: int
    deadline: float | None
    timeout: float
    policy: dict[str, Any]


class Rows:
    """Synchronous, as the sessions are; callers go through `Database.call`."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def add(self, sandbox: str, token: str, traffic: str | None, timeout: float, policy: dict[str, Any]) -> Row:
        """From here on the time to live ends it, and no longer idleness: both in one transaction. One that has a row keeps it."""
        try:
            with self._db.write() as connection:
                held = update(sessions).where(sessions.c.id == sandbox).values(auto_pause_timeout=0.0)
                generation = connection.execute(held.returning(sessions.c.generation)).scalar_one()
                values = {"sandbox": sandbox, "token": token, "traffic": traffic, "generation": generation}
                made = insert(rows).values(**values, deadline=now() + timeout, timeout=timeout, policy=policy)
                return Row(**connection.execute(made.returning(rows)).mappings().one())
        except IntegrityError:
            return self.many([sandbox])[sandbox]

    def get(self, sandbox: str) -> Row | None:
        return self.many([sandbox]).get(sandbox)

    def many(self, sandboxes: list[str]) -> dict[str, Row]:
        with self._db.read() as connection:
            found = connection.execute(select(rows).where(rows.c.sandbox.in_(sandboxes))).mappings()
            return {row["sandbox"]: Row(**row) for row in found}

    def tokens(self) -> dict[str, str]:
        """(token by sandbox) of all that are not killed: whose signature is this?"""
        with self._db.read() as connection:
            alive = (
                select(rows.c.sandbox, rows.c.token).join(sessions, _OF).where(sessions.c.state != SessionState.KILLED)
            )
            return {row.sandbox: row.token for row in connection.execute(alive)}

    def set_policy(self, sandbox: str, policy: dict[str, Any]) -> None:
        with self._db.write() as connection:
            connection.execute(update(rows).where(rows.c.sandbox == sandbox).values(policy=policy))

    def live_until(self, sandbox: str, generation: int, seconds: float) -> None:
        """A new deadline, sooner or later than the old one."""
        self._set(rows.c.sandbox == sandbox, generation=generation, deadline=now() + seconds)

    def extend(self, sandbox: str, generation: int, seconds: float) -> bool:
        """Never sooner. False when it is being ended, or has no deadline in this generation."""
        later = case((rows.c.deadline < now() + seconds, now() + seconds), else_=rows.c.deadline)
        same = (rows.c.sandbox == sandbox, rows.c.generation == generation, rows.c.deadline.is_not(None))
        return bool(self._set(*same, deadline=later))

    def claim(self, row: Row) -> bool:
        """Take it upon oneself to end it: False if meanwhile it may live on, or another ends it."""
        same = (rows.c.sandbox == row.sandbox, rows.c.generation == row.generation, rows.c.deadline == row.deadline)
        return bool(self._set(*same, deadline=None))

    def unclaim(self, sandbox: str, seconds: float) -> None:
        self._set(rows.c.sandbox == sandbox, rows.c.deadline.is_(None), deadline=now() + seconds)

    def begin(self, host: str, idle: float) -> None:
        """At start-up: what a crash left claimed is due; forks that it left without a row sleep when they are idle."""
        here = select(sessions.c.id).where(sessions.c.host == host)
        self._set(rows.c.sandbox.in_(here), rows.c.deadline.is_(None), deadline=now())
        with self._db.write() as connection:
            ours = set(connection.execute(select(rows.c.sandbox)).scalars())
            endless = select(sessions.c.id, sessions.c.config).where(sessions.c.host == host)
            endless = endless.where(sessions.c.auto_pause_timeout == 0, sessions.c.state != SessionState.KILLED)
            for id, config in connection.execute(endless).all():
                if id not in ours and config.get("forked_from") in ours:
                    connection.execute(update(sessions).where(sessions.c.id == id).values(auto_pause_timeout=idle))

    def tend(self, host: str, known: Set[str] = frozenset()) -> tuple[list[Row], float | None, Set[str]]:
        """What is due on this host, in how many seconds the next will be, and who of the known is dead.

        What others woke gets a deadline.
        """
        mine = [sessions.c.state == SessionState.RUNNING, sessions.c.host == host]
        with self._db.write(durable=False) as connection:
            gone = select(sessions.c.id).where(sessions.c.state == SessionState.KILLED)
            connection.execute(delete(rows).where(rows.c.sandbox.in_(gone)))
            other = select(rows, sessions.c.generation.label("new")).join(sessions, _OF)
            for row in (
                connection.execute(other.where(*mine, rows.c.generation != sessions.c.generation)).mappings().all()
            ):
                lasting = now() + max(row["timeout"], LEAST_AFTER_WAKING)
                values = {"generation": row["new"], "deadline": lasting}
                connection.execute(update(rows).where(rows.c.sandbox == row["sandbox"]).values(**values))
            ending = select(rows, now().label("now")).join(sessions, _OF).where(*mine, rows.c.deadline.is_not(None))
            found = [dict(row) for row in connection.execute(ending.order_by(rows.c.deadline)).mappings()]
            dead = known and known - set(connection.execute(select(rows.c.sandbox)).scalars())
        times = [(row.pop("now"), Row(**row)) for row in found]
        due = [row for at, row in times if row.deadline is not None and row.deadline <= at]
        wait = next((row.deadline - at for at, row in times if row.deadline is not None and row.deadline > at), None)
        return due, wait, dead

    def _set(self, *where: Any, **values: Any) -> int:
        with self._db.write() as connection:
            return connection.execute(update(rows).where(*where).values(**values)).rowcount
