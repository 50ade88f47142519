"""A link to a guest by way of a server: `call` and `stream` as the link on the sandbox's own machine has them."""

from __future__ import annotations

import json
from typing import Any, Self

from sandkeep.client import answers
from sandkeep.client._async.io import AsyncSocket, Body
from sandkeep.client._async.server import AsyncServer
from sandkeep.errors import GuestLied, SandboxDead, SandboxElsewhere, SandkeepError, ServerUnreachable

QUICK = 300.0
MOST_IDLE = 8


class AsyncRemoteLink:
    """Sockets are kept and reused; each carries one request at a time."""

    def __init__(self, server: AsyncServer, id: str) -> None:
        self._server = server
        self._path = f"/sandboxes/{id}/link"
        self._idle: list[AsyncSocket] = []

    async def call(self, op: str, **fields: Any) -> dict[str, Any]:
        """One request, one quick answer."""
        async with self.stream(op, fields, timeout=QUICK) as events:
            async for _ in events:
                pass
            return events.result

    def stream(
        self, op: str, fields: dict[str, Any] | None = None, *, body: Body | None = None, timeout: float | None = QUICK
    ) -> AsyncRemoteExchange:
        """One request whose answer comes in pieces; `timeout` is the longest silence."""
        given = {**(fields or {}), "op": op}
        if body is not None and op == "run":
            given["stdin"] = True
        return AsyncRemoteExchange(self, given, body, timeout)

    async def close(self) -> None:
        """Let go of idle sockets; the link can be used again."""
        while (idle := self._pop()) is not None:
            await idle.close()

    def _pop(self) -> AsyncSocket | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    async def acquire(self) -> AsyncSocket:
        while (idle := self._pop()) is not None:
            if not idle.stale:
                return idle
            await idle.close()
        return await self.fresh()

    async def fresh(self) -> AsyncSocket:
        return await self._server.socket(self._path)

    async def release(self, socket: AsyncSocket) -> None:
        if len(self._idle) < MOST_IDLE:
            self._idle.append(socket)
        else:
            await socket.close()


class AsyncRemoteExchange:
    """One request under way. Iterate its events; then `result` is the answer. Leaving early lets go of the request."""

    result: dict[str, Any]

    def __init__(
        self, link: AsyncRemoteLink, request: dict[str, Any], body: Body | None, timeout: float | None
    ) -> None:
        self._link = link
        self._request = request
        self._body = body
        self._timeout = timeout
        self._socket: AsyncSocket | None = None
        self._done = False
        self._again = False  # whether it was asked once more, since the sandbox has moved

    async def __aenter__(self) -> Self:
        text = json.dumps(self._request)
        self._socket = socket = await self._link.acquire()
        try:
            await socket.send(text)
            if self._body is not None:
                socket.feed(self._body)
        except BaseException:
            await self._drop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        socket, self._socket = self._socket, None
        if socket is None:
            return
        if self._done and not socket.sending:
            await self._link.release(socket)
        else:
            await socket.drop()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[str, Any]:
        if self._done:
            raise StopAsyncIteration
        kind, value = await self._next()
        if kind != "json" or "ok" not in value:
            if kind == "json" and "error" in value:
                raise answers.error_of(value["error"])
            return kind, value
        if value.pop("ok") is not True:
            error = answers.error_of(value)
            self._done = error.code != SandboxElsewhere.code  # else this socket leads to where it was
            if self._done or self._again or self._body is not None:
                raise error
            await self._drop()
            self._again = True
            self._socket = await self._link.fresh()
            await self._socket.send(json.dumps(self._request))
            return await self.__anext__()
        self._done = True
        self.result = value
        raise StopAsyncIteration

    async def first_json(self) -> dict[str, Any]:
        """The first word of an answer that goes on."""
        async for kind, value in self:
            if kind == "json":
                found: dict[str, Any] = value
                return found
            break
        raise GuestLied(f"the server answered {self._request['op']} with something else")

    async def _next(self) -> tuple[str, Any]:
        if self._socket is None:
            raise ServerUnreachable("this request is over", "ask again")
        while True:
            sending = self._socket.sending  # then it is no silence
            try:
                message = await self._socket.receive(self._timeout)
                break
            except TimeoutError:
                if sending:
                    continue
                await self._drop()
                raise SandboxDead(
                    f"no answer to {self._request['op']} in {self._timeout:.0f} s", "kill this sandbox, or wait"
                ) from None
            except SandkeepError:
                await self._drop()
                raise
        if isinstance(message, bytes):
            return answers.KINDS[message[0]], message[1:]
        found = json.loads(message)
        if not isinstance(found, dict):
            raise GuestLied("the server sent JSON that is not an object")
        return "json", found

    async def _drop(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            await socket.drop()
