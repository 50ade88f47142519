"""Connect's protocol in JSON: unary calls, server streams and client streams.

A stream's frame is a flag byte, a length of four bytes and JSON; the last one has the flag 2 and holds the error, if any. A
stream whose sandbox is gone is not ended but reset: that is how clients tell a killed sandbox from a finished command.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from sandkeep.errors import SandboxDead, SandboxElsewhere
from sandkeep.server.e2b.errors import HTTP_OF, RpcError, known, rpc_error
from sandkeep.server.e2b.life import Gone

END = 2
MOST = 64 << 20
KEEP_ALIVE = 50.0
_HEAD = struct.Struct(">BI")
Message = dict[str, Any]


def frame(message: Message, flag: int = 0) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    return _HEAD.pack(flag, len(body)) + body


async def frames(request: Request) -> AsyncIterator[Message]:
    """The messages of a request's body."""
    held = bytearray()
    async for piece in request.stream():
        held += piece
        while len(held) >= _HEAD.size:
            flag, length = _HEAD.unpack_from(held)
            if flag & 1 or length > MOST:
                raise RpcError("invalid_argument", "compressed or oversized frames are not taken")
            if len(held) < _HEAD.size + length:
                break
            body = bytes(held[_HEAD.size : _HEAD.size + length])
            del held[: _HEAD.size + length]
            if not flag & END:
                yield parsed(body)


def parsed(body: bytes) -> Message:
    try:
        found = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise RpcError("invalid_argument", "the message is not a JSON object")
    return found


def part(message: Message, name: str) -> Message:
    """A message inside a message; empty if it is not there."""
    found = message.get(name)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise RpcError("invalid_argument", f"{name} is not an object")
    return found


def failure(error: Exception) -> Response:
    """A unary call's error."""
    found = known(error)
    told = rpc_error(found)
    return JSONResponse(told, HTTP_OF[told["code"]])


def deadline_of(request: Request) -> float | None:
    """Seconds that the client gives a call."""
    given = request.headers.get("connect-timeout-ms", "")
    return int(given) / 1000 if given.isascii() and given.isdigit() and 0 < int(given) <= 10**11 else None


def keep_alive_of(request: Request) -> float:
    given = request.headers.get("keepalive-ping-interval", "")
    return max(1.0, float(given)) if given.isascii() and given.isdigit() and 0 < int(given) < 3600 else KEEP_ALIVE


class Stream(Response):
    """Messages as they come, `idle` when none comes for a while, then the end."""

    def __init__(
        self, source: AsyncGenerator[Message, None], idle: Message, keep_alive: float, deadline: float | None
    ) -> None:
        super().__init__(media_type="application/connect+json")
        del self.headers["content-length"]
        self._source = source
        self._idle, self._every, self._deadline = idle, keep_alive, deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        work = asyncio.ensure_future(self._run(send))
        left = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
            if work.done() and (error := work.exception()) is not None:
                if not isinstance(error, (Gone, SandboxElsewhere)):
                    raise error
                reset(scope)
        finally:
            for task in (work, left):
                task.cancel()
            await asyncio.gather(work, left, return_exceptions=True)
            await self._source.aclose()

    async def _run(self, send: Send) -> None:
        last: Message = {}
        try:
            async with asyncio.timeout(self._deadline):
                async with contextlib.aclosing(self._pieces()) as pieces:
                    async for message in pieces:
                        await send({"type": "http.response.body", "body": frame(message), "more_body": True})
        except (Gone, SandboxElsewhere):  # ended, asleep, or awake again on another host
            raise
        except TimeoutError:
            last = {"error": {"code": "deadline_exceeded", "message": "the time of this call is over"}}
        except Exception as error:
            last = {"error": rpc_error(known(error))}
        await send({"type": "http.response.body", "body": frame(last, END), "more_body": False})

    async def _pieces(self) -> AsyncGenerator[Message, None]:
        pending: asyncio.Future[Message] | None = None
        try:
            while True:
                pending = pending or asyncio.ensure_future(anext(self._source))
                done, _ = await asyncio.wait({pending}, timeout=self._every)
                if not done:
                    yield self._idle
                    continue
                try:
                    found = pending.result()
                except StopAsyncIteration:
                    return
                pending = None
                yield found
        finally:
            if pending is not None:
                pending.cancel()
                await asyncio.gather(pending, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def reset(scope: Scope) -> None:
    """Break the client's connection with an RST, as a host that dies does."""
    transport = scope.get("e2b.transport")
    if transport is None:
        raise SandboxDead("the sandbox ended while it answered")
    sock = transport.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def transport_of(receive: Receive) -> Any:
    """uvicorn's connection behind a request: ASGI has no word for it."""
    return getattr(getattr(receive, "__self__", None), "transport", None)
