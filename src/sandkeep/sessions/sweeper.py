"""The sweeper of one server: beats its heart, puts idle sandboxes to sleep, warns of and removes expired sleepers,
finishes what a crash or an outage left half done. A failure is recorded and tried again later; it never kills anything.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from sandkeep.errors import Busy, HostGone, SandboxNotFound, StateConflict
from sandkeep.sessions.decisions import WARN_BEFORE, expiry
from sandkeep.sessions.keeper import Keeper
from sandkeep.sessions.records import Session
from sandkeep.sessions.states import PASSING, SessionState

_S = SessionState
_log = logging.getLogger(__name__)


class Sweeper:
    """`troubles` holds what went wrong in the last round, for `/health`: empty is well."""

    def __init__(
        self,
        keeper: Keeper,
        *,
        interval: float = 5.0,
        warn_before: float = WARN_BEFORE,
        at_once: int = 4,
        address: str | None = None,
    ) -> None:
        self.troubles: dict[str, Exception] = {}
        self._keeper = keeper
        self._interval = interval
        self._warn_before = warn_before
        self._address = address
        self._slots = asyncio.Semaphore(at_once)
        self._working: set[asyncio.Task[None]] = set()
        self._handling: set[str] = set()
        self._loops: list[asyncio.Task[None]] = []
        self._incarnation = ""

    async def start(self) -> None:
        """Join as this host, reconcile, and go on until `stop`."""
        self._incarnation = await self._call(self._keeper.hosts.join, self._keeper.host, self._address)
        often = min(self._interval, self._keeper.hosts.time_to_live / 4)
        self._loops.append(asyncio.create_task(self._forever("heartbeat", self._beat, often)))
        await self.reconcile()
        self._loops.append(asyncio.create_task(self._forever("sweep", self.begin, self._interval)))

    async def stop(self) -> None:
        """No new work; wait for what is under way; leave, so that others may take over at once."""
        sweeping = self._loops[1:]
        for loop in sweeping:
            loop.cancel()
        await asyncio.gather(*sweeping, return_exceptions=True)
        await self._settled()
        await self._keeper.close()
        for loop in self._loops[:1]:
            loop.cancel()
            await asyncio.gather(loop, return_exceptions=True)
        self._loops.clear()
        await self._call(self._keeper.hosts.leave, self._keeper.host, self._incarnation)

    async def reconcile(self) -> None:
        """At start-up: every row of this host against what the host really has."""
        for session in await self._call(self._keeper.sessions.at, self._keeper.host, frozenset(_S)):
            if not (session.state is _S.KILLED and session.removed):
                self._start(session, self._keeper.settle)
        await self._settled()

    async def sweep(self) -> None:
        """One round, and wait for all that it began."""
        await self.begin()
        await self._settled()

    async def begin(self) -> None:
        """One round; what takes time goes on by itself."""
        keeper, sessions = self._keeper, self._keeper.sessions
        await self._beat()
        await self._mend_uses()
        for session in await self._call(sessions.at, keeper.host, PASSING):
            self._start(session, keeper.settle)
        for session in await self._call(sessions.stranded, keeper.host):
            self._start(session, keeper.take_over)
        for session in await self._call(sessions.unremoved, keeper.host):
            self._start(session, keeper.remove)
        for session in await self._call(sessions.idle, keeper.host):
            if session.id not in keeper.used:
                self._start(session, keeper.pause_idle)
        await self._expire()

    async def _expire(self) -> None:
        now = await self._call(self._keeper.db.now)
        for session in await self._call(self._keeper.sessions.expiring, self._warn_before):
            warn, end = expiry(session, self._warn_before)
            if end is None and now >= warn:
                notice = min(self._warn_before, session.paused_expiry)
                await self._call(self._keeper.sessions.warn, session, max(warn, now) + notice)
            elif end is not None and now >= end:
                self._start(session, self._end)

    async def _end(self, session: Session) -> Session:
        move = self._keeper.sessions.move
        ended = await self._call(
            move,
            session.id,
            _S.PAUSED,
            _S.KILLED,
            generation=session.generation,
            event="expired",
            host=self._keeper.host,
        )
        return await self._keeper.remove(ended)

    async def _mend_uses(self) -> None:
        """The marks of this host against what this process uses: an outage may have kept one from being written."""
        keeper, sessions = self._keeper, self._keeper.sessions
        marked: set[str] = await self._call(sessions.used_by, keeper.host)
        for id in marked ^ keeper.used:
            await keeper.mend_use(id)

    def _start(self, session: Session, work: Callable[[Session], Awaitable[Session]]) -> None:
        """Begin work on one sandbox, unless this process has something under way on it."""
        if session.id in self._keeper.busy or session.id in self._handling:
            return
        self._handling.add(session.id)
        task = asyncio.create_task(self._one(session, work))
        self._working.add(task)
        task.add_done_callback(self._working.discard)

    async def _one(self, session: Session, work: Callable[[Session], Awaitable[Session]]) -> None:
        try:
            async with self._slots:
                await work(session)
        except (StateConflict, Busy, HostGone, SandboxNotFound) as error:
            _log.debug("%s: left as it is: %s", session.id, error)
        except Exception as error:
            _log.warning("%s: %s failed, will be tried again: %s", session.id, work.__name__, error)
        finally:
            self._handling.discard(session.id)

    async def _settled(self) -> None:
        while self._working:
            await asyncio.wait(set(self._working))

    async def _beat(self) -> None:
        await self._call(self._keeper.hosts.heartbeat, self._keeper.host, self._incarnation)

    async def _forever(self, name: str, work: Callable[[], Awaitable[None]], pause: float) -> None:
        while True:
            try:
                await work()
                self.troubles.pop(name, None)
            except Exception as error:
                self.troubles[name] = error
                _log.warning("%s failed, will be tried again: %s", name, error)
            await asyncio.sleep(pause)

    async def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await self._keeper.db.call(function, *args, **kwargs)
