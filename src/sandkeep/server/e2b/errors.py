"""Our errors in E2B's words: control plane `{"code": status, "message"}`, Connect `{"code": "not_found", "message"}`."""

from __future__ import annotations

import errno
from typing import Any

from fastapi import Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from sandkeep import errors as e
from sandkeep.errors import SandkeepError
from sandkeep.server.e2b.life import Gone
from sandkeep.server.problems import Unauthorized, said, status_of, unexpected

HTTP_OF = {
    "invalid_argument": 400, "failed_precondition": 400, "unauthenticated": 401, "permission_denied": 403, "not_found": 404,
    "already_exists": 409, "resource_exhausted": 429, "internal": 500, "unimplemented": 501, "unavailable": 503,
    "deadline_exceeded": 504,
}  # fmt: skip
_CODES: dict[type[SandkeepError], str] = {
    e.BadArgument: "invalid_argument",
    Unauthorized: "unauthenticated",
    e.Denied: "permission_denied",
    e.NotFound: "not_found",
    e.TooLarge: "resource_exhausted",
    e.RateLimited: "resource_exhausted",
    e.Busy: "unavailable",
    e.SandboxDead: "unavailable",
    e.StateConflict: "unavailable",
    e.Unsupported: "unimplemented",
}
NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_ERRNOS = {
    errno.EEXIST: "already_exists", errno.EACCES: "permission_denied", errno.EPERM: "permission_denied",
    errno.ENOSPC: "resource_exhausted", errno.EDQUOT: "resource_exhausted", errno.ENOTEMPTY: "failed_precondition",
}  # fmt: skip


class RpcError(SandkeepError):
    """An error whose Connect code is known where it is raised."""

    def __init__(self, rpc: str, message: str) -> None:
        super().__init__(message)
        self.rpc = rpc


def rpc_code(error: SandkeepError) -> str:
    if isinstance(error, RpcError):
        return error.rpc
    if isinstance(error, e.FileError):
        return _ERRNOS.get(error.details.get("errno", 0), "invalid_argument")
    return next((_CODES[kind] for kind in type(error).__mro__ if kind in _CODES), "internal")


def rpc_error(error: SandkeepError) -> dict[str, Any]:
    return {"code": rpc_code(error), "message": error.told()}


def gone(error: Gone) -> Response:
    shown = {"sandboxId": error.id, "message": error.message, "code": 502}
    return JSONResponse(shown, 502, {"Should-Retry": "false"})


def plain(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """JavaScript reads the body's code, Python the status: always the same."""
    return JSONResponse({"code": status, "message": message}, status, headers)


def plain_error(error: SandkeepError) -> Response:
    if isinstance(error, Gone):
        return gone(error)
    if isinstance(error, e.FileError) and error.details.get("errno") in NO_SPACE:
        return plain(507, error.told())
    status = HTTP_OF[error.rpc] if isinstance(error, RpcError) else status_of(error)
    wait = error.details.get("retry_after")
    return plain(status, error.told(), {"Retry-After": str(wait)} if wait else None)


def known(error: Exception) -> SandkeepError:
    if isinstance(error, SandkeepError):
        return error
    if isinstance(error, RequestValidationError):
        return e.BadArgument(f"the request is not valid: {said(error.errors())}")
    if isinstance(error, HTTPException) and error.status_code == 413:
        return e.TooLarge("the request is too large")
    return unexpected(error)
