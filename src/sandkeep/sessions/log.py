"""What happened: events of a session (warnings, failures, take-overs) and the audit log. Both are only ever added to;
the database itself refuses to change or remove an audit row.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, insert, select
from sqlalchemy.exc import IntegrityError

from sandkeep.errors import BadArgument, SandboxNotFound
from sandkeep.sessions.database import Database
from sandkeep.sessions.records import AuditEntry, Event, check_json, check_name
from sandkeep.sessions.tables import audit, events, now


def record_event(connection: Connection, sandbox: str, kind: str, detail: dict[str, Any]) -> None:
    """An event, in the same transaction as the change that it tells of."""
    connection.execute(insert(events).values(sandbox=sandbox, at=now(), kind=kind, detail=detail))


class Log:
    def __init__(self, database: Database) -> None:
        self._db = database

    def event(self, sandbox: str, kind: str, **detail: Any) -> None:
        try:
            with self._db.write() as connection:
                record_event(connection, sandbox, kind, check_json(detail, "the detail"))
        except IntegrityError as error:
            raise SandboxNotFound(f"no sandbox {sandbox}") from error

    def events(self, sandbox: str, *, after: int = 0, limit: int = 100) -> list[Event]:
        """Oldest first; `after` is the id of the last one seen."""
        wanted = (
            select(events)
            .where(events.c.sandbox == sandbox, events.c.id > after)
            .order_by(events.c.id)
            .limit(_checked(limit))
        )
        with self._db.read() as connection:
            return [Event(**row) for row in connection.execute(wanted).mappings()]

    def snapshots(self, sandbox: str) -> list[dict[str, Any]]:
        """The snapshots that its host has, by what was told here: taken, not deleted, not left behind."""
        kinds = ("snapshot", "snapshot_deleted", "snapshots_lost")
        wanted = select(events).where(events.c.sandbox == sandbox, events.c.kind.in_(kinds)).order_by(events.c.id)
        there: dict[str, dict[str, Any]] = {}
        with self._db.read() as connection:
            for row in connection.execute(wanted):
                if row.kind == "snapshot":
                    there[row.detail["id"]] = row.detail
                elif row.kind == "snapshot_deleted":
                    there.pop(row.detail["id"], None)
                else:
                    there.clear()
        return list(there.values())

    def audit(self, who: str, action: str, outcome: str, sandbox: str | None = None, **detail: Any) -> None:
        values = {
            "who": check_name(who, "who"),
            "action": check_name(action, "the action")[:100],
            "outcome": check_name(outcome, "the outcome")[:100],
            "sandbox": sandbox,
            "detail": check_json(detail, "the detail"),
        }
        with self._db.write() as connection:
            connection.execute(insert(audit).values(at=now(), **values))

    def audited(
        self, *, who: str | None = None, sandbox: str | None = None, before: int | None = None, limit: int = 100
    ) -> list[AuditEntry]:
        """Newest first; `before` is the id of the last one seen."""
        wanted = select(audit).order_by(audit.c.id.desc()).limit(_checked(limit))
        if who is not None:
            wanted = wanted.where(audit.c.who == who)
        if sandbox is not None:
            wanted = wanted.where(audit.c.sandbox == sandbox)
        if before is not None:
            wanted = wanted.where(audit.c.id < before)
        with self._db.read() as connection:
            return [AuditEntry(**row) for row in connection.execute(wanted).mappings()]


def _checked(limit: int) -> int:
    if not 1 <= limit <= 1000:
        raise BadArgument(f"limit must be from 1 to 1000, not {limit!r}")
    return limit
