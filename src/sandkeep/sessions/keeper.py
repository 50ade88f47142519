"""One server's hands on its sessions: create, use, wake, pause, resume, kill. Each is: claim the row by a move, do the
work, move on; so a crash between any two steps leaves a state that says what was under way.

Many callers of the same wake or pause in one process share one task; callers on other servers wait for the row. A caller
that is cancelled does not cancel the work.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from sandkeep.errors import Busy, HostGone, SandboxDead, SandboxElsewhere, StateConflict
from sandkeep.sessions.database import Database
from sandkeep.sessions.decisions import BACK_OFF, Reality, back_off, settle
from sandkeep.sessions.hosts import Hosts
from sandkeep.sessions.records import Scope, Session, error_record
from sandkeep.sessions.sessions import Sessions
from sandkeep.sessions.states import PASSING, SessionState
from sandkeep.sessions.uses import Uses

_S = SessionState
_POLL = (0.02, 0.5)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Slept:
    """Where a paused sandbox sleeps."""

    checkpoint: str
    store: str | None = None


class Sandboxes(Protocol):
    """What the keeper needs of the sandboxes of this host.

    Each method is whole or raises and leaves what was; doing one twice is harmless. They must not block the loop.
    """

    async def pause(self, session: Session) -> Slept:
        """Put it to sleep. Raises `Busy` if, under the sandbox's own lock, a foreground command turns out to run."""

    async def resume(self, session: Session) -> None:
        """Wake it here from `session.checkpoint`."""

    async def remove(self, session: Session) -> None:
        """End it and free everything of it; no error if nothing is left."""

    async def discard(self, session: Session) -> None:
        """End the copy that a resume made here, since another host has meanwhile taken the session over."""

    async def real(self, id: str) -> Reality | None:
        """What this host really has of it."""


class Keeper(Uses):
    def __init__(
        self,
        database: Database,
        sandboxes: Sandboxes,
        host: str,
        *,
        hosts: Hosts | None = None,
        patience: float = 120.0,
        back_off: tuple[float, float] = BACK_OFF,
        linger: float = 0.0,
    ) -> None:
        """`linger`: how long the mark of a use stays after its end, so that the next one need not write it."""
        self.hosts = hosts or Hosts(database)
        super().__init__(database, Sessions(database, self.hosts), host, linger)
        self.sandboxes = sandboxes
        self._patience = patience
        self._back_off = back_off
        self._tasks: dict[str, asyncio.Task[Session]] = {}

    @property
    def busy(self) -> frozenset[str]:
        """Ids with an operation of this process under way."""
        return frozenset(self._tasks)

    async def close(self) -> None:
        """Wait for the operations under way. Marks that linger go when the host leaves."""
        while self._tasks:
            await asyncio.wait(set(self._tasks.values()))
        await self.close_uses()

    async def create(self, id: str, scope: Scope, make: Callable[[Session], Awaitable[None]], **fields: Any) -> Session:
        """The row first, then `make`, which brings the sandbox up. A failure stays visible as ERROR."""

        async def work() -> Session:
            session = await self.db.call(self.sessions.create, id, scope, host=self.host, **fields)
            try:
                await make(session)
            except Exception as error:
                await self._finish(session, _S.ERROR, event="create_failed", last_error=error_record(error))
                raise
            return await self._finish(session, _S.RUNNING)

        return await self._alone(id, work)

    async def woken(self, id: str) -> None:
        self._here(await self.wake(id))

    async def touch(self, id: str) -> Session:
        """Activity without duration; wakes it if need be."""
        while (session := await self.db.call(self.sessions.touch, id)) is None:
            await self.wake(id)
        return session

    async def wake(self, id: str) -> Session:
        """RUNNING, on whatever host that is; however many ask at once, it is resumed once."""
        return await self._until(id, _S.RUNNING)

    async def resume(self, id: str) -> Session:
        """As `wake`, but also brings back what is in ERROR, from its last checkpoint."""
        session = await self.db.call(self.sessions.get, id)
        if session.state is not _S.ERROR:
            return await self.wake(id)
        if session.checkpoint is None:
            raise SandboxDead(
                f"{id} is lost and has no checkpoint to come back from", "create a new one", error=session.last_error
            )
        return await self._alone(id, lambda: self._resume(session))

    async def pause(self, id: str) -> Session:
        """Put it to sleep, in use or not, because its owner says so."""
        return await self._until(id, _S.PAUSED)

    async def pause_idle(self, session: Session) -> Session:
        """Put it to sleep if it is still as idle as when it was read."""
        return await self._alone(session.id, lambda: self._pause(session, session.last_activity))

    async def kill(self, id: str) -> Session:
        """KILLED at once; its sandbox is removed by the host that has it, and tried again until it is gone."""

        async def work() -> Session:
            while True:
                session = await self.db.call(self.sessions.get, id)
                if session.state is _S.KILLED:
                    return session
                try:
                    session = await self._move(session, _S.KILLED)
                except StateConflict:
                    continue
                return await self.remove(session) if session.host in (None, self.host) else session

        return await self._alone(id, work)

    async def remove(self, session: Session) -> Session:
        """Free what a killed sandbox left on this host."""
        try:
            await self.sandboxes.remove(session)
        except Exception as error:
            failures = session.failures + 1
            wait = back_off(failures, self._back_off)
            await self.db.call(
                self.sessions.removal, session.id, error=error_record(error), failures=failures, wait=wait
            )
        else:
            await self.db.call(self.sessions.removal, session.id)
        return await self.db.call(self.sessions.get, session.id)

    async def settle(self, session: Session) -> Session:
        """Make a row with no operation under way agree with what this host really has."""
        if session.state is _S.KILLED:
            return session if session.removed else await self.remove(session)
        reality = await self.sandboxes.real(session.id)
        for to in settle(session, reality):
            changes: dict[str, Any] = {"host": self.host}
            if to is _S.PAUSED and reality is not None and reality.checkpoint is not None:
                changes |= {"checkpoint": reality.checkpoint, "store": reality.store}
            if to is _S.ERROR:
                changes["last_error"] = SandboxDead(f"{session.id} was not found on its host").as_dict()
            session = await self._move(session, to, event="reconciled", **changes)
        return session

    async def take_over(self, session: Session) -> Session:
        """Adopt a session of a dead host if this host can: it has the sandbox, or the sandbox sleeps in a checkpoint."""
        asleep = session.state is _S.RESUMING and session.checkpoint is not None
        if not asleep and session.state is not _S.KILLED and await self.sandboxes.real(session.id) is None:
            raise HostGone(
                f"{session.id} was {session.state} on host {session.host}, which does not answer",
                "start that host's server again, or resume with fail_over to go on from the last checkpoint",
                host=session.host,
                checkpoint=session.checkpoint,
            )
        return await self.settle(await self.db.call(self.sessions.adopt, session, self.host))

    async def fail_over(self, id: str) -> Session:
        """Give up a dead host: go on here from the last checkpoint. What came after it is lost, and an event says so."""
        session = await self.db.call(self.sessions.get, id)
        if session.state in (_S.PAUSED, _S.ERROR, _S.KILLED):
            return await self.resume(id)
        if session.checkpoint is None:
            raise HostGone(f"{id} has no checkpoint to go on from", "start its host's server again", host=session.host)
        gone = SandboxDead(
            f"host {session.host} was given up; {id} goes on from checkpoint {session.checkpoint}"
        ).as_dict()
        session = await self.db.call(self.sessions.adopt, session, self.host)
        await self._move(session, _S.ERROR, event="failed_over", last_error=gone)
        return await self.resume(id)

    async def _until(self, id: str, goal: SessionState) -> Session:
        """Wait for, or bring about, RUNNING or PAUSED."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience
        delay, most = _POLL
        waited: Session | None = None
        while True:
            failed = await self._joined(id)
            session = await self.db.call(self.sessions.get, id)
            if session.state in PASSING | {_S.RUNNING} and await self._dead(session.host):
                await self._try(self.take_over(session))
                continue
            if session.state is goal:
                return session
            if failed is not None and not isinstance(failed, StateConflict):
                raise failed
            if session.state in (_S.KILLED, _S.ERROR):
                remedy = (
                    "create a new one"
                    if session.state is _S.KILLED
                    else "resume it from its last checkpoint, or kill it"
                )
                raise SandboxDead(f"{id} is {session.state}", remedy, error=session.last_error)
            if loop.time() > deadline:
                raise Busy(
                    f"{id} is still {session.state} after {self._patience:g} s", "try again", state=str(session.state)
                )
            if session.state in PASSING:
                waited = session
                await asyncio.sleep(delay)
                delay = min(delay * 1.5, most)
            elif waited is not None and session.generation > waited.generation and session.error is not None:
                raise session.error
            elif id in self._tasks:
                continue
            elif goal is _S.RUNNING:
                await self._try(self._start(id, self._resume(session)))
            else:
                self._here(session)
                await self._try(self._start(id, self._pause(session, None)))

    async def _resume(self, session: Session) -> Session:
        session = await self._move(session, _S.RESUMING, host=self.host, last_error=None)
        try:
            await self.sandboxes.resume(session)
        except Exception as error:
            failed = {"failures": session.failures + 1, "last_error": error_record(error)}
            await self._finish(session, _S.PAUSED, event="resume_failed", **failed)
            raise
        return await self._finish(session, _S.RUNNING, failures=0, next_try=0.0)

    async def _pause(self, session: Session, last_activity: float | None) -> Session:
        session = await self._move(session, _S.PAUSING, last_activity=last_activity)
        try:
            slept = await self.sandboxes.pause(session)
        except Busy:
            await self._finish(session, _S.RUNNING)
            await self.db.call(self.sessions.touch, session.id)
            raise
        except Exception as error:
            reality = await self.sandboxes.real(session.id)
            if reality is not None and reality.state == "paused":
                return await self.settle(session)
            failures = session.failures + 1
            again = await self.db.call(self.db.now) + back_off(failures, self._back_off)
            failed = {"failures": failures, "next_try": again, "last_error": error_record(error)}
            await self._finish(session, _S.RUNNING, event="pause_failed", **failed)
            raise
        done = {"failures": 0, "next_try": 0.0, "last_error": None}
        return await self._finish(session, _S.PAUSED, checkpoint=slept.checkpoint, store=slept.store, **done)

    async def _move(self, session: Session, to: SessionState, **changes: Any) -> Session:
        return await self.db.call(
            self.sessions.move, session.id, session.state, to, generation=session.generation, **changes
        )

    async def _finish(self, session: Session, to: SessionState, **changes: Any) -> Session:
        """The last move of an operation. If it was overtaken, what it made must not be left behind."""
        try:
            return await self._move(session, to, **changes)
        except StateConflict:
            found = await self.db.call(self.sessions.get, session.id)
            if found.state is _S.KILLED:
                await self.remove(found)
            elif found.host != self.host:
                await self.sandboxes.discard(session)
            raise

    async def _alone(self, id: str, work: Callable[[], Coroutine[Any, Any, Session]]) -> Session:
        """Run once this process has no other operation on the sandbox."""
        while id in self._tasks:
            await self._joined(id)
        return await self._start(id, work())

    def _start(self, id: str, work: Coroutine[Any, Any, Session]) -> asyncio.Future[Session]:
        """Run as this process's one operation on the sandbox; who awaits it can't cancel it."""
        task = self._tasks[id] = asyncio.create_task(work, name=f"session {id}")
        task.add_done_callback(lambda _: self._tasks.pop(id))
        return asyncio.shield(task)

    async def _joined(self, id: str) -> BaseException | None:
        """Wait for the operation under way, if any; how it failed."""
        if (task := self._tasks.get(id)) is None:
            return None
        await asyncio.wait({task})
        return None if task.cancelled() else task.exception()

    async def _try(self, work: Awaitable[Session]) -> None:
        """Do it unless another was first; the caller looks again either way."""
        try:
            await work
        except StateConflict:
            await asyncio.sleep(_POLL[0])

    async def _dead(self, host: str | None) -> bool:
        return host not in (None, self.host) and not await self.db.call(self.hosts.alive, host)

    def _here(self, session: Session) -> None:
        if session.host != self.host:
            raise SandboxElsewhere(
                f"{session.id} runs on host {session.host}", "ask that host's server", host=session.host
            )
