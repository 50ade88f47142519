"""/sandboxes/{id}/files: up and down, streamed; paths are resolved inside, by the guest."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Query, Request, Response

from sandkeep.errors import BadArgument
from sandkeep.sandbox._async.files import checked, file_info
from sandkeep.server.auth import Caller, Use
from sandkeep.server.services import Services
from sandkeep.server.shapes import MkdirBody, MoveBody, shown
from sandkeep.server.streams import Upload, streamed
from sandkeep.sessions import Scope

router = APIRouter(prefix="/sandboxes/{id}/files", tags=["files"])


@router.get("")
async def download(
    caller: Caller,
    services: Use,
    id: str,
    path: str,
    offset: Annotated[int, Query(ge=0)] = 0,
    length: Annotated[int | None, Query(ge=0)] = None,
) -> Response:
    """The file's bytes, streamed; `offset` and `length` choose a part."""
    headers = {"Content-Disposition": f"attachment; filename*=UTF-8''{quote(path.rpartition('/')[2])}"}
    return await streamed(_pieces(services, caller, id, path, offset, length), headers=headers)


async def _pieces(
    services: Services, caller: Scope, id: str, path: str, offset: int, length: int | None
) -> AsyncGenerator[bytes, None]:
    async with services.use(caller, id) as sandbox:
        async for piece in sandbox.files.read_stream(path, offset, length):
            yield piece


@router.put("")
async def upload(
    caller: Caller,
    services: Use,
    id: str,
    request: Request,
    path: str,
    mode: str | None = None,
    append: bool = False,
    user: str | None = None,
) -> dict[str, Any]:
    """The body becomes the file: whole or not at all. `mode` is octal. Missing folders are made."""
    fields: dict[str, Any] = {"path": checked(path), "append": append}
    if mode is not None:
        fields["mode"] = octal(mode)
    if user is not None:
        fields["user"] = user
    async with services.use(caller, id) as sandbox:
        body = Upload(request.stream())
        async with sandbox._link.stream("file_write", fields, body=body) as events:
            await body.during(_finish(events))
            return dict(shown(file_info(events.result["entry"])))


async def _finish(events: Any) -> None:
    async for _ in events:
        pass


def octal(text: str) -> int:
    try:
        value = int(text, 8)
    except ValueError:
        value = -1
    if not 0 <= value <= 0o7777:
        raise BadArgument(f"mode {text!r} is not an octal mode", "write it as 644 or 755")
    return value


@router.delete("", status_code=204)
async def remove(caller: Caller, services: Use, id: str, path: str, recursive: bool = True) -> Response:
    async with services.use(caller, id) as sandbox:
        await sandbox.files.remove(path, recursive=recursive)
    return Response(status_code=204)


@router.get("/list")
async def list_(
    caller: Caller, services: Use, id: str, path: str, depth: Annotated[int, Query(ge=1, le=1000)] = 1
) -> dict[str, Any]:
    async with services.use(caller, id) as sandbox:
        return {"files": shown(await sandbox.files.list(path, depth))}


@router.get("/stat")
async def stat(caller: Caller, services: Use, id: str, path: str) -> dict[str, Any]:
    async with services.use(caller, id) as sandbox:
        return dict(shown(await sandbox.files.stat(path)))


@router.post("/mkdir", status_code=204)
async def mkdir(caller: Caller, services: Use, id: str, body: MkdirBody) -> Response:
    async with services.use(caller, id) as sandbox:
        await sandbox.files.mkdir(body.path, parents=body.parents, mode=body.mode)
    return Response(status_code=204)


@router.post("/move", status_code=204)
async def move(caller: Caller, services: Use, id: str, body: MoveBody) -> Response:
    async with services.use(caller, id) as sandbox:
        await sandbox.files.move(body.source, body.target)
    return Response(status_code=204)
