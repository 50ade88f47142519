"""Ports of E2B's sandboxes: open to everybody who knows the address, or to who shows the traffic token. The tunnel is REST's."""

from __future__ import annotations

import hmac
from typing import Any

from fastapi import APIRouter, Request, Response, WebSocket
from fastapi.responses import JSONResponse
from starlette.requests import HTTPConnection
from starlette.websockets import WebSocketDisconnect, WebSocketState

from sandkeep.errors import ConnectFailed, Denied, SandboxDead, SandboxElsewhere
from sandkeep.server.e2b.errors import known, plain_error
from sandkeep.server.e2b.life import Gone, Life
from sandkeep.server.e2b.routes import E2BRoute, pass_on_socket
from sandkeep.server.rest import ports
from sandkeep.server.sockets import Left

router = APIRouter(route_class=E2BRoute, include_in_schema=False)
_OURS = {b"e2b-sandbox-id", b"e2b-sandbox-port", b"e2b-traffic-access-token", b"x-access-token"}


@router.api_route("/sandboxes/{id}/ports/{port}/{path:path}", methods=ports.METHODS)
async def http(request: Request, id: str, port: str) -> Response:
    try:
        life = await enter(request, id)
        inner = Request(inside(request.scope), request.receive)
        return await ports.http(None, life.services, id, port, inner)  # type: ignore[arg-type]
    except SandboxElsewhere:
        raise
    except Exception as error:
        return refusal(error, id, port)


@router.websocket("/sandboxes/{id}/ports/{port}/{path:path}")
async def websocket(client: WebSocket, id: str, port: str) -> None:
    try:
        life = await enter(client, id)
        inner = WebSocket(inside(client.scope), client.receive, client.send)
        await ports.relay(inner, life.services, None, id, port)
    except (Left, WebSocketDisconnect):
        return
    except SandboxElsewhere as error:
        await pass_on_socket(client, error)
    except Exception as error:
        answer = refusal(error, id, port)
        if client.application_state is WebSocketState.CONNECTING:
            await client.send_denial_response(answer)
        elif client.application_state is WebSocketState.CONNECTED:
            await client.close(1011)


async def enter(asked: HTTPConnection, id: str) -> Life:
    """Let in who may, and have the sandbox run if its policy allows."""
    life: Life = asked.app.state.e2b
    row = await life.row(id)
    if row is None:
        raise Gone(id)
    given = asked.headers.get("e2b-traffic-access-token", "")
    if row.traffic is not None and not hmac.compare_digest(given.encode(), row.traffic.encode()):
        raise Denied("this sandbox wants its traffic token")
    await life.running(id)
    return life


def inside(scope: Any) -> dict[str, Any]:
    """The request without what was meant for us. No key of ours comes this way, so `Authorization` is for the server inside."""
    headers = [(name, value) for name, value in scope["headers"] if name not in _OURS]
    return {**scope, "headers": [*headers, (b"x-api-key", b"")]}


def refusal(error: Exception, id: str, port: str) -> Response:
    if isinstance(error, ConnectFailed):
        said = "The sandbox is running but port is not open"
        return JSONResponse({"sandboxId": id, "message": said, "port": int(port), "code": 502}, 502)
    return plain_error(Gone(id) if isinstance(error, SandboxDead) else known(error))
