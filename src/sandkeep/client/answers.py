"""What a server's answers mean: typed errors and the library's nouns from JSON. Pure."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any, TypeVar

from sandkeep.errors import BadArgument, SandkeepError, ServerUnreachable, by_code
from sandkeep.model import Limits, RestoreReport, SandboxInfo, State

T = TypeVar("T")
JSON, STDOUT, STDERR, DATA = range(4)
KINDS = {STDOUT: "stdout", STDERR: "stderr", DATA: "data"}
END = bytes([DATA])

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_STATES = {
    "CREATING": State.CREATING, "RUNNING": State.RUNNING, "PAUSING": State.RUNNING, "PAUSED": State.PAUSED,
    "RESUMING": State.PAUSED, "ERROR": State.DEAD, "KILLED": State.DEAD,
}  # fmt: skip


def written(body: Any) -> bytes:
    """A request's JSON."""
    try:
        return json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise BadArgument(f"this can't be sent as JSON: {error}", "use texts, numbers, lists and dicts") from None


def sandbox_id(id: Any) -> str:
    """An id as a part of a path."""
    if not isinstance(id, str) or not _ID.fullmatch(id):
        raise BadArgument(f"{id!r} is not a sandbox id", "ids look like sb-0123456789ab; list() shows yours")
    return id


def error_of(told: Any, status: int | None = None) -> SandkeepError:
    if not isinstance(told, dict) or not isinstance(told.get("code"), str):
        return ServerUnreachable(
            f"the server answered with status {status} and no reason", "see that the address is a Sandkeep server's"
        )
    details = told.get("details")
    more = {str(name): value for name, value in details.items()} if isinstance(details, dict) else {}
    for name in ("message", "remedy"):
        more.pop(name, None)
    return by_code(told["code"])(str(told.get("message", "")), str(told.get("remedy", "")), **more)


def checked(status: int, body: bytes) -> Any:
    """The JSON of an answer, or the error that it is."""
    try:
        told = json.loads(body) if body else None
    except ValueError:
        told = None
    if status >= 400:
        raise error_of(told, status)
    return told


def noun(kind: type[T], fields: dict[str, Any]) -> T:
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in fields.items() if name in names})


def sandbox_info(told: dict[str, Any]) -> SandboxInfo:
    return SandboxInfo(
        id=told["id"], state=_STATES[told["state"]], runtime=told["runtime"], base=told["base"], created=told["created"],
        layers=told.get("layers", 0), cwd=told.get("cwd", ""), env=told.get("env", {}),
        limits=Limits(**{"pids": None, **told["limits"]}), network=told["network"], metadata=told["metadata"],
        forked_from=told["forked_from"], checkpoint=told["checkpoint"], notes=told.get("notes", []),
    )  # fmt: skip


def report_of(told: dict[str, Any] | None) -> RestoreReport | None:
    return None if told is None else noun(RestoreReport, told)
