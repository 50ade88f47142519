"""Requests to a guest. Connections are kept and reused; each carries one request at a time, so threads never share one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from sandkeep.errors import Busy, GuestLied, SandboxDead, SandkeepError
from sandkeep.runtime.link import door, protocol
from sandkeep.runtime.link._async.io import AsyncWire, Body, aside, decoded, sleep, turn
from sandkeep.runtime.link.protocol import QUICK, Host

MOST_IDLE = 8
A_TURN = 256  # events that one request takes before others have their turn


class AsyncLink:
    def __init__(self, dir: Path, host: Host | None = None) -> None:
        """To the guest of the sandbox in this folder."""
        self._host = host
        self._dir = dir
        self.stays = False  # commands outlive this process, but not whoever waits for them
        self.ending = False  # this process ends, and nobody has stopped waiting
        self._idle: list[AsyncWire] = []

    async def call(self, op: str, **fields: Any) -> dict[str, Any]:
        """One request, one quick answer and nothing else, but that a long one goes on."""
        async with self.stream(op, fields, timeout=QUICK) as events:
            async for kind, _ in events:
                if kind == "json" and op in protocol.GOES_ON:
                    continue
                raise GuestLied(f"the guest answered {op} with {kind}", "kill this sandbox")
            return events.result

    def stream(
        self,
        op: str,
        fields: dict[str, Any] | None = None,
        *,
        body: Body | None = None,
        timeout: float | None = QUICK,
    ) -> AsyncExchange:
        """One request whose answer comes in pieces.

        `timeout` bounds silence, and what is so slow that it is meant to hold us up. A request's own time-out bounds all of it.
        """
        given = dict(fields or {})
        if body is not None and op == "run":
            given["stdin"] = True
        if op == "run" and self.stays and not given.get("background"):
            given["stays"] = True
        return AsyncExchange(self, op, given, body, timeout)

    async def look_round(self) -> None:
        """A guest that a dead process froze is thawed by whoever waits for it."""
        if self._host is not None and self._host.undone():
            await aside(self._host.mend)

    def given_up(self, op: str, seconds: float) -> SandkeepError:
        if self._host is not None and self._host.undone():
            return Busy(f"{op} was not answered in {seconds:.0f} s: another operation holds the sandbox", "try again")
        return SandboxDead(f"the guest did not answer {op} in {seconds:.0f} s", "kill this sandbox, or wait")

    async def tunnel(self, port: int, host: str = "127.0.0.1") -> tuple[AsyncWire, bytes]:
        """A raw connection to a TCP port inside, and what it has said already."""
        return await self.raw("connect", port=port, host=host)

    async def raw(self, op: str, **fields: Any) -> tuple[AsyncWire, bytes]:
        """A request after whose answer the connection is raw bytes, and those that have come already."""
        exchange = self.stream(op, fields)
        await exchange.__aenter__()
        async for _ in exchange:
            pass
        return exchange.take_over()

    async def ready(self, seconds: float, alive: Callable[[], bool]) -> dict[str, Any]:
        """Wait until the guest answers; give up early when the sandbox has ended."""
        deadline, looked = time.monotonic() + seconds, time.monotonic()
        while True:
            with contextlib.suppress(SandboxDead):
                return await self.call("hello")
            now = time.monotonic()
            if now - looked > 0.05:
                looked = now
                if not alive():
                    raise SandboxDead(
                        "the sandbox ended while it was starting", "see log/console in its folder, or `sandkeep doctor`"
                    )
            if now > deadline:
                raise SandboxDead(
                    f"the guest did not answer in {seconds:.0f} s", "see log/console in the sandbox's folder"
                )
            await sleep(0.001)

    async def close(self) -> None:
        """Let go of idle connections; the link can be used again."""
        while (idle := self._pop()) is not None:
            idle.close()

    def _pop(self) -> AsyncWire | None:
        try:
            return self._idle.pop()
        except IndexError:  # none, or another thread was faster
            return None

    async def acquire(self, timeout: float | None = QUICK) -> AsyncWire:
        await self.look_round()
        while (idle := self._pop()) is not None:
            if not idle.stale:
                return idle
            idle.close()
        try:
            return await AsyncWire.connect(self._dir, QUICK if timeout is None else timeout)
        except TimeoutError:
            raise self.given_up("a call", QUICK if timeout is None else timeout) from None
        except door.ABSENT:
            if door.foreign(self._dir):
                raise SandboxDead(
                    "the sandbox was started by another version of Sandkeep, which alone can talk to it",
                    "restore one of its snapshots or checkpoints, or kill it",
                ) from None
            if self._host is not None:
                raise self._host.absent() from None
            raise SandboxDead("the sandbox does not answer: it has ended, is paused, or is being changed") from None

    def release(self, wire: AsyncWire) -> None:
        if len(self._idle) < MOST_IDLE:
            self._idle.append(wire)
        else:
            wire.close()


class AsyncExchange:
    """One request under way. Iterate its events; then `result` is the answer. Leaving early lets go of the request."""

    result: dict[str, Any]

    def __init__(
        self, link: AsyncLink, op: str, fields: dict[str, Any], body: Body | None, timeout: float | None
    ) -> None:
        self._link = link
        self._op = op
        self._fields = fields
        self._body = body
        self._patience = protocol.patience(op, fields, timeout)
        self._reader = protocol.Reader()
        self._wire: AsyncWire | None = None
        self._done = False
        self._events = 0

    async def __aenter__(self) -> Self:
        wire = self._wire = await self._link.acquire(self._patience.seconds)
        try:
            await wire.send(protocol.request(self._op, self._fields), QUICK)
            wire.spent()
            if self._body is not None:
                wire.feed(self._body)
        except TimeoutError:
            self._drop()
            raise self._link.given_up(self._op, QUICK) from None
        except (BrokenPipeError, ConnectionResetError):
            self._drop()
            raise SandboxDead("the sandbox ended as it was asked", "look at its info()") from None
        except BaseException:
            self._drop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        wire = self._wire
        if wire is not None and self._done and self._reader.empty and not wire.sending:
            self._wire = None
            self._link.release(wire)
        else:
            self._drop()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[str, Any]:
        if self._done:
            raise StopAsyncIteration
        kind, value = await self._next()
        if kind != "done":
            return kind, value
        self._done = True
        self.result = protocol.answer(value)
        raise StopAsyncIteration

    async def first_json(self) -> dict[str, Any]:
        """The first word of an answer that goes on."""
        kind, value = await self._next()
        if kind == "done":
            self._done = True
            protocol.answer(value)
        if kind != "json":
            raise GuestLied(f"the guest answered {self._op} with {kind}")
        found: dict[str, Any] = value
        return found

    async def _next(self) -> tuple[str, Any]:
        assert self._wire is not None
        self._events += 1
        if self._events % A_TURN == 0:
            await turn()
        try:
            while (event := self._reader.next()) is None:
                data = await self._wire.receive(self._patience.tick)
                if data == b"":
                    raise SandboxDead("the sandbox ended, or was paused, while it answered", "look at its info()")
                if not self._patience.spend(*self._wire.spent()):
                    raise self._link.given_up(self._op, self._patience.seconds or 0)
                if data is None:
                    await self._link.look_round()
                else:
                    self._reader.feed(data)
            kind, said = event
            if kind != "text":
                return kind, said
            value = await decoded(said)
            if self._op in protocol.GOES_ON:
                self._patience.renew()
            return ("done" if "ok" in value else "json"), value
        except SandkeepError:
            self._drop()
            raise

    async def end(self) -> None:
        """Wait until the guest has closed this connection after its answer."""
        assert self._wire is not None
        try:
            data = await self._wire.receive(self._patience.seconds)
            if data is None:
                raise SandboxDead("the guest does not let go of its connections", "kill this sandbox")
            if data or not self._reader.empty:
                raise GuestLied(f"the guest went on after its answer to {self._op}", "kill this sandbox")
        finally:
            self._drop()

    def take_over(self) -> tuple[AsyncWire, bytes]:
        wire, self._wire = self._wire, None
        assert wire is not None
        return wire, self._reader.rest()

    def _drop(self) -> None:
        if self._wire is not None:
            if self._fields.get("stays") and not self._done and not self._link.ending:
                self._wire.say(protocol.LEAVE)
            self._wire.close()
            self._wire = None
