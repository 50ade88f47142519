"""/storage: objects of a client without a bucket, `Store("sandkeep://")`. Each user and project has a space of its own; what is
uploaded is checked against its SHA-256 before it is kept.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import re
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response

from sandkeep.errors import BadArgument, NotFound, StoreFull, TooLarge
from sandkeep.sandbox._async.bridge import blocking
from sandkeep.server.auth import Caller, Use
from sandkeep.server.problems import Damaged
from sandkeep.server.services import Services
from sandkeep.server.shapes import Body
from sandkeep.sessions import Scope
from sandkeep.store.objects import Objects

router = APIRouter(prefix="/storage", tags=["storage"])

LARGEST = 256 << 20
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


class DeleteBody(Body):
    delete: list[str]


class Quotas:
    """How much each space keeps: counted once, then followed."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._used: dict[tuple[str, str | None], int] = {}
        self._locks: dict[tuple[str, str | None], asyncio.Lock] = {}

    async def put(self, space: Scope, objects: Objects, name: str, data: bytes) -> None:
        if not self._most:
            await blocking(objects.put, name, data)
            return
        key = (space.user, space.project)
        async with self._locks.setdefault(key, asyncio.Lock()):
            if key not in self._used:
                self._used[key] = await blocking(lambda: sum(size for _, size, _ in objects.list("")))
            replaced: int | None = await blocking(objects.size, name)
            after = self._used[key] + len(data) - (replaced or 0)
            if after > self._most:
                raise StoreFull(f"this would make {after} bytes of {self._most}", "forget checkpoints and run gc")
            await blocking(objects.put, name, data)
            self._used[key] = after

    def changed(self, space: Scope) -> None:
        self._used.pop((space.user, space.project), None)


async def _objects(services: Services, caller: Scope) -> Objects:
    return await blocking(services.spaces.objects, caller.user, caller.project)


@router.get("")
async def list_(
    caller: Caller,
    services: Use,
    prefix: str = "",
    after: str = "",
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> dict[str, Any]:
    """(name, size, time) in order of name; go on with `after` while `more` is true."""
    objects = await _objects(services, caller)
    found = await blocking(lambda: list(itertools.islice(objects.list(prefix, after), limit + 1)))
    return {"objects": found[:limit], "more": len(found) > limit}


@router.post("", status_code=204)
async def delete(caller: Caller, services: Use, request: Request, body: DeleteBody) -> Response:
    objects = await _objects(services, caller)
    await blocking(objects.delete, body.delete)
    request.app.state.quotas.changed(caller)
    return Response(status_code=204)


@router.put("/{name:path}", status_code=204)
async def put(
    caller: Caller, services: Use, request: Request, name: str, content_sha256: Annotated[str, Header()]
) -> Response:
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > LARGEST:
            raise TooLarge(f"an object may have at most {LARGEST} bytes", "send smaller ones")
    if (await blocking(hashlib.sha256, data)).hexdigest() != content_sha256.lower():
        raise Damaged(f"{name} did not arrive as it was sent", "send it again")
    await request.app.state.quotas.put(caller, await _objects(services, caller), name, bytes(data))
    return Response(status_code=204)


@router.head("/{name:path}")
async def size(caller: Caller, services: Use, name: str) -> Response:
    objects = await _objects(services, caller)
    found = await blocking(objects.size, name)
    if found is None:
        raise NotFound(f"{name} is not in the store")
    return Response(headers={"X-Object-Size": str(found)})


@router.get("/{name:path}")
async def get(caller: Caller, services: Use, name: str, range: Annotated[str | None, Header()] = None) -> Response:
    objects = await _objects(services, caller)
    if range is None:
        return Response(await blocking(objects.get, name), media_type="application/octet-stream")
    match = _RANGE.fullmatch(range)
    if not match:
        raise BadArgument(f"{range!r} is not a range", "write bytes=first-last")
    first, last = int(match[1]), match[2]
    data = await blocking(objects.get, name, first, int(last) - first + 1 if last else None)
    return Response(data, 206, media_type="application/octet-stream")
