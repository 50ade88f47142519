"""/sandboxes/{id}/ports/{port}/…: HTTP and WebSocket to a server inside, also without a network, by way of the guest.

Our keys never go inside, headers that belong to one connection stay on it, and each request has a connection of its own, so
nothing of one can be taken for a part of another.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from typing import Any
from urllib.parse import parse_qsl, urlencode

import h11
from fastapi import APIRouter, Request, Response, WebSocket
from starlette.types import ASGIApp, Receive, Scope, Send
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.typing import Subprotocol

from sandkeep.errors import BadArgument, ConnectFailed
from sandkeep.sandbox import AsyncSandbox
from sandkeep.server.auth import Caller, Use
from sandkeep.server.services import Services
from sandkeep.server.sockets import Inbox, accepted, caller
from sandkeep.server.streams import Streamed
from sandkeep.sessions import Scope as Seen

router = APIRouter(tags=["ports"])

METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
ONE_HOP = {
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te", b"trailer",
    b"transfer-encoding", b"upgrade",
}  # fmt: skip
OURS = {b"x-api-key", b"host", b"content-length"}
_HANDSHAKE = re.compile(rb"sec-websocket-.*")
_HOST = re.compile(r"(\d{1,5})-(sb-[0-9a-f]{12})\.[^/]+")
_PREFIX = re.compile(rb"/sandboxes/[^/]+/ports/[^/?]+")
_CHUNK = 256 << 10
Headers = list[tuple[bytes, bytes]]


class ByHostName:
    """The middleware that makes `{port}-{id}.any.domain/path` mean `/sandboxes/{id}/ports/{port}/path`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            host = next((value for name, value in scope["headers"] if name == b"host"), b"").decode("latin-1")
            if match := _HOST.fullmatch(host):
                above = f"/sandboxes/{match[2]}/ports/{match[1]}"
                raw = scope.get("raw_path") or scope["path"].encode()
                scope = {**scope, "path": above + scope["path"], "raw_path": above.encode() + raw}
        await self._app(scope, receive, send)


def inner_headers(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """What may go inside."""
    headers = [(name.lower(), value) for name, value in headers]
    named = {word.strip().lower() for name, value in headers if name == b"connection" for word in value.split(b",")}
    keyed = b"authorization" if not any(name == b"x-api-key" for name, _ in headers) else b""
    left_out = ONE_HOP | OURS | named | {keyed}
    ours = re.compile(rb"bearer\s+sk_.*", re.IGNORECASE)
    return [(n, v) for n, v in headers if n not in left_out and not (n == b"authorization" and ours.match(v))]


def target_of(scope: Any) -> bytes:
    """The path and query as the client wrote them, without our prefix and without our key."""
    path = _PREFIX.sub(b"", scope.get("raw_path") or scope["path"].encode(), count=1).partition(b"?")[0] or b"/"
    query: bytes = scope["query_string"]
    if scope["type"] == "websocket" and b"api_key=sk_" in query:
        pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True, encoding="latin-1")
        query = urlencode(
            [(k, v) for k, v in pairs if k != "api_key" or not v.startswith("sk_")], encoding="latin-1"
        ).encode()
    return path + (b"?" + query if query else b"")


def port_of(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:6]) <= 65535:
        raise BadArgument(f"{text!r} is not a port", "from 1 to 65535")
    return int(text)


@router.api_route("/sandboxes/{id}/ports/{port}", methods=METHODS, include_in_schema=False)
@router.api_route("/sandboxes/{id}/ports/{port}/{path:path}", methods=METHODS, include_in_schema=False)
async def http(caller: Caller, services: Use, id: str, port: str, request: Request) -> Response:
    exchange = _exchange(services, caller, id, port_of(port), request)
    head = await anext(exchange)
    assert isinstance(head, h11.Response)

    async def pieces() -> AsyncIterator[bytes]:
        async for piece in exchange:
            yield bytes(piece)

    answer = Streamed(pieces(), head.status_code)
    left_out = ONE_HOP | {word.strip().lower() for n, v in head.headers if n == b"connection" for word in v.split(b",")}
    answer.raw_headers = [(name, value) for name, value in head.headers if name not in left_out]
    answer.source = exchange
    return answer


async def _exchange(services: Services, seen: Seen, id: str, port: int, request: Request) -> AsyncGenerator[Any, None]:
    """The head of the answer, then its body."""
    headers = [(b"host", b"localhost:%d" % port), *inner_headers(request.headers.raw), (b"connection", b"close")]
    body = True
    if "transfer-encoding" in request.headers:  # it outdoes a length, and only one of them goes inside
        headers.append((b"transfer-encoding", b"chunked"))
    elif "content-length" in request.headers:
        headers.append((b"content-length", request.headers["content-length"].encode()))
    else:
        body = False
    async with services.use(seen, id) as sandbox, _tunnel(sandbox, port) as (reader, writer):
        wire = h11.Connection(h11.CLIENT, max_incomplete_event_size=_CHUNK)
        try:
            asked = h11.Request(method=request.method, target=target_of(request.scope), headers=headers)
            writer.write(wire.send(asked) or b"")
        except h11.LocalProtocolError as error:
            raise BadArgument(f"this request can't be passed on: {error}") from error
        sending = asyncio.ensure_future(_send(wire, writer, request if body else None))
        try:
            while True:
                event = await _receive(wire, reader, sending)
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


async def _receive(wire: h11.Connection, reader: asyncio.StreamReader, sending: asyncio.Future[None]) -> Any:
    try:
        while (event := wire.next_event()) is h11.NEED_DATA:
            if sending.done() and (error := sending.exception()) is not None and not isinstance(error, OSError):
                raise error
            wire.receive_data(await reader.read(_CHUNK))
        return event
    except (h11.RemoteProtocolError, OSError) as error:
        raise ConnectFailed(f"the server inside did not answer in HTTP: {error}", "see what listens there") from error


async def _dial(sandbox: AsyncSandbox, port: int) -> tuple[socket.socket, bytes]:
    """A socket that leads to the port inside, and what has come from there already."""
    wire, early = await sandbox._link.tunnel(port)
    try:
        return wire._sock.dup(), early
    finally:
        wire.close()


@contextlib.asynccontextmanager
async def _tunnel(sandbox: AsyncSandbox, port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    sock, early = await _dial(sandbox, port)
    reader, writer = await asyncio.open_connection(sock=sock)
    if early:
        reader.feed_data(early)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


@router.websocket("/sandboxes/{id}/ports/{port}")
@router.websocket("/sandboxes/{id}/ports/{port}/{path:path}")
async def websocket(client: WebSocket, id: str, port: str) -> None:
    async with caller(client, id) as (services, key):
        await relay(client, services, key.scope, id, port)


async def relay(client: WebSocket, services: Services, seen: Seen | None, id: str, port: str) -> None:
    """A WebSocket to the server inside, accepted once that one accepts it, until either side ends it."""
    number = port_of(port)
    async with services.use(seen, id) as sandbox:
        sock, _ = await _dial(sandbox, number)
        headers = [
            (n.decode(), v.decode("latin-1"))
            for n, v in inner_headers(client.headers.raw)
            if not _HANDSHAKE.fullmatch(n)
        ]
        wanted = [Subprotocol(name) for name in client.scope.get("subprotocols", [])]
        try:
            inner = await connect(
                f"ws://localhost:{number}{target_of(client.scope).decode('latin-1')}", sock=sock, subprotocols=wanted or None,
                additional_headers=headers, compression=None, proxy=None, user_agent_header=None, max_size=16 << 20,
                ping_interval=None, open_timeout=60,
            )  # fmt: skip
        except InvalidStatus as error:
            sock.close()
            await client.send_denial_response(Response(bytes(error.response.body or b""), error.response.status_code))
            return
        except (InvalidHandshake, OSError, EOFError, TimeoutError) as error:
            sock.close()
            raise ConnectFailed(f"the server inside speaks no WebSocket: {error}", "see what listens there") from error
        async with inner, accepted(client, inner.subprotocol) as inbox:
            await _both(client, inbox, inner)


async def _both(client: WebSocket, inbox: Inbox, inner: ClientConnection) -> None:
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
