"""Requests to a guest. Connections are kept and reused; each carries one request at a time, so threads never share one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from sandkeep.errors import GuestLied, SandboxDead, SandkeepError
from sandkeep.runtime.link import door, protocol
from sandkeep.runtime.link._async.io import AsyncWire, Body, sleep

QUICK = 60.0
MOST_IDLE = 8


class AsyncLink:
    def __init__(self, dir: Path, absent: Callable[[], SandkeepError] | None = None) -> None:
        """To the guest of the sandbox in this folder. `absent` says why nobody answers, for those who know more than a socket tells."""
        self._absent = absent
        self._dir = dir
        self._idle: list[AsyncWire] = []

    async def call(self, op: str, **fields: Any) -> dict[str, Any]:
        """One request, one quick answer."""
        async with self.stream(op, fields, timeout=QUICK) as events:
            async for _ in events:
                pass
            return events.result

    def stream(
        self,
        op: str,
        fields: dict[str, Any] | None = None,
        *,
        body: Body | None = None,
        timeout: float | None = QUICK,
    ) -> AsyncExchange:
        """One request whose answer comes in pieces; `timeout` is the longest silence."""
        given = dict(fields or {})
        if body is not None and op == "run":
            given["stdin"] = True
        return AsyncExchange(self, op, given, body, timeout)

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
        while (idle := self._pop()) is not None:
            if not idle.stale:
                return idle
            idle.close()
        try:
            return await AsyncWire.connect(self._dir, QUICK if timeout is None else timeout)
        except TimeoutError:
            raise SandboxDead("the guest was called and did not come", "kill this sandbox, or wait") from None
        except door.ABSENT:
            if door.foreign(self._dir):
                raise SandboxDead(
                    "the sandbox was started by another version of Sandkeep, which alone can talk to it",
                    "restore one of its snapshots or checkpoints, or kill it",
                ) from None
            if self._absent is not None:
                raise self._absent() from None
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
        self._timeout = timeout
        self._reader = protocol.Reader()
        self._wire: AsyncWire | None = None
        self._done = False

    async def __aenter__(self) -> Self:
        wire = self._wire = await self._link.acquire(self._timeout)
        try:
            await wire.send(protocol.request(self._op, self._fields))
            if self._body is not None:
                wire.feed(self._body)
        except (BrokenPipeError, ConnectionResetError):
            self._drop()
            raise SandboxDead("the sandbox ended as it was asked", "look at its info()") from None
        except BaseException:
            self._drop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        wire, self._wire = self._wire, None
        if wire is None:
            return
        if self._done and self._reader.empty and not wire.sending:
            self._link.release(wire)
        else:
            wire.close()

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
        try:
            while (event := self._reader.next()) is None:
                data = await self._wire.receive(self._timeout)
                if not data:
                    raise SandboxDead("the sandbox ended, or was paused, while it answered", "look at its info()")
                self._reader.feed(data)
        except TimeoutError:
            self._drop()
            raise SandboxDead(
                f"the guest did not answer {self._op} in {self._timeout:.0f} s", "kill this sandbox, or wait"
            ) from None
        except SandkeepError:
            self._drop()
            raise
        return event

    async def end(self) -> None:
        """Wait until the guest has closed this connection after its answer."""
        assert self._wire is not None
        try:
            if await self._wire.receive(self._timeout) or not self._reader.empty:
                raise GuestLied(f"the guest went on after its answer to {self._op}", "kill this sandbox")
        except TimeoutError:
            raise SandboxDead("the guest does not let go of its connections", "kill this sandbox") from None
        finally:
            self._drop()

    def take_over(self) -> tuple[AsyncWire, bytes]:
        wire, self._wire = self._wire, None
        assert wire is not None
        return wire, self._reader.rest()

    def _drop(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None
