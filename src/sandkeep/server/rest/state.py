"""/sandboxes/{id}/state: the whole state as one self-contained file, out and in."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request, Response

from sandkeep.errors import Corrupt
from sandkeep.sandbox._async.bridge import blocking
from sandkeep.server.auth import Caller, Use
from sandkeep.server.problems import Damaged
from sandkeep.server.services import Services
from sandkeep.server.shapes import shown
from sandkeep.server.streams import streamed
from sandkeep.sessions import Scope

router = APIRouter(prefix="/sandboxes/{id}/state", tags=["sandboxes"])
_PIECE = 256 << 10


@router.get("")
async def export(caller: Caller, services: Use, id: str) -> Response:
    return await streamed(_export(services, caller, id))


async def _export(services: Services, caller: Scope, id: str) -> AsyncGenerator[bytes, None]:
    async with services.use(caller, id) as sandbox:
        with tempfile.TemporaryFile(dir=services.settings.home) as file:
            await services.alone(id, lambda: sandbox.export_state(file))
            file.seek(0)
            while piece := await blocking(file.read, _PIECE):
                yield piece


@router.put("")
async def import_(caller: Caller, services: Use, id: str, request: Request) -> dict[str, Any]:
    """Verified whole before anything changes."""
    async with services.use(caller, id) as sandbox:
        with tempfile.TemporaryFile(dir=services.settings.home) as file:
            async for piece in request.stream():
                await blocking(file.write, piece)
            file.seek(0)
            try:
                return dict(shown(await services.alone(id, lambda: sandbox.import_state(file))))
            except Corrupt as error:
                raise Damaged(error.message, error.remedy, **error.details) from error
