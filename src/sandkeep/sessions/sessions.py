"""The rows of sessions: made before their sandbox, moved only here, seen only through a scope.

Every change of state is one UPDATE that compares (state, generation[, last activity]) and swaps; whoever loses the race
gets `StateConflict` and has changed nothing. Knows nothing of sandboxes; `keeper` does the work between two moves.
"""

from __future__ import annotations

from typing import Any, NoReturn

from sqlalchemy import ColumnElement, Connection, and_, delete, exists, func, insert, or_, select, tuple_, update
from sqlalchemy.exc import IntegrityError

from sandkeep.errors import BadArgument, SandboxNotFound, StateConflict
from sandkeep.sessions.database import Database
from sandkeep.sessions.hosts import Hosts
from sandkeep.sessions.log import record_event
from sandkeep.sessions.records import (
    AUTO_PAUSE,
    PAUSED_EXPIRY,
    Page,
    Scope,
    Session,
    check_id,
    check_json,
    check_name,
    check_seconds,
    make_cursor,
    read_cursor,
    session_of,
)
from sandkeep.sessions.states import CHANGES, PASSING, SessionState, check_move
from sandkeep.sessions.tables import now, requests, sessions, tokens, uses

_S = SessionState
_ROW = sessions.c


class Sessions:
    def __init__(self, database: Database, hosts: Hosts) -> None:
        self._db = database
        self._hosts = hosts

    def create(
        self,
        id: str,
        scope: Scope,
        *,
        host: str,
        project: str | None = None,
        metadata: dict[str, Any] | None = None,
        config: dict[str, Any] | None = None,
        auto_pause_timeout: float = AUTO_PAUSE,
        paused_expiry: float = PAUSED_EXPIRY,
        request: str | None = None,
    ) -> Session:
        """The row, in CREATING, before there is a sandbox. `config` must hold no secrets.

        `request` is had by one session at a time, until that one is killed or in ERROR.
        """
        project = scope.place(project)
        values = {
            "id": check_id(id),
            "owner": check_name(scope.user, "the owner"),
            "project": None if project is None else check_name(project, "the project"),
            "metadata": check_json(metadata or {}, "metadata"),
            "config": check_json(config or {}, "config"),
            "state": _S.CREATING,
            "generation": 1,
            "host": host,
            "auto_pause_timeout": check_seconds(auto_pause_timeout, "auto_pause_timeout"),
            "paused_expiry": check_seconds(paused_expiry, "paused_expiry"),
            "failures": 0,
            "next_try": 0.0,
            "removed": False,
        }
        times = {"created": now(), "updated": now(), "last_activity": now()}
        try:
            with self._db.write() as connection:
                row = (
                    connection.execute(insert(sessions).values(**values, **times).returning(sessions)).mappings().one()
                )
                if request is not None:
                    connection.execute(insert(requests).values(sha256=request, sandbox=id))
        except IntegrityError as error:
            raise StateConflict(
                f"there is a session {id} already, or one by the same request", "choose another id"
            ) from error
        return session_of(row)

    def by_request(self, request: str) -> Session | None:
        wanted = select(sessions).join(requests, requests.c.sandbox == _ROW.id).where(requests.c.sha256 == request)
        with self._db.read() as connection:
            row = connection.execute(wanted).mappings().one_or_none()
        return None if row is None else session_of(row)

    def forget_request(self, id: str) -> None:
        """Another session may have the one that this one had."""
        with self._db.write() as connection:
            connection.execute(delete(requests).where(requests.c.sandbox == id))

    def get(self, id: str, scope: Scope | None = None) -> Session:
        """The session, if the scope may see it; None is the server itself and sees all."""
        check_id(id)
        with self._db.read() as connection:
            return _get(connection, id, scope)

    def find(
        self,
        scope: Scope | None = None,
        *,
        project: str | None = None,
        states: frozenset[SessionState] | None = None,
        host: str | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page:
        """Newest first. Without `states`, all but the killed."""
        if not 1 <= limit <= 1000:
            raise BadArgument(f"limit must be from 1 to 1000, not {limit!r}")
        wanted = select(sessions).where(_visible(scope)).order_by(_ROW.created.desc(), _ROW.id.desc()).limit(limit + 1)
        wanted = wanted.where(_ROW.state != _S.KILLED if states is None else _ROW.state.in_(states))
        if project is not None:
            wanted = wanted.where(_ROW.project == check_name(project, "the project"))
        if host is not None:
            wanted = wanted.where(_ROW.host == host)
        if cursor is not None:
            created, id = read_cursor(cursor)
            wanted = wanted.where(tuple_(_ROW.created, _ROW.id) < tuple_(created, id))
        with self._db.read() as connection:
            found = [session_of(row) for row in connection.execute(wanted).mappings()]
        return Page(found[:limit], make_cursor(found[limit - 1]) if len(found) > limit else None)

    def update(
        self,
        id: str,
        *,
        metadata: dict[str, Any] | None = None,
        config: dict[str, Any] | None = None,
        auto_pause_timeout: float | None = None,
        paused_expiry: float | None = None,
    ) -> Session:
        """Change the policy, the metadata or the config; what is None stays. A longer expiry takes back a warning."""
        values: dict[str, Any] = {"updated": now()}
        if metadata is not None:
            values["metadata"] = check_json(metadata, "metadata")
        if config is not None:
            values["config"] = check_json(config, "config")
        if auto_pause_timeout is not None:
            values["auto_pause_timeout"] = check_seconds(auto_pause_timeout, "auto_pause_timeout")
        if paused_expiry is not None:
            values |= {"paused_expiry": check_seconds(paused_expiry, "paused_expiry"), "warned_at": None}
        with self._db.write() as connection:
            changed = (
                update(sessions).where(_ROW.id == id, _ROW.state != _S.KILLED).values(**values).returning(sessions)
            )
            row = connection.execute(changed).mappings().one_or_none()
            if row is None:
                _refuse(connection, id, "it is not there to be changed")
            return session_of(row)

    def move(
        self,
        id: str,
        frm: SessionState,
        to: SessionState,
        *,
        generation: int,
        last_activity: float | None = None,
        event: str | None = None,
        **changes: Any,
    ) -> Session:
        """From one state to another, if (state, generation[, last_activity]) are still what the caller saw.

        `event` is recorded in the same transaction, with the error if `changes` has one.
        """
        check_move(frm, to)
        if unknown := changes.keys() - CHANGES:
            raise BadArgument(f"a move can't change {', '.join(sorted(unknown))}")
        seen = [_ROW.id == id, _ROW.state == frm, _ROW.generation == generation]
        if last_activity is not None:
            seen.append(_ROW.last_activity == last_activity)
        values: dict[str, Any] = {"state": to, "generation": generation + 1, "updated": now(), **changes}
        if to is _S.PAUSED:
            values |= {"paused_at": func.coalesce(_ROW.paused_at, now())}
        if to is _S.RUNNING and frm is not _S.PAUSING:
            values |= {"last_activity": now(), "paused_at": None, "warned_at": None}
        with self._db.write() as connection:
            row = (
                connection.execute(update(sessions).where(*seen).values(**values).returning(sessions))
                .mappings()
                .one_or_none()
            )
            if row is None:
                _refuse(connection, id, f"it is no longer {frm} at generation {generation}")
            if to in (_S.PAUSED, _S.KILLED, _S.ERROR):
                connection.execute(delete(uses).where(uses.c.sandbox == id))
            if to in (_S.KILLED, _S.ERROR):
                connection.execute(delete(requests).where(requests.c.sandbox == id))
            if to is _S.KILLED:
                connection.execute(delete(tokens).where(tokens.c.sandbox == id))
            if event is not None:
                record_event(connection, id, event, {"from": frm, "to": to, "error": changes.get("last_error")})
            return session_of(row)

    def adopt(self, session: Session, host: str) -> Session:
        """Take a session over from a host that is dead, in whatever state it is. Fences off the old host's moves."""
        with self._db.write() as connection:
            taken = (
                update(sessions)
                .where(_ROW.id == session.id, _ROW.state == session.state, _ROW.generation == session.generation)
                .where(_ROW.host.not_in(self._hosts.living()))
                .values(host=host, generation=session.generation + 1, updated=now())
                .returning(sessions)
            )
            row = connection.execute(taken).mappings().one_or_none()
            if row is None:
                _refuse(connection, session.id, "its host lives, or another has taken it over")
            record_event(connection, session.id, "adopted", {"from": session.host, "to": host})
            return session_of(row)

    def saved(self, id: str, host: str, checkpoint: str, store: str | None) -> None:
        """A running session has a newer checkpoint to come back from, should its host be lost."""
        running = [_ROW.id == id, _ROW.host == host, _ROW.state == _S.RUNNING]
        with self._db.write() as connection:
            connection.execute(
                update(sessions).where(*running).values(checkpoint=checkpoint, store=store, updated=now())
            )

    def touch(self, id: str) -> Session | None:
        """Activity. None, and nothing changed, if it is not RUNNING."""
        with self._db.write(durable=False) as connection:
            return _touch(connection, check_id(id))

    def begin_use(self, id: str, host: str) -> Session:
        """From now until `end_use` it is not idle, as long as `host` lives. Only one that runs there can be used."""
        with self._db.write(durable=False) as connection:
            session = _touch(connection, check_id(id), _ROW.host == host)
            if session is None:
                _refuse(connection, id, f"it does not run on host {host}")
            if not connection.execute(select(uses.c.since).where(*_use(id, host))).first():
                connection.execute(insert(uses).values(sandbox=id, host=host, since=now()))
            return session

    def running(self, id: str, host: str) -> Session:
        """The session, if it runs on this host."""
        with self._db.read() as connection:
            session = _get(connection, check_id(id))
            if session.state is not _S.RUNNING or session.host != host:
                _refuse(connection, id, f"it does not run on host {host}")
            return session

    def end_use(self, id: str, host: str) -> None:
        with self._db.write(durable=False) as connection:
            _touch(connection, id)
            connection.execute(delete(uses).where(*_use(id, host)))

    def used_by(self, host: str) -> set[str]:
        with self._db.read() as connection:
            return set(connection.execute(select(uses.c.sandbox).where(uses.c.host == host)).scalars())

    def idle(self, host: str) -> list[Session]:
        """What the sweeper of this host should put to sleep now, longest idle first."""
        in_use = exists().where(uses.c.sandbox == _ROW.id, uses.c.host.in_(self._hosts.living()))
        wanted = (
            select(sessions)
            .where(_ROW.state == _S.RUNNING, _ROW.host == host, _ROW.auto_pause_timeout > 0, _ROW.next_try <= now())
            .where(_ROW.last_activity + _ROW.auto_pause_timeout <= now(), ~in_use)
            .order_by(_ROW.last_activity)
        )
        return self._all(wanted)

    def expiring(self, within: float) -> list[Session]:
        """The paused ones whose time ends within so many seconds, or has ended; longest asleep first."""
        ends = and_(_ROW.paused_expiry > 0, _ROW.paused_at + _ROW.paused_expiry <= now() + within)
        return self._all(select(sessions).where(_ROW.state == _S.PAUSED, ends).order_by(_ROW.paused_at))

    def at(self, host: str, states: frozenset[SessionState]) -> list[Session]:
        """This host's sessions in the given states."""
        return self._all(select(sessions).where(_ROW.host == host, _ROW.state.in_(states)).order_by(_ROW.created))

    def stranded(self, host: str) -> list[Session]:
        """What dead hosts, and not this one, left running, half done, or killed and not removed."""
        lost = or_(_ROW.state.in_(PASSING | {_S.RUNNING}), and_(_ROW.state == _S.KILLED, ~_ROW.removed))
        gone = and_(_ROW.host != host, _ROW.host.not_in(self._hosts.living()))
        return self._all(select(sessions).where(lost, gone).order_by(_ROW.created))

    def unremoved(self, host: str) -> list[Session]:
        """Killed, and their sandbox not known to be gone; their next try is due."""
        return self._all(
            select(sessions).where(_ROW.state == _S.KILLED, _ROW.host == host, ~_ROW.removed, _ROW.next_try <= now())
        )

    def warn(self, session: Session, expires: float) -> bool:
        """Record once that a paused one will expire; False if somebody else did, or it woke."""
        with self._db.write() as connection:
            same = [_ROW.id == session.id, _ROW.generation == session.generation, _ROW.warned_at.is_(None)]
            if not connection.execute(update(sessions).where(*same).values(warned_at=now())).rowcount:
                return False
            record_event(connection, session.id, "expiry_warning", {"expires": expires})
            return True

    def removal(self, id: str, *, error: dict[str, Any] | None = None, failures: int = 0, wait: float = 0.0) -> None:
        """Note that a killed sandbox is gone, or that removing it failed and when to try again."""
        done = {"removed": True} if error is None else {"next_try": now() + wait}
        with self._db.write() as connection:
            values = {"last_error": error, "failures": failures, "updated": now(), **done}
            connection.execute(update(sessions).where(_ROW.id == id, _ROW.state == _S.KILLED).values(**values))
            if error is not None:
                record_event(connection, id, "removal_failed", {"error": error})

    def _all(self, query: Any) -> list[Session]:
        with self._db.read() as connection:
            return [session_of(row) for row in connection.execute(query).mappings()]


def _visible(scope: Scope | None) -> ColumnElement[bool]:
    """The one place where a key's scope is applied."""
    if scope is None:
        return _ROW.id.is_not(None)
    mine = _ROW.owner == scope.user
    return mine if scope.project is None else and_(mine, _ROW.project == scope.project)


def _get(connection: Connection, id: str, scope: Scope | None = None) -> Session:
    row = connection.execute(select(sessions).where(_ROW.id == id, _visible(scope))).mappings().one_or_none()
    if row is None:
        raise SandboxNotFound(f"no sandbox {id}", "list yours to see their ids")
    return session_of(row)


def _refuse(connection: Connection, id: str, why: str) -> NoReturn:
    found = _get(connection, id)
    raise StateConflict(
        f"{id} was not moved: {why}, but {found.state} at generation {found.generation}",
        "read it again and decide anew",
        state=str(found.state),
    )


def _touch(connection: Connection, id: str, *more: ColumnElement[bool]) -> Session | None:
    active = update(sessions).where(_ROW.id == id, _ROW.state == _S.RUNNING, *more).values(last_activity=now())
    row = connection.execute(active.returning(sessions)).mappings().one_or_none()
    return session_of(row) if row else None


def _use(id: str, host: str) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return uses.c.sandbox == id, uses.c.host == host
