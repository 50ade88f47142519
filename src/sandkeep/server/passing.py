"""Passing an HTTP request or a WebSocket on to another server, and its answer back: in pieces, no faster than either side takes
them. Headers that belong to one connection stay on it; each request has a connection of its own, so nothing of one can be
taken for a part of another.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Any

import h11
from fastapi import Request, WebSocket
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from sandkeep.errors import BadArgument, ConnectFailed
from sandkeep.server.sockets import Inbox
from sandkeep.server.streams import Streamed

ONE_HOP = {
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te", b"trailer",
    b"transfer-encoding", b"upgrade", b"expect",
}  # fmt: skip
HOP = "x-sandkeep-hop"
"""On a request that another server of ours has passed on (`relay`): the host that the client asked."""

ASKED = "sandkeep.asked"
"""In the scope of a request whose path was changed on its way here: the path as the client wrote it."""

HANDSHAKE = re.compile(rb"sec-websocket-.*")
_CHUNK = 256 << 10
Headers = list[tuple[bytes, bytes]]
Wire = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Those that do not belong to one connection; names in lower case."""
    headers = [(name.lower(), value) for name, value in headers]
    named = {word.strip().lower() for name, value in headers if name == b"connection" for word in value.split(b",")}
    return [(name, value) for name, value in headers if name not in ONE_HOP | named]


async def http(
    there: AbstractAsyncContextManager[Wire], request: Request, target: bytes, headers: Headers, where: str
) -> Streamed:
    """The answer of the server at the other end of the wire. `headers` must have none of `ONE_HOP` and no length."""
    exchange = _exchange(there, request, target, headers, where)
    head = await anext(exchange)
    assert isinstance(head, h11.Response)

    async def pieces() -> AsyncIterator[bytes]:
        async for piece in exchange:
            yield bytes(piece)

    answer = Streamed(pieces(), head.status_code)
    answer.raw_headers = end_to_end(head.headers)
    answer.source = exchange
    return answer


async def _exchange(
    there: AbstractAsyncContextManager[Wire], request: Request, target: bytes, headers: Headers, where: str
) -> AsyncGenerator[Any, None]:
    """The head of the answer, then its body."""
    headers = [*headers, (b"connection", b"close")]
    body = True
    if "transfer-encoding" in request.headers:  # it outdoes a length, and only one of them goes on
        headers.append((b"transfer-encoding", b"chunked"))
    elif "content-length" in request.headers:
        headers.append((b"content-length", request.headers["content-length"].encode()))
    else:
        body = False
    async with there as (reader, writer):
        wire = h11.Connection(h11.CLIENT, max_incomplete_event_size=_CHUNK)
        try:
            asked = h11.Request(method=request.method, target=target, headers=headers)
            writer.write(wire.send(asked) or b"")
        except h11.LocalProtocolError as error:
            raise BadArgument(f"this request can't be passed on: {error}") from error
        sending = asyncio.ensure_future(_send(wire, writer, request if body else None))
        try:
            while True:
                event = await _receive(wire, reader, sending, where)
                if isinstance(event, h11.Response):
                    yield event
                elif isinstance(event, h11.Data):
                    yield event.data
                elif isinstance(event, (h11.EndOfMessage, h11.ConnectionClosed)):
                    return
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)


async def _send(wire: h11.Connection, writer: asyncio.StreamWriter, request: Request | None) -> None:
    if request is not None:
        async for piece in request.stream():
            if piece:
                writer.write(wire.send(h11.Data(piece)) or b"")
                await writer.drain()
    writer.write(wire.send(h11.EndOfMessage()) or b"")
    await writer.drain()


async def _receive(
    wire: h11.Connection, reader: asyncio.StreamReader, sending: asyncio.Future[None], where: str
) -> Any:
    try:
        while (event := wire.next_event()) is h11.NEED_DATA:
            if sending.done() and (error := sending.exception()) is not None and not isinstance(error, OSError):
                raise error
            wire.receive_data(await reader.read(_CHUNK))
        return event
    except (h11.RemoteProtocolError, OSError) as error:
        raise ConnectFailed(f"the server {where} did not answer in HTTP: {error}", "see what listens there") from error


async def messages(client: WebSocket, inbox: Inbox, inner: ClientConnection) -> None:
    """Both ways until one side closes; the client is told the other's close code."""

    async def inward() -> None:
        while True:
            await inner.send(await inbox.next())

    feeding = asyncio.ensure_future(inward())

    async def outward() -> None:
        async for message in inner:
            await (client.send_text(message) if isinstance(message, str) else client.send_bytes(message))

    try:
        with contextlib.suppress(ConnectionClosed):
            await inbox.during(outward())
        code = inner.close_code or 1011
        await client.close(code if code not in (1005, 1006) else 1000 if code == 1005 else 1011, inner.close_reason)
    finally:
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)
