"""Ports of E2B's sandboxes: open to everybody who knows the address, or to who shows the traffic token. The tunnel is REST's."""

from __future__ import annotations

import hmac
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from sandkeep.errors import ConnectFailed, SandboxDead
from sandkeep.server.e2b.errors import E2BRoute, plain
from sandkeep.server.e2b.life import Gone, Life
from sandkeep.server.rest import ports

router = APIRouter(route_class=E2BRoute, include_in_schema=False)
_OURS = {b"e2b-sandbox-id", b"e2b-sandbox-port", b"e2b-traffic-access-token", b"x-access-token"}


@router.api_route("/sandboxes/{id}/ports/{port}/{path:path}", methods=ports.METHODS)
async def http(request: Request, id: str, port: str) -> Response:
    life: Life = request.app.state.e2b
    row = await life.row(id)
    if row is None:
        raise Gone(id)
    given = request.headers.get("e2b-traffic-access-token", "")
    if row.traffic is not None and not hmac.compare_digest(given.encode(), row.traffic.encode()):
        return plain(403, "this sandbox wants its traffic token")
    await life.running(id)
    inner = Request(inside(request.scope), request.receive)
    try:
        return await ports.http(None, life.services, id, port, inner)  # type: ignore[arg-type]
    except ConnectFailed:
        shown = {
            "sandboxId": id,
            "message": "The sandbox is running but port is not open",
            "port": int(port),
            "code": 502,
        }
        return JSONResponse(shown, 502)
    except SandboxDead:
        raise Gone(id) from None


def inside(scope: Any) -> dict[str, Any]:
    """The request without what was meant for us. No key of ours comes this way, so `Authorization` is for the server inside."""
    headers = [(name, value) for name, value in scope["headers"] if name not in _OURS]
    return {**scope, "headers": [*headers, (b"x-api-key", b"")]}
