"""What the database's rows are to the rest of the program: frozen nouns, their checks, scopes and cursors. No I/O."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
import re
from dataclasses import dataclass
from typing import Any

from sandkeep.errors import BadArgument, Denied, SandkeepError, StoreFull, by_code, disk_full
from sandkeep.sessions.states import SessionState

AUTO_PAUSE = 600.0
PAUSED_EXPIRY = 30 * 86400.0
JSON_LIMIT = 256 << 10

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


@dataclass(frozen=True)
class Session:
    """The server's record of a sandbox; its id is the sandbox's."""

    id: str
    owner: str
    project: str | None
    metadata: dict[str, Any]
    config: dict[str, Any]
    state: SessionState
    generation: int
    host: str | None
    checkpoint: str | None
    store: str | None
    created: float
    updated: float
    last_activity: float
    auto_pause_timeout: float
    paused_expiry: float
    paused_at: float | None
    warned_at: float | None
    failures: int
    next_try: float
    last_error: dict[str, Any] | None
    removed: bool

    @property
    def error(self) -> SandkeepError | None:
        """The last failure, as it was raised."""
        if self.last_error is None:
            return None
        said = self.last_error
        return by_code(said["code"])(said["message"], said["remedy"], **said.get("details", {}))


@dataclass(frozen=True)
class Event:
    id: int
    sandbox: str
    at: float
    kind: str
    detail: dict[str, Any]


@dataclass(frozen=True)
class AuditEntry:
    id: int
    at: float
    who: str
    action: str
    sandbox: str | None
    outcome: str
    detail: dict[str, Any]


@dataclass(frozen=True)
class Server:
    host: str
    incarnation: str
    address: str | None
    started: float
    heartbeat: float
    alive: bool


@dataclass(frozen=True)
class Scope:
    """What a key may see: one user's sandboxes, or only those of one project."""

    user: str
    project: str | None = None

    def place(self, project: str | None) -> str | None:
        """The project that a new session of this scope goes to."""
        if self.project is None or project in (None, self.project):
            return self.project or project
        raise Denied(
            f"this key is for the project {self.project!r}", "use a key of the other project, or one without a project"
        )


@dataclass(frozen=True)
class Key:
    """An API key without its secret."""

    id: str
    prefix: str
    user: str
    project: str | None
    created: float
    last_used: float | None
    revoked: float | None

    @property
    def scope(self) -> Scope:
        return Scope(self.user, self.project)


@dataclass(frozen=True)
class Page:
    """Newest first; `cursor` fetches what follows, None at the end."""

    sessions: list[Session]
    cursor: str | None


def request_of(scope: Scope, key: str) -> str:
    """What a caller's own key for a create is known by: nobody else's key is the same."""
    return hashlib.sha256(json.dumps([scope.user, scope.project, key]).encode()).hexdigest()


def session_of(row: Any) -> Session:
    return Session(**{**row, "state": SessionState(row["state"])})


def error_record(error: BaseException) -> dict[str, Any]:
    """An error as the database keeps it; `Session.error` brings it back."""
    if isinstance(error, SandkeepError):
        return dict(json.loads(json.dumps(error.as_dict(), default=str), parse_constant=str))
    if disk_full(error):
        return StoreFull("the server's disk is full", "free space on the server").as_dict()
    return SandkeepError(f"{type(error).__name__}: {error}", "see the server's log").as_dict()


def check_id(value: str) -> str:
    if not isinstance(value, str) or not _ID.fullmatch(value):
        raise BadArgument("a sandbox id has 1 to 128 letters, digits, '_', '.' or '-'")
    return value


def check_name(value: str, what: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= 200 or not value.isprintable():
        raise BadArgument(f"{what} must be 1 to 200 printable characters")
    return value


def check_seconds(value: float, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise BadArgument(f"{what} must be a number of seconds, not {value!r}", "0 means never")
    return float(value)


def check_json(value: dict[str, Any], what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadArgument(f"{what} must be an object, not {type(value).__name__}")
    try:
        written = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadArgument(f"{what} is not JSON: {error}") from error
    if len(written) > JSON_LIMIT:
        raise BadArgument(f"{what} is larger than {JSON_LIMIT >> 10} KiB")
    if json.loads(written) != value:
        raise BadArgument(f"{what} would change when written as JSON", "use text keys, lists and plain values")
    return value


def make_cursor(session: Session) -> str:
    return base64.urlsafe_b64encode(json.dumps([session.created, session.id]).encode()).decode()


def read_cursor(cursor: str) -> tuple[float, str]:
    try:
        created, id = json.loads(base64.urlsafe_b64decode(cursor.encode()))
        if not isinstance(created, float) or not math.isfinite(created):
            raise ValueError("no time")
        return created, check_id(id)
    except (ValueError, TypeError, BadArgument, binascii.Error, RecursionError) as error:
        raise BadArgument("this cursor is not one of ours", "start again without a cursor") from error
