"""/storage: objects of a client without a bucket, `Store("sandkeep://")`. Each user and project has a space of its own; what is
uploaded is checked against its SHA-256 before it is kept.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response

from sandkeep.errors import BadArgument
from sandkeep.server.auth import Caller, Use
from sandkeep.server.shapes import Body

router = APIRouter(prefix="/storage", tags=["storage"])

_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{0,18})")


class DeleteBody(Body):
    delete: list[str]


@router.get("")
async def list_(
    caller: Caller,
    services: Use,
    prefix: str = "",
    after: str = "",
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> dict[str, Any]:
    """(name, size, time) in order of name; go on with `after` while `more` is true."""
    found = await services.gateway.list(caller, prefix, after, limit + 1)
    return {"objects": found[:limit], "more": len(found) > limit}


@router.post("", status_code=204)
async def delete(caller: Caller, services: Use, body: DeleteBody) -> Response:
    await services.gateway.delete(caller, body.delete)
    return Response(status_code=204)


@router.put("/{name:path}", status_code=204)
async def put(
    caller: Caller, services: Use, request: Request, name: str, content_sha256: Annotated[str, Header()]
) -> Response:
    await services.gateway.put(caller, name, request.stream(), content_sha256)
    return Response(status_code=204)


@router.head("/{name:path}")
async def size(caller: Caller, services: Use, name: str) -> Response:
    return Response(headers={"X-Object-Size": str(await services.gateway.size(caller, name))})


@router.get("/{name:path}")
async def get(caller: Caller, services: Use, name: str, range: Annotated[str | None, Header()] = None) -> Response:
    if range is None:
        return Response(await services.gateway.get(caller, name), media_type="application/octet-stream")
    match = _RANGE.fullmatch(range)
    if not match or (match[2] and int(match[2]) < int(match[1])):
        raise BadArgument(f"{range!r} is not a range", "write bytes=first-last")
    first, last = int(match[1]), match[2]
    data = await services.gateway.get(caller, name, first, int(last) - first + 1 if last else None)
    return Response(data, 206, media_type="application/octet-stream")
