"""/sandboxes/{id}/ports/{port}/…: HTTP and WebSocket to a server inside, also without a network, by way of the guest.

Our keys never go inside.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator, Iterable
from typing import Any
from urllib.parse import parse_qsl, urlencode

from fastapi import APIRouter, Request, Response, WebSocket
from starlette.types import ASGIApp, Receive, Scope, Send
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidHandshake, InvalidStatus
from websockets.typing import Subprotocol

from sandkeep.errors import BadArgument, ConnectFailed
from sandkeep.sandbox import AsyncSandbox
from sandkeep.server import passing
from sandkeep.server.auth import Caller, Use
from sandkeep.server.services import Services
from sandkeep.server.sockets import accepted, caller
from sandkeep.sessions import Scope as Seen

router = APIRouter(tags=["ports"])

METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
OURS = {b"x-api-key", b"host", b"content-length", passing.HOP.encode()}
_HOST = re.compile(r"(\d{1,5})-(sb-[0-9a-f]{12})\.[^/]+")
_PREFIX = re.compile(rb"/sandboxes/[^/]+/ports/[^/?]+")


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


def inner_headers(headers: Iterable[tuple[bytes, bytes]]) -> passing.Headers:
    """What may go inside."""
    kept = passing.end_to_end(headers)
    keyed = b"authorization" if not any(name == b"x-api-key" for name, _ in kept) else b""
    left_out = OURS | {keyed}
    ours = re.compile(rb"bearer\s+sk_.*", re.IGNORECASE)
    return [(n, v) for n, v in kept if n not in left_out and not (n == b"authorization" and ours.match(v))]


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
    headers = [(b"host", b"localhost:%d" % port_of(port)), *inner_headers(request.headers.raw)]
    there = _inside(services, caller, id, port_of(port))
    return await passing.http(there, request, target_of(request.scope), headers, "inside")


@contextlib.asynccontextmanager
async def _inside(services: Services, seen: Seen, id: str, port: int) -> AsyncIterator[passing.Wire]:
    async with services.use(seen, id) as sandbox:
        sock, early = await _dial(sandbox, port)
        reader, writer = await asyncio.open_connection(sock=sock)
        if early:
            reader.feed_data(early)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()


async def _dial(sandbox: AsyncSandbox, port: int) -> tuple[socket.socket, bytes]:
    """A socket that leads to the port inside, and what has come from there already."""
    wire, early = await sandbox._link.tunnel(port)
    return wire.leave(), early


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
            if not passing.HANDSHAKE.fullmatch(n)
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
            await passing.messages(client, inbox, inner)
