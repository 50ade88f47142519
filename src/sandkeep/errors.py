"""Every error Sandkeep raises: one tree, each with a stable code, what happened, and what the reader can do.

SandkeepError
├── BadArgument            BAD_ARGUMENT            nothing was changed
│   └── AgentMismatch      AGENT_MISMATCH          the checkpoint is of another agent or workspace mode
├── NotFound               NOT_FOUND
│   ├── SandboxNotFound    SANDBOX_NOT_FOUND
│   ├── SnapshotNotFound   SNAPSHOT_NOT_FOUND
│   ├── CheckpointNotFound CHECKPOINT_NOT_FOUND
│   ├── ProcessNotFound    PROCESS_NOT_FOUND
│   └── FileMissing        FILE_NOT_FOUND
├── FileError              FILE_ERROR              the guest's errno is in the message
├── Busy                   BUSY                    another operation holds it
├── SandboxDead            SANDBOX_DEAD            the sandbox has ended, or its guest does not answer
├── SandboxPaused          SANDBOX_PAUSED
├── GuestLied              GUEST_PROTOCOL          the guest broke the protocol
│   └── NotTheGuest        NOT_THE_GUEST           somebody else answers in its place; nothing was said to it
├── RuntimeFailed          RUNTIME_FAILED          the OCI runtime said no
│   └── RuntimeMissing     RUNTIME_MISSING
├── LimitUnsupported       LIMIT_UNSUPPORTED       this host can't enforce what was asked
├── StoreError             STORE_ERROR
│   ├── StoreUnreachable   STORE_UNREACHABLE       network, time-out
│   ├── StoreDenied        STORE_DENIED            wrong keys, no permission, clock skew
│   ├── StoreMissing       STORE_MISSING           no such bucket or folder
│   ├── StoreFull          STORE_FULL              no space
│   └── Corrupt            CORRUPT                 bytes are not what their name says
├── FloorNotReached        FLOOR_NOT_REACHED       a restore would give less than was required
├── StateConflict          STATE_CONFLICT          somebody else holds or moved it
├── Denied                 DENIED                  no key, a wrong key, or a key without the right to it
│   └── EgressDenied       EGRESS_DENIED           a sandbox may not connect there
├── SandboxElsewhere       SANDBOX_ELSEWHERE       it runs on another host; details say which
│   └── HostGone           HOST_GONE               and that host has stopped answering
├── DatabaseFailed         DATABASE_FAILED         the sessions' database said no
│   └── DatabaseUnreachable DATABASE_UNREACHABLE   it does not answer; try again
├── ConnectFailed          CONNECT_FAILED          nothing inside takes connections on that port
├── TooLarge               TOO_LARGE               more than the server takes
├── RateLimited            RATE_LIMITED            too many requests; details say how long to wait
├── ServerUnreachable      SERVER_UNREACHABLE      the Sandkeep server does not answer
├── TimedOut               TIMED_OUT               what was waited for has not come; nothing was changed
├── HostRefused            HOST_REFUSED            this machine's system said no: a path, a right, space
└── Unsupported            UNSUPPORTED
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from typing import Any, ClassVar, Self


class SandkeepError(Exception):
    code: ClassVar[str] = "SANDKEEP_ERROR"

    def __init__(self, message: str, remedy: str = "", **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.details = details
        self.place = ""

    def at(self, place: object) -> Self:
        """Where on this machine it happened: for its own user and its log, never for who asks from elsewhere."""
        self.place = str(place)
        return self

    def __str__(self) -> str:
        message = f"{self.message}: {self.place}" if self.place else self.message
        return f"{message} ({self.remedy})" if self.remedy else message

    def told(self) -> str:
        """The same for who asks from elsewhere."""
        return f"{self.message} ({self.remedy})" if self.remedy else self.message

    def as_dict(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "message": self.message,
            "remedy": self.remedy,
            **({"details": self.details} if self.details else {}),
        }

    def __reduce__(self) -> Any:
        return _rebuild, (type(self), self.message, self.remedy, self.details, self.place)


def disk_full(error: BaseException) -> bool:
    """Whether the disk was full, also as a file operation inside tells it."""
    number = error.details.get("errno") if isinstance(error, SandkeepError) else getattr(error, "errno", None)
    return number in (errno.ENOSPC, errno.EDQUOT)


def _rebuild(
    kind: type[SandkeepError], message: str, remedy: str, details: dict[str, Any], place: str
) -> SandkeepError:
    return kind(message, remedy, **details).at(place)


class BadArgument(SandkeepError):
    code = "BAD_ARGUMENT"


class AgentMismatch(BadArgument):
    code = "AGENT_MISMATCH"


class NotFound(SandkeepError):
    code = "NOT_FOUND"


class SandboxNotFound(NotFound):
    code = "SANDBOX_NOT_FOUND"


class SnapshotNotFound(NotFound):
    code = "SNAPSHOT_NOT_FOUND"


class CheckpointNotFound(NotFound):
    code = "CHECKPOINT_NOT_FOUND"


class ProcessNotFound(NotFound):
    code = "PROCESS_NOT_FOUND"


class FileMissing(NotFound):
    code = "FILE_NOT_FOUND"


class FileError(SandkeepError):
    code = "FILE_ERROR"


class Busy(SandkeepError):
    code = "BUSY"


class SandboxDead(SandkeepError):
    code = "SANDBOX_DEAD"


class SandboxPaused(SandkeepError):
    code = "SANDBOX_PAUSED"


class GuestLied(SandkeepError):
    code = "GUEST_PROTOCOL"


class NotTheGuest(GuestLied):
    code = "NOT_THE_GUEST"


class RuntimeFailed(SandkeepError):
    code = "RUNTIME_FAILED"


class RuntimeMissing(RuntimeFailed):
    code = "RUNTIME_MISSING"


class LimitUnsupported(SandkeepError):
    code = "LIMIT_UNSUPPORTED"


class StoreError(SandkeepError):
    code = "STORE_ERROR"


class StoreUnreachable(StoreError):
    code = "STORE_UNREACHABLE"


class StoreDenied(StoreError):
    code = "STORE_DENIED"


class StoreMissing(StoreError):
    code = "STORE_MISSING"


class StoreFull(StoreError):
    code = "STORE_FULL"


class Corrupt(StoreError):
    code = "CORRUPT"


class FloorNotReached(SandkeepError):
    code = "FLOOR_NOT_REACHED"


class StateConflict(SandkeepError):
    code = "STATE_CONFLICT"


class Denied(SandkeepError):
    code = "DENIED"


class EgressDenied(Denied):
    code = "EGRESS_DENIED"


class SandboxElsewhere(SandkeepError):
    code = "SANDBOX_ELSEWHERE"


class HostGone(SandboxElsewhere):
    code = "HOST_GONE"


class DatabaseFailed(SandkeepError):
    code = "DATABASE_FAILED"


class DatabaseUnreachable(DatabaseFailed):
    code = "DATABASE_UNREACHABLE"


class ConnectFailed(SandkeepError):
    code = "CONNECT_FAILED"


class TooLarge(SandkeepError):
    code = "TOO_LARGE"


class RateLimited(SandkeepError):
    code = "RATE_LIMITED"


class ServerUnreachable(SandkeepError):
    code = "SERVER_UNREACHABLE"


class TimedOut(SandkeepError):
    code = "TIMED_OUT"


class HostRefused(SandkeepError):
    code = "HOST_REFUSED"


class Unsupported(SandkeepError):
    code = "UNSUPPORTED"


_MEND = {
    errno.EACCES: "check whose it is and its mode, or choose another place",
    errno.EPERM: "check whose it is and its mode, or choose another place",
    errno.EROFS: "choose a place that can be written",
    errno.ENOENT: "choose a place that exists or can be made",
    errno.ENOTDIR: "choose a folder",
    errno.EISDIR: "name a file, not a folder",
    errno.EEXIST: "choose a folder, or a place where nothing is",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "choose a place that no loop of links leads to",
    errno.EIO: "check the disk",
}


def refused(error: OSError) -> SandkeepError:
    """What this machine's system said, as one of ours."""
    message = error.strerror or str(error) or type(error).__name__
    place = ": ".join(str(path) for path in (error.filename, error.filename2) if path is not None)
    if disk_full(error):
        return StoreFull(message, "free some space; `sandkeep gc` and `sandkeep store gc` may help").at(place)
    return HostRefused(message, _MEND.get(error.errno or 0, "`sandkeep doctor` says what works here")).at(place)


@contextlib.contextmanager
def system() -> Iterator[None]:
    """Where files of this machine are touched: what its system refuses is raised as one of ours."""
    try:
        yield
    except OSError as error:
        if disk_full(error) or error.errno in _MEND:
            raise refused(error) from error
        raise


@contextlib.contextmanager
def extra(name: str) -> Iterator[None]:
    """Where a part imports what only its extra brings: without it, the line that installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "sandkeep":
            raise
        raise RuntimeMissing(f"this needs the library {error.name}", f"pip install 'sandkeep[{name}]'") from error


def by_code(code: str) -> type[SandkeepError]:
    """The class that carries this code: how an error comes back from the other side of a wire."""
    found = {
        kind.code: kind for kind in reversed(_tree(SandkeepError))
    }  # of a code that several carry: the most general
    return found.get(code, SandkeepError)


def _tree(kind: type[SandkeepError]) -> list[type[SandkeepError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in _tree(child))]
