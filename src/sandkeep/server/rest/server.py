"""/health and /metrics: open to whoever reaches the server; they name nobody."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from sandkeep.errors import SandkeepError
from sandkeep.server.auth import Use

router = APIRouter(tags=["server"])


@router.get("/health")
async def health(services: Use, response: Response) -> dict[str, Any]:
    """200 and `ok` when sandboxes can run here, the database answers and the sweeper does its work, else 503 and what is wrong."""
    troubles = {name: getattr(error, "code", type(error).__name__) for name, error in services.sweeper.troubles.items()}
    try:
        await services.db.call(services.db.now)
    except SandkeepError as error:
        troubles["database"] = error.code
    if why := await services.readiness.problem():
        troubles["runtime"] = why
    response.status_code = 503 if troubles else 200
    return {"status": "troubled" if troubles else "ok", "troubles": troubles}


@router.get("/metrics", response_class=Response)
async def metrics(request: Request, services: Use) -> Response:
    return Response(await request.app.state.figures.text(services), media_type=CONTENT_TYPE_LATEST)
