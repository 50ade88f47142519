"""The life of E2B's sandboxes on the server's own services: made, found running, ended or put to sleep at their deadline."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from sandkeep.errors import HostGone, SandboxDead, SandboxNotFound, SandkeepError, StateConflict
from sandkeep.sandbox import AsyncSandbox
from sandkeep.server.e2b.rows import LEAST_AFTER_WAKING, Row, Rows
from sandkeep.server.services import NewSandbox, Services
from sandkeep.sessions import Scope, Session, SessionState
from sandkeep.sessions.records import request_of

T = TypeVar("T")
_S = SessionState
_LOOK_AGAIN = 5.0
_log = logging.getLogger(__name__)


class Gone(SandkeepError):
    """Not running, whatever the reason: E2B's answer to it is always the same 502."""

    def __init__(self, id: str) -> None:
        super().__init__("The sandbox was not found", "connect to it, or create a new one")
        self.id = id


class Life:
    def __init__(self, services: Services) -> None:
        self.services = services
        self.rows = Rows(services.db)
        self._known: dict[str, Row] = {}
        self._making: set[asyncio.Task[tuple[Session, Row]]] = set()
        self._changed = asyncio.Event()
        self._working: dict[str, asyncio.Task[None]] = {}
        self._loop: asyncio.Task[None] | None = None
        self.on_end: list[Callable[[str], None]] = []

    async def start(self) -> None:
        await self.call(self.rows.begin, self.services.keeper.host, self.services.settings.auto_pause)
        self._loop = asyncio.create_task(self._tend(), name="e2b deadlines")

    async def stop(self) -> None:
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
        await asyncio.gather(*self._working.values(), return_exceptions=True)

    async def call(self, function: Callable[..., T], *args: Any, **options: Any) -> T:
        return await self.services.db.call(function, *args, **options)

    # making and finding

    async def create(
        self, scope: Scope, new: NewSandbox, timeout: float, policy: dict[str, Any], key: str | None = None
    ) -> tuple[Session, Row]:
        """With a key that a create has had before, on any server, and whose sandbox lives: that one."""
        if key is None:
            return await self._create(scope, new, timeout, policy)
        request, by_request = request_of(scope, key), self.services.sessions.by_request
        while (found := await self.call(by_request, request)) is None or (found := await self._made(found)) is None:
            making = asyncio.create_task(self._create(scope, new, timeout, policy, request))
            self._making.add(making)
            making.add_done_callback(self._made_it)
            try:
                return await asyncio.shield(making)
            except StateConflict:
                if await self.call(by_request, request) is None:
                    raise
        row = await self.call(self.rows.get, found.id)
        return found, row or await self.admit(found, timeout, policy)

    def _made_it(self, making: asyncio.Task[tuple[Session, Row]]) -> None:
        self._making.discard(making)
        if not making.cancelled():
            making.exception()  # told to who waits, if anybody still does

    async def _made(self, session: Session) -> Session | None:
        """Once it is made; None if that failed, or its host died over it."""
        try:
            return await self.services.keeper.wake(session.id) if session.state is _S.CREATING else session
        except (SandboxDead, HostGone):
            await self.call(self.services.sessions.forget_request, session.id)
            return None

    async def _create(
        self, scope: Scope, new: NewSandbox, timeout: float, policy: dict[str, Any], request: str | None = None
    ) -> tuple[Session, Row]:
        session = await self.services.create(scope, new, request)
        return session, await self.admit(session, timeout, policy)

    async def admit(self, session: Session, timeout: float, policy: dict[str, Any]) -> Row:
        """Give a sandbox its tokens and its deadline."""
        traffic = None if policy.get("network", {}).get("allowPublicTraffic", True) else secrets.token_hex(24)
        try:
            row = await self.call(self.rows.add, session.id, secrets.token_hex(24), traffic, timeout, policy)
        except BaseException:
            await asyncio.shield(self.services.kill(None, session.id))
            raise
        self._changed.set()
        return row

    async def fork(
        self, scope: Scope, id: str, count: int, timeout: float
    ) -> list[tuple[Session, Row] | SandkeepError]:
        session, row = await self.find(scope, id)
        if session.state is not _S.RUNNING:
            raise StateConflict(f"sandbox {id} is paused", "connect to it first")
        memory = await self.has_memory(await self.here(session))
        made = await self.services.fork(scope, id, count, memory=memory)
        return [
            one if isinstance(one, SandkeepError) else (one, await self.admit(one, timeout, row.policy)) for one in made
        ]

    async def has_memory(self, session: Session) -> bool:
        """Whether its runtime can save memory."""
        info = await self.services.info(session)
        return info is not None and info.runtime == "runsc"

    async def here(self, session: Session) -> Session:
        """One that runs, if that is on this host, or was on a dead one and can be adopted. Else `SandboxElsewhere`."""
        if session.host != self.services.keeper.host:
            session = self.services.here(await self.services.keeper.wake(session.id))
        return session

    async def row(self, id: str) -> Row | None:
        """The row as far as it never changes: tokens. None for a sandbox that E2B has nothing to do with."""
        found = self._known.get(id)
        if found is None:
            found = await self.call(self.rows.get, id)
            if found is not None:
                self._known[id] = found
        return found

    async def find(self, scope: Scope | None, id: str) -> tuple[Session, Row]:
        session = await self.services.get(scope, id)
        row = await self.call(self.rows.get, id)
        if row is None or session.state is _S.ERROR:
            raise SandboxNotFound(f"sandbox {id} not found", "list yours to see their ids")
        self._known[id] = row
        return session, row

    async def running(self, id: str) -> AsyncSandbox:
        """A sandbox that runs, for a request to it. A sleeping one is woken only if its policy says so."""
        try:
            session = await self.services.get(None, id)
        except SandboxNotFound:
            raise Gone(id) from None
        if session.state is _S.RESUMING:
            session = await self.services.keeper.wake(id)
        if session.state is not _S.RUNNING:
            row = await self.call(self.rows.get, id)
            if row is None or not row.policy.get("auto_resume") or session.state not in (_S.PAUSED, _S.PAUSING):
                raise Gone(id)
            session = await self.services.resume(None, id)
            await self.call(self.rows.live_until, id, session.generation, max(row.timeout, LEAST_AFTER_WAKING))
            self._changed.set()
        return await self.services.hands.handle(await self.here(session))

    async def still(self, id: str) -> AsyncSandbox:
        """After its guest hung up: the sandbox again, once whatever was done to it is done; `Gone` if it no longer runs."""
        await self.services.alone(id, lambda: asyncio.sleep(0))
        sandbox = await self.running_now(id)
        try:
            await sandbox._link.call("hello")
        except SandboxDead:
            raise Gone(id) from None
        return sandbox

    async def running_now(self, id: str) -> AsyncSandbox:
        try:
            session = await self.services.get(None, id)
        except SandboxNotFound:
            raise Gone(id) from None
        if session.state is not _S.RUNNING:
            raise Gone(id)
        return await self.services.hands.handle(await self.here(session))

    # time to live

    async def connect(self, scope: Scope, id: str, timeout: float, *, memory: bool) -> tuple[Session, Row, bool]:
        """Running, and at least for `timeout` more; True if it was asleep."""
        while True:
            session, row = await self._settled(scope, id)
            if session.state is not _S.RUNNING:
                break
            session = await self.here(session)
            if await self.call(self.rows.extend, id, session.generation, timeout):
                return session, row, False
            if id not in self._working:  # woken by another API, and not yet given its time
                lasting = max(timeout, row.timeout, LEAST_AFTER_WAKING)
                await self.call(self.rows.live_until, id, session.generation, lasting)
                return session, row, False
        session = await self.services.resume(scope, id)
        await self.call(self.rows.live_until, id, session.generation, timeout)
        self._changed.set()
        if not (memory and row.policy.get("paused_with_memory", True)):
            await self._reboot(session)
        return session, row, True

    async def _settled(self, scope: Scope, id: str) -> tuple[Session, Row]:
        """What it is once its end, if that is under way, has come."""
        await self.find(scope, id)
        while (ending := self._working.get(id)) is not None:
            await asyncio.wait({ending})
        return await self.find(scope, id)

    async def _reboot(self, session: Session) -> None:
        """As after a start from disk: nothing runs."""
        sandbox = await self.services.hands.handle(session)
        await sandbox._link.call("kill_all")

    async def set_timeout(self, scope: Scope, id: str, seconds: float) -> None:
        session, _ = await self._settled(scope, id)
        if session.state is not _S.RUNNING:
            raise SandboxNotFound(f"sandbox {id} is not running", "connect to it first")
        session = await self.here(session)
        await self.call(self.rows.live_until, id, session.generation, seconds)
        self._changed.set()

    async def pause(self, scope: Scope | None, id: str, *, memory: bool) -> None:
        session, row = await self.find(scope, id)
        if session.state in (_S.PAUSED, _S.PAUSING):
            raise StateConflict(f"sandbox {id} is paused already", "connect to it to wake it")
        if session.state is _S.RUNNING:
            await self.here(session)
        if row.policy.get("paused_with_memory", True) is not memory:
            await self.call(self.rows.set_policy, id, {**row.policy, "paused_with_memory": memory})
        if not memory:
            await (await self.running_now(id))._link.call("kill_all")
        await self.services.pause(scope, id, memory=None if memory else False)

    async def kill(self, scope: Scope | None, id: str) -> None:
        await self.find(scope, id)
        await self.services.kill(scope, id)
        self._forget(id)

    def _forget(self, id: str) -> None:
        self._known.pop(id, None)
        for tell in self.on_end:
            tell(id)

    async def _tend(self) -> None:
        while True:
            self._changed.clear()
            wait: float | None = None
            try:
                due, wait, dead = await self.call(self.rows.tend, self.services.keeper.host, set(self._known))
                for id in dead:
                    self._forget(id)
                for row in due:
                    self._start(row.sandbox, self._expire(row))
            except SandkeepError as error:
                _log.warning("deadlines were not looked at, will be again: %s", error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_AGAIN if wait is None else min(wait, _LOOK_AGAIN)):
                    await self._changed.wait()

    def _start(self, id: str, work: Coroutine[Any, Any, None]) -> None:
        if id in self._working:
            work.close()
            return
        task = self._working[id] = asyncio.create_task(work, name=f"e2b end of {id}")
        task.add_done_callback(lambda _: self._working.pop(id))

    async def _expire(self, row: Row) -> None:
        """The end of its time: sleep or death, as its policy says. What fails is tried again; it never kills instead."""
        if not await self.call(self.rows.claim, row):
            return
        try:
            if row.policy["on_timeout"] == "pause":
                await self.pause(None, row.sandbox, memory=bool(row.policy.get("keep_memory", True)))
            else:
                await self.kill(None, row.sandbox)
        except (SandboxNotFound, StateConflict):
            _log.debug("%s: ended or asleep already", row.sandbox)
        except Exception as error:
            _log.warning("%s: its time is over, but: %s; will be tried again", row.sandbox, error)
            await self.call(self.rows.unclaim, row.sandbox, _LOOK_AGAIN)
