"""What envd serves inside E2B's sandboxes, served here on the guest: `/health`, `/files`, `/metrics`, `/envs` and the two RPC services.

Every request is let in by the sandbox's token, `/files` also by a signature. What is not running answers 502.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from sandkeep.errors import SandboxDead, SandboxElsewhere
from sandkeep.server.e2b import filesystem, processes, watching
from sandkeep.server.e2b.box import Box, Houses, asked_user, open_box
from sandkeep.server.e2b.errors import RpcError, known, rpc_error
from sandkeep.server.e2b.files import check_expiration, download, signed_with, upload
from sandkeep.server.e2b.life import Gone, Life
from sandkeep.server.e2b.metering import Meter
from sandkeep.server.e2b.routes import E2BRoute
from sandkeep.server.e2b.rpc import END, Stream, deadline_of, failure, frame, frames, keep_alive_of, parsed
from sandkeep.server.e2b.watching import Watchers
from sandkeep.sessions import Key

ENVD_PORT = 49983
router = APIRouter(route_class=E2BRoute, include_in_schema=False)
_STREAMS = {"WatchDir": watching.watch_dir, **processes.STREAMS}
_CHANGES = processes.CHANGES | filesystem.CHANGES


def life_of(request: Request) -> Life:
    life: Life = request.app.state.e2b
    return life


async def admit(request: Request, id: str, *, by_signature: bool = False) -> None:
    """The token, or a signature made with it. A sandbox that is not there says so before it asks for a token."""
    row = await life_of(request).row(id)
    if row is None:
        raise Gone(id)
    if not row.policy["secure"]:
        return
    given = request.headers.get("x-access-token")
    if given is not None and hmac.compare_digest(given.encode(), row.token.encode()):
        return
    if by_signature and "signature" in request.query_params and signed_with(request, row.token):
        check_expiration(request)
        return
    if not row.policy["auto_resume"]:
        await life_of(request).running_now(id)
    raise RpcError("unauthenticated", "this sandbox wants its access token")


async def box_of(request: Request, id: str) -> Box:
    houses: Houses = request.app.state.e2b_houses
    return await open_box(life_of(request), houses, id, asked_user(request))


def noted(request: Request, box: Box) -> None:
    """Calls that change something are audited, under the sandbox's own name: a token names nobody."""
    request.state.key = Key(box.id, "", "e2b token of", None, 0.0, None, None)


@router.get("/envd/{id}/health")
async def health(request: Request, id: str) -> Response:
    life = life_of(request)
    sandbox = await life.running(id)
    try:
        await sandbox._link.call("hello")
    except SandboxDead:
        await life.still(id)
    return Response(status_code=204)


@router.get("/envd/{id}/envs")
async def envs(request: Request, id: str) -> Response:
    await admit(request, id)
    box = await box_of(request, id)
    return JSONResponse((await box.link.call("env_get"))["env"])


@router.get("/envd/{id}/metrics")
async def metrics(request: Request, id: str) -> Response:
    await admit(request, id)
    await box_of(request, id)
    meter: Meter = request.app.state.e2b_meter
    return JSONResponse(await meter.now((await life_of(request).find(None, id))[0]))


@router.get("/envd/{id}/files")
async def read(request: Request, id: str) -> Response:
    await admit(request, id, by_signature=True)
    return await again(await box_of(request, id), lambda box: download(box, request))


@router.post("/envd/{id}/files")
async def write(request: Request, id: str) -> Response:
    await admit(request, id, by_signature=True)
    box = await box_of(request, id)
    noted(request, box)
    return await upload(box, request)


async def again(box: Box, work: Callable[[Box], Awaitable[Response]]) -> Response:
    """Do it once more if the guest hung up because the sandbox was being saved. Only for what changes nothing."""
    try:
        return await work(box)
    except SandboxDead:
        await box.again()
        return await work(box)


@router.post("/envd/{id}/process.Process/StreamInput")
async def stream_input(request: Request, id: str) -> Response:
    await admit(request, id)
    box = await box_of(request, id)
    noted(request, box)
    try:
        body = frame(await processes.stream_input(box, frames(request))) + frame({}, END)
    except Exception as error:
        body = frame({"error": rpc_error(known(error))}, END)
    return Response(body, media_type="application/connect+json")


@router.post("/envd/{id}/{service}/{method}")
async def call(request: Request, id: str, service: str, method: str) -> Response:
    await admit(request, id)
    watchers: Watchers = request.app.state.e2b_watchers
    kept = {"CreateWatcher": watchers.create, "GetWatcherEvents": watchers.events, "RemoveWatcher": watchers.remove}
    services = {"process.Process": processes.UNARY, "filesystem.Filesystem": {**filesystem.UNARY, **kept}}
    streaming = request.headers.get("content-type", "").startswith("application/connect+json")
    try:
        box = await box_of(request, id)
        if method in _CHANGES:
            noted(request, box)
        if streaming and method in _STREAMS:
            return await _stream(request, box, method)
        verb = services.get(service, {}).get(method)
        if verb is None:
            raise RpcError("unimplemented", f"there is no {service}/{method}")
        asked = parsed(await request.body())
        try:
            return JSONResponse(await verb(box, asked))
        except SandboxDead:
            await box.again()
            if method in _CHANGES:
                raise
            return JSONResponse(await verb(box, asked))
    except (Gone, SandboxElsewhere):
        raise
    except Exception as error:
        return (
            Response(frame({"error": rpc_error(known(error))}, END), media_type="application/connect+json")
            if streaming
            else failure(error)
        )


async def _stream(request: Request, box: Box, method: str) -> Response:
    asked = [message async for message in frames(request)]
    if len(asked) != 1:
        raise RpcError("invalid_argument", "one message was expected")
    seconds, verb = deadline_of(request), _STREAMS[method]
    idle = watching.KEEP_ALIVE if method == "WatchDir" else processes.KEEP_ALIVE
    return Stream(verb(box, asked[0], seconds), idle, keep_alive_of(request), None if method == "Start" else seconds)
