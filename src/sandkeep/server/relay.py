"""A request for a sandbox that runs on another living host goes on to that host's server, and its answer comes back.

The other checks the caller's key itself, against the same database, so nothing is granted here; both write their audit rows. What
was passed on once is never passed on again: `HOP` says so. Where no address is known the answer stays 421.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response, WebSocket
from starlette.requests import HTTPConnection
from starlette.websockets import WebSocketDisconnect
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidHandshake, InvalidStatus
from websockets.typing import Subprotocol

from sandkeep.errors import SandboxElsewhere, SandkeepError, ServerUnreachable
from sandkeep.server import passing
from sandkeep.server.passing import HOP
from sandkeep.server.problems import answer, refuse
from sandkeep.server.services import Services
from sandkeep.server.sockets import Elsewhere, Left, Refused, accepted
from sandkeep.server.streams import Streamed
from sandkeep.sessions import Session, SessionState

_OPENING = 10.0
_ALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 6, socket.TCP_USER_TIMEOUT: 90_000}
"""A host that vanished without a word is noticed after a minute and a half."""


def install(app: FastAPI) -> None:
    @app.exception_handler(SandboxElsewhere)
    async def http_elsewhere(request: Request, error: SandboxElsewhere) -> Response:
        try:
            return await pass_on(request, error.details.get("host")) or answer(error)
        except SandkeepError as failed:
            return answer(failed)

    @app.exception_handler(Refused)
    async def refused(_: WebSocket, __: Refused) -> None:
        return

    @app.exception_handler(Elsewhere)
    async def websocket_elsewhere(client: WebSocket, error: Elsewhere) -> None:
        if HOP in client.headers:
            await refuse(client, error.refusal)
        else:
            await websocket(client, error.address)


async def http(request: Request, session: Session) -> Response | None:
    """The answer of the server that runs the sandbox; None if that is this one, or can't be asked."""
    if session.state is SessionState.RUNNING:
        with contextlib.suppress(ServerUnreachable):
            return await pass_on(request, session.host)
    return None


async def address_for(asked: HTTPConnection, host: str | None) -> str | None:
    """Of the server that this request may be passed on to; None if there is none, none is known, or it was passed on already."""
    services: Services = asked.app.state.services
    if host in (None, services.keeper.host) or HOP in asked.headers:
        return None
    return await services.db.call(services.keeper.hosts.address, host)


async def pass_on(request: Request, host: str | None) -> Streamed | None:
    address = await address_for(request, host)
    if address is None:
        return None
    left_out = {b"host", b"content-length"}
    kept = [(name, value) for name, value in passing.end_to_end(request.headers.raw) if name not in left_out]
    asked_of = request.headers.get("host", "localhost").encode("latin-1")
    headers = [(b"host", urlsplit(address).netloc.encode()), (HOP.encode(), asked_of), *kept]
    found = await passing.http(_dialled(address), request, _target(request, address), headers, f"of host {host}")
    found.raw_headers = [(name, value) for name, value in found.raw_headers if name != b"date"]
    return found


def _target(connection: HTTPConnection, address: str) -> bytes:
    scope = connection.scope
    path: bytes = (scope.get(passing.ASKED) or scope.get("raw_path") or scope["path"].encode()).partition(b"?")[0]
    query = b"?" + scope["query_string"] if scope["query_string"] else b""
    return urlsplit(address).path.rstrip("/").encode() + path + query


@contextlib.asynccontextmanager
async def _dialled(address: str) -> AsyncIterator[passing.Wire]:
    parts = urlsplit(address)
    tls = parts.scheme == "https"
    try:
        async with asyncio.timeout(_OPENING):
            reader, writer = await asyncio.open_connection(
                parts.hostname, parts.port or (443 if tls else 80), ssl=tls or None
            )
    except (OSError, TimeoutError) as error:
        raise _silent(address, error) from error
    try:
        _keep_alive(writer.get_extra_info("socket"))
        yield reader, writer
    finally:
        writer.transport.abort()


def _keep_alive(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _ALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _silent(address: str, error: Exception) -> ServerUnreachable:
    return ServerUnreachable(
        f"the sandbox's server at {address} does not answer: {error or type(error).__name__}",
        "try again; once it has been silent for 30 s, resume with fail_over",
    )


async def websocket(client: WebSocket, address: str) -> None:
    """A WebSocket that is not accepted yet, passed on until either side closes."""
    left_out = {b"host", b"content-length"}
    headers = [
        (name.decode(), value.decode("latin-1"))
        for name, value in passing.end_to_end(client.headers.raw)
        if name not in left_out and not passing.HANDSHAKE.fullmatch(name)
    ]
    wanted = [Subprotocol(name) for name in client.scope.get("subprotocols", [])]
    parts = urlsplit(address)
    try:
        inner = await connect(
            f"ws{parts.scheme[4:]}://{parts.netloc}{_target(client, address).decode('latin-1')}", subprotocols=wanted or None,
            additional_headers=[*headers, (HOP, client.headers.get("host", "localhost"))], compression=None, proxy=None, user_agent_header=None, max_size=34 << 20,
            ping_interval=30, ping_timeout=60, open_timeout=60,
        )  # fmt: skip
    except InvalidStatus as error:
        said = error.response
        kind = said.headers.get("content-type", "application/json")
        await client.send_denial_response(Response(bytes(said.body or b""), said.status_code, media_type=kind))
        return
    except (InvalidHandshake, OSError, EOFError, TimeoutError) as error:
        await refuse(client, _silent(address, error))
        return
    async with inner, accepted(client, inner.subprotocol) as inbox:
        with contextlib.suppress(Left, WebSocketDisconnect):
            await passing.messages(client, inbox, inner)
