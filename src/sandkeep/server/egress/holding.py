"""The way out of this host's sandboxes: for each that has one, the guest's request `egress` is held and its connections are served.

A sandbox's rules are in its row (`config["egress"]`; none: no way out) and read for each connection, so a change on any server holds
for the next one; connections that it refuses are cut here at once, and by other servers at their next look. What wakes is held
before its wake returns; what a snapshot, a restart or a crash let go is held again at the next look. Nothing is woken for this.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from sandkeep.errors import EgressDenied, SandkeepError
from sandkeep.sandbox import AsyncSandbox
from sandkeep.server.egress.proxy import Conversation, Sink, look_up
from sandkeep.server.egress.rules import Address, Outside, Rules, address_of, decide, denied
from sandkeep.server.hands import Hands
from sandkeep.server.settings import Settings
from sandkeep.sessions import Database, Log, Session, SessionState
from sandkeep.sessions.sessions import Sessions

PORT = 3128
_PROXY = f"http://127.0.0.1:{PORT}"
_INSIDE = "localhost,127.0.0.1,::1,0.0.0.0"
ENV = {
    "HTTP_PROXY": _PROXY, "HTTPS_PROXY": _PROXY, "http_proxy": _PROXY, "https_proxy": _PROXY, "NO_PROXY": _INSIDE, "no_proxy": _INSIDE,
    "NODE_USE_ENV_PROXY": "1",
}  # fmt: skip
MOST = 100
LOOK_UPS = 4
THREADS = 32
TOLD_AGAIN = 600.0
MOST_TOLD = 200
_READY_SECONDS = 10.0
_RETRY = (0.05, 2.0)
_S = SessionState
_HELD = frozenset({_S.CREATING, _S.RUNNING, _S.PAUSING, _S.RESUMING})
_log = logging.getLogger(__name__)


def rules_of(session: Session) -> Rules | None:
    told = session.config.get("egress")
    return None if told is None else Rules.of(told)


@dataclass(eq=False)
class Open:
    """One connection; host and addresses are known once it was allowed."""

    task: asyncio.Task[None] = field(init=False)
    host: str = ""
    addresses: list[Address] = field(default_factory=list)


class Egress:
    def __init__(self, settings: Settings, database: Database, sessions: Sessions, hands: Hands) -> None:
        self.counted: Callable[[str], None] = lambda verdict: None
        self.outside = Outside.of(settings.egress_private)
        self.host, self.hands, self.db, self.sessions = settings.host_id, hands, database, sessions
        self.log = Log(database)
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="sandkeep names")
        self._on = settings.egress
        self._interval = settings.sweep_interval
        self._ways: dict[str, Way] = {}
        self._looking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        if self._on:
            self._looking = asyncio.create_task(self._look(), name="egress")

    async def stop(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        await asyncio.gather(*(way.stop() for way in self._ways.values()))
        self.threads.shutdown(wait=False, cancel_futures=True)

    async def settle(self, session: Session, *, again: bool = False) -> None:
        """Hold, or no longer hold, the way out of a sandbox that runs here. `again`: its session was replaced."""
        rules = rules_of(session) if self._on else None
        way = self._ways.get(session.id)
        if rules is None:
            if way is not None:
                await way.stop()
            if way is not None or "from_checkpoint" in session.config:
                await self._forget_env(session)
            return
        if way is not None and again:
            await way.stop()
            way = self._ways.get(session.id)
        if way is None or way.ended:
            way = self._ways[session.id] = Way(self, session)
            way.task.add_done_callback(lambda _: self._ended(session.id))
        else:
            way.cut(rules)
        await way.ready()

    def _ended(self, id: str) -> None:
        if (way := self._ways.get(id)) is not None and way.ended:
            del self._ways[id]

    async def _forget_env(self, session: Session) -> None:
        """A checkpoint of one that had a way out names ours."""
        try:
            link = (await self.hands.handle(session))._link
            env = (await link.call("env_get"))["env"]
            if stale := [name for name, value in ENV.items() if env.get(name) == value]:
                await link.call("env_unset", names=stale)
        except SandkeepError as error:
            _log.debug("%s: its proxy variables stay: %s", session.id, error)

    async def _look(self) -> None:
        while True:
            try:
                here = await self.db.call(self.sessions.at, self.host, frozenset({_S.RUNNING}))
                wanted = [one for one in here if one.config.get("egress") is not None or one.id in self._ways]
                await asyncio.gather(*map(self.settle, wanted))
            except SandkeepError as error:
                _log.warning("the ways out were not looked at, will be again: %s", error)
            await asyncio.sleep(self._interval)


class Way:
    """One sandbox's."""

    def __init__(self, egress: Egress, session: Session) -> None:
        self._egress = egress
        self._id, self._owner = session.id, session.owner
        self._open: set[Open] = set()
        self._slots = asyncio.Semaphore(MOST)
        self._look_ups = asyncio.Semaphore(LOOK_UPS)
        self._held = asyncio.Event()
        self._told: dict[tuple[str, int, str], float] = {}
        self._touched = 0.0
        self._touching: asyncio.Task[Any] | None = None
        self.task = asyncio.create_task(self._hold(session), name=f"egress of {session.id}")

    @property
    def ended(self) -> bool:
        return self.task.done()

    async def ready(self) -> None:
        """Once the guest listens, or it is not worth waiting any longer."""
        waiting = asyncio.create_task(self._held.wait())
        await asyncio.wait({waiting, self.task}, timeout=_READY_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    def cut(self, rules: Rules) -> None:
        """End what the rules no longer allow."""
        for one in self._open:
            if one.host:
                try:
                    decide(rules, self._egress.outside, one.host, one.addresses)
                except EgressDenied:
                    one.task.cancel()

    async def _hold(self, session: Session) -> None:
        delay, most = _RETRY
        try:
            while True:
                try:
                    await self._listen(await self._egress.hands.handle(session))
                except SandkeepError as error:
                    _log.debug("%s: its way out is not held: %s", self._id, error)
                if self._held.is_set():
                    self._held.clear()
                    delay = _RETRY[0]
                await asyncio.sleep(delay)
                delay = min(delay * 1.5, most)
                session = await self._egress.db.call(self._egress.sessions.get, self._id)
                if session.state not in _HELD or session.host != self._egress.host or rules_of(session) is None:
                    return
        except SandkeepError as error:
            _log.warning("%s: its way out is lost until the next look: %s", self._id, error)
        finally:
            await self._close()

    async def _close(self) -> None:
        for one in self._open:
            one.task.cancel()
        await asyncio.gather(*(one.task for one in self._open), return_exceptions=True)

    async def _listen(self, sandbox: AsyncSandbox) -> None:
        async with sandbox._link.stream("egress", {"port": PORT, "env": ENV}, timeout=None) as events:
            await events.first_json()
            self._held.set()
            async for _, said in events:
                number = said.get("accepted") if isinstance(said, dict) else None
                if isinstance(number, int):
                    await self._slots.acquire()  # a guest that says more than this is not heard for now
                    self._begin(sandbox, number)

    def _begin(self, sandbox: AsyncSandbox, number: int) -> None:
        one = Open()
        one.task = asyncio.create_task(self._serve(sandbox, number, one), name=f"egress {number} of {self._id}")
        self._open.add(one)
        one.task.add_done_callback(lambda _: self._end(one))

    def _end(self, one: Open) -> None:
        self._open.discard(one)
        self._slots.release()

    async def _serve(self, sandbox: AsyncSandbox, number: int, one: Open) -> None:
        async def judge(host: str, port: int) -> list[Address]:
            one.addresses = await self._judge(host, port)
            one.host = host
            return one.addresses

        try:
            async with _taken(sandbox, number) as inside:
                await Conversation(inside, judge, self._moved).serve()
        except (SandkeepError, OSError) as error:
            _log.debug("%s: connection %d ended: %s", self._id, number, error)
        except Exception:
            _log.exception("%s: connection %d failed", self._id, number)

    async def _judge(self, host: str, port: int) -> list[Address]:
        try:
            found = await self._allowed(host)
        except SandkeepError as error:
            await self._tell(host, port, error.code)
            raise
        await self._tell(host, port, "allowed")
        return found

    async def _allowed(self, host: str) -> list[Address]:
        rules = rules_of(await self._egress.db.call(self._egress.sessions.get, self._id))
        if rules is None or (address_of(host) is None and rules.by_name(host) is False):
            raise denied(host)
        async with self._look_ups:
            found = await look_up(host, self._egress.threads)
        return decide(rules, self._egress.outside, host, found)

    async def _tell(self, host: str, port: int, verdict: str) -> None:
        """Counted always; in the audit log once in a while for each destination, since a program may try for ever."""
        self._egress.counted(verdict)
        now, what = time.monotonic(), (host, port, verdict)
        self._told = {key: when for key, when in self._told.items() if now - when < TOLD_AGAIN}
        if what in self._told or len(self._told) >= MOST_TOLD:
            return
        self._told[what] = now
        try:
            await self._egress.db.call(
                self._egress.log.audit, self._owner, "egress", verdict, self._id, host=host, port=port
            )
        except SandkeepError as error:
            _log.error("%s: an audit row was not written: %s", self._id, error)

    def _moved(self, _count: int) -> None:
        """Bytes are activity: a download keeps the sandbox awake, a silent connection does not."""
        now = time.monotonic()
        if now - self._touched >= 1:
            self._touched = now
            self._touching = asyncio.create_task(self._touch())

    async def _touch(self) -> None:
        with contextlib.suppress(SandkeepError):
            await self._egress.db.call(self._egress.sessions.touch, self._id)


class Pieces:
    """To the guest, which must know an end from a break: each piece after its length, an empty one at the end."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.drain, self.transport = writer.drain, writer.transport

    def write(self, data: bytes) -> None:
        if data:
            self._writer.writelines((len(data).to_bytes(4, "big"), data))

    def write_eof(self) -> None:
        self._writer.write(bytes(4))


@contextlib.asynccontextmanager
async def _taken(sandbox: AsyncSandbox, number: int) -> AsyncIterator[tuple[asyncio.StreamReader, Sink]]:
    """A connection that was accepted inside."""
    wire, early = await sandbox._link.raw("egress_take", number=number)
    reader, writer = await asyncio.open_connection(sock=wire.leave())
    if early:
        reader.feed_data(early)
    try:
        yield reader, Pieces(writer)
        writer.close()
        async with asyncio.timeout(_READY_SECONDS):
            await writer.wait_closed()
    except TimeoutError:
        _log.debug("%s: connection %d was closed with something unsent", sandbox.id, number)
    finally:
        writer.transport.abort()
