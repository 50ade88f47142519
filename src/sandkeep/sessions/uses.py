"""What this process uses: a mark in the database while it does, so that nobody takes the sandbox for idle.

The mark outlasts its use by `linger` seconds: the next use in that time finds it, and neither writes it nor takes it away. Its row's
generation says whether it still holds: whatever moved the sandbox meanwhile has added to it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from sandkeep.errors import DatabaseFailed, StateConflict
from sandkeep.sessions.database import Database
from sandkeep.sessions.records import Session
from sandkeep.sessions.sessions import Sessions
from sandkeep.sessions.states import SessionState

_NEWS = 5.0
"""In lasting use, activity is written at least this often, in seconds."""

_log = logging.getLogger(__name__)


@dataclass
class _Use:
    """This process's use of one sandbox; the database has a mark while `count` is above zero, and for a while after."""

    count: int = 0
    holders: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    generation: int = 0  # of the row when the mark was written; 0 without one
    touched: float = 0.0
    ended: float = 0.0
    ending: asyncio.TimerHandle | None = None


class Uses:
    """The part of the keeper that marks uses; `woken` is the other part's."""

    def __init__(self, database: Database, sessions: Sessions, host: str, linger: float) -> None:
        self.db = database
        self.sessions = sessions
        self.host = host
        self._linger = linger
        self._uses: dict[str, _Use] = {}
        self._endings: set[asyncio.Task[None]] = set()

    async def woken(self, id: str) -> None:
        """It runs on this host, or the error says why not."""
        raise NotImplementedError

    @property
    def used(self) -> frozenset[str]:
        """Ids that this process is using, or was a moment ago."""
        return frozenset(id for id, use in self._uses.items() if use.count or use.generation)

    async def close_uses(self) -> None:
        """Marks that linger go when the host leaves."""
        for use in self._uses.values():
            if use.ending is not None:
                use.ending.cancel()
        await asyncio.gather(*self._endings, return_exceptions=True)

    @asynccontextmanager
    async def use(self, id: str, seen: Session | None = None) -> AsyncIterator[Session]:
        """Wake it if need be and keep it from being idle meanwhile: for a foreground command, a stream, an attach.

        `seen` is its row as just read; if that says what it said when the mark was written, nothing more is read or written.
        """
        async with self._holding(id) as use:
            async with use.lock:
                session = await self._begin(id, use, seen)
            try:
                yield session
            finally:
                await asyncio.shield(asyncio.ensure_future(self._end(id)))

    async def _begin(self, id: str, use: _Use, seen: Session | None) -> Session:
        now = asyncio.get_running_loop().time()
        if seen is not None and self._holds(seen, use) and now - use.touched < _NEWS:
            use.count += 1
            return seen
        while True:
            try:
                begin = self.sessions.running if use.count and now - use.touched < _NEWS else self.sessions.begin_use
                session = await self.db.call(begin, id, self.host)
            except StateConflict:
                await self.woken(id)
            else:
                use.count += 1
                use.generation = session.generation
                use.touched = now if begin == self.sessions.begin_use else use.touched
                return session

    def _holds(self, seen: Session, use: _Use) -> bool:
        return (seen.state, seen.host, seen.generation) == (SessionState.RUNNING, self.host, use.generation)

    async def _end(self, id: str) -> None:
        async with self._holding(id) as use, use.lock:
            use.count -= 1
            use.ended = asyncio.get_running_loop().time()
            if not use.count and not self._linger:
                await self._unmark(id, use)
            elif not use.count and use.ending is None:
                self._end_later(id, use, self._linger)

    def _end_later(self, id: str, use: _Use, wait: float) -> None:
        def begin() -> None:
            task = asyncio.create_task(self._end_now(id))
            self._endings.add(task)
            task.add_done_callback(self._endings.discard)

        use.ending = asyncio.get_running_loop().call_later(wait, begin)

    async def _end_now(self, id: str) -> None:
        async with self._holding(id) as use, use.lock:
            use.ending = None
            left = use.ended + self._linger - asyncio.get_running_loop().time()
            if not use.count and left > 0:
                self._end_later(id, use, left)
            elif not use.count:
                await self._unmark(id, use)

    async def _unmark(self, id: str, use: _Use) -> None:
        use.generation = 0
        try:
            await self.db.call(self.sessions.end_use, id, self.host)
        except DatabaseFailed as error:
            _log.warning("%s: the end of its use was not written, the sweeper will: %s", id, error)

    async def mend_use(self, id: str) -> None:
        """Write again whether this process uses it."""
        async with self._holding(id) as use, use.lock:
            try:
                if use.count:
                    use.generation = (await self.db.call(self.sessions.begin_use, id, self.host)).generation
                else:
                    use.generation = 0
                    await self.db.call(self.sessions.end_use, id, self.host)
            except StateConflict:
                _log.debug("%s is in use but does not run here", id)

    @asynccontextmanager
    async def _holding(self, id: str) -> AsyncIterator[_Use]:
        use = self._uses.setdefault(id, _Use())
        use.holders += 1
        try:
            yield use
        finally:
            use.holders -= 1
            if not use.holders and not use.count and not use.generation and use.ending is None:
                self._uses.pop(id, None)
