"""The protocol's HTTP calls: a sign of life, one-off code, and a plain list of sandboxes with the least one can do to them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse

from sandkeep.errors import SandboxElsewhere, SandkeepError
from sandkeep.server.auth import Use
from sandkeep.server.protocol import executing
from sandkeep.server.protocol.door import admit
from sandkeep.server.protocol.execution import Execution
from sandkeep.server.services import NewSandbox, Services
from sandkeep.sessions import Scope

router = APIRouter(tags=["websocket protocol"])
Guest = Annotated[Scope, Depends(admit)]


@router.get("/")
async def root() -> dict[str, str]:
    return {"message": "Server is running"}


@router.get("/status")
async def status() -> dict[str, str]:
    return {"status": "ok"}


@router.post("/execute", response_class=PlainTextResponse)
async def execute(guest: Guest, services: Use, request: Request, language: str = "python") -> Response:
    """The body is code; the answer what it writes, as it comes. Its sandbox lives no longer than the answer."""
    if language not in ("python", "bash"):
        return JSONResponse({"detail": f"Unsupported language: {language!r}. Supported: python, bash"}, 422)
    code = (await request.body()).decode(errors="replace")
    return StreamingResponse(_run(services, guest, language, code), media_type="text/plain; charset=utf-8")


async def _run(services: Services, scope: Scope, language: str, code: str) -> AsyncIterator[str]:
    try:
        session = await services.create(scope, NewSandbox(metadata={"purpose": "execute"}, memory=False))
        try:
            execution = Execution(services, session.id)
            await execution.start(language, code)
            async with contextlib.aclosing(execution.pieces()) as pieces:
                async for _, text in pieces:
                    yield text
            if execution.failure is not None:
                yield f"\nServer error: {execution.failure}\n"
        finally:
            await executing.remove(services, session.id)
    except SandkeepError as error:
        yield f"\nServer error: {error.told()}\n"


@router.get("/list")
async def list_(guest: Guest, services: Use) -> dict[str, str]:
    page = await services.find(guest, limit=1000)
    rows = [("ID", "STATUS", "HOST"), *((one.id, one.state.lower(), one.host or "") for one in page.sessions)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ("   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return {"containers": "\n".join(lines) + "\n"}


@router.post("/containers/{id}/suspend")
async def suspend(guest: Guest, services: Use, id: str) -> Any:
    return await _done(services.pause(guest, id), f"Container {id} suspended")


@router.post("/containers/{id}/resume")
async def resume(guest: Guest, services: Use, id: str) -> Any:
    return await _done(services.resume(guest, id), f"Container {id} resumed")


@router.delete("/containers/{id}")
async def delete(guest: Guest, services: Use, id: str) -> Any:
    return await _done(services.kill(guest, id), f"Container {id} deleted")


async def _done(work: Awaitable[Any], said: str) -> Any:
    try:
        await work
    except SandboxElsewhere:
        raise
    except SandkeepError as error:
        return JSONResponse({"detail": error.told()}, 500)
    return {"status": said}
