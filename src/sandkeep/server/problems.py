"""Errors on the wire: one table from the library's errors to HTTP statuses, one shape for all: code, message, remedy, details."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketState

from sandkeep import errors as e
from sandkeep.errors import SandkeepError
from sandkeep.server.answers import Answer, tell

_log = logging.getLogger(__name__)

STATUS: dict[type[SandkeepError], int] = {
    e.BadArgument: 400,
    e.FileError: 400,
    e.LimitUnsupported: 400,
    e.Denied: 403,
    e.NotFound: 404,
    e.Busy: 409,
    e.SandboxPaused: 409,
    e.StateConflict: 409,
    e.FloorNotReached: 409,
    e.SandboxDead: 410,
    e.TooLarge: 413,
    e.SandboxElsewhere: 421,
    e.RateLimited: 429,
    e.RuntimeFailed: 500,
    e.Corrupt: 500,
    e.DatabaseFailed: 500,
    e.Unsupported: 501,
    e.GuestLied: 502,
    e.ConnectFailed: 502,
    e.StoreError: 502,
    e.HostGone: 503,
    e.StoreUnreachable: 503,
    e.DatabaseUnreachable: 503,
    e.ServerUnreachable: 503,
    e.StoreFull: 507,
}
CODES = {404: "NOT_FOUND", 405: "METHOD_NOT_ALLOWED", 413: "TOO_LARGE"}


class Unauthorized(e.Denied):
    """No key, or not a valid one."""


class Damaged(e.Corrupt):
    """What a client sent is damaged; the server's own data is not."""


STATUS[Unauthorized] = 401
STATUS[Damaged] = 422


def status_of(error: SandkeepError) -> int:
    if e.disk_full(error):
        return STATUS[e.StoreFull]
    return next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), 500)


def answer(error: SandkeepError) -> Answer:
    if isinstance(error, e.HostRefused):
        error = unexpected(error)
    elif error.place:
        _log.warning("%s: %s", error.code, error)
    headers = {}
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    if "retry_after" in error.details:
        headers["Retry-After"] = str(error.details["retry_after"])
    return Answer(error.as_dict(), status_of(error), headers)


def unexpected(error: Exception) -> SandkeepError:
    """What we did not foresee: told to the log in full, to the caller in one line."""
    if e.disk_full(error):
        return e.StoreFull("the server's disk is full", "free space on the server, then try again")
    _log.error("unexpected error", exc_info=error)
    return SandkeepError("the server failed unexpectedly", "see the server's log")


def install(app: FastAPI) -> None:
    @app.exception_handler(SandkeepError)
    async def ours(_: Request, error: SandkeepError) -> Answer:
        return answer(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Answer:
        return answer(
            e.BadArgument(f"the request is not valid: {said(error.errors())}", "see /docs for what is wanted")
        )

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> Answer:
        if isinstance(error.detail, dict):
            return Answer(error.detail, error.status_code, error.headers)
        code = CODES.get(error.status_code, "BAD_ARGUMENT")
        shown = {"code": code, "message": str(error.detail), "remedy": "see /docs for what there is"}
        return Answer(shown, error.status_code, error.headers)

    @app.exception_handler(ClientDisconnect)
    async def left(_: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # for the audit; nobody hears it

    @app.exception_handler(OSError)
    @app.exception_handler(Exception)
    async def other(_: Request, error: Exception) -> Answer:
        return answer(unexpected(error))


def said(problems: Any) -> str:
    """Which field and why, without the value: it may be a secret."""
    return "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in list(problems)[:5])


async def refuse(socket: WebSocket, error: SandkeepError) -> None:
    """Before a WebSocket is accepted: an ordinary HTTP answer. After: an error object, and the close code 1011 or 1008."""
    if socket.application_state is WebSocketState.CONNECTING:
        await socket.send_denial_response(answer(error))
    elif socket.application_state is WebSocketState.CONNECTED:
        await tell(socket, {"error": error.as_dict()})
        await socket.close(1011 if status_of(error) >= 500 else 1008, error.code)
