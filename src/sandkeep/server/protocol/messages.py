"""The words of the WebSocket protocol: statuses, the shapes of events, and what a client's message means. Pure.

Events have exactly the keys given here: clients compare whole objects.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

from sandkeep.errors import BadArgument

LANGUAGES = ("python", "bash")
METADATA = "websocket"
"""The key of a session's metadata under which a sandbox's options are kept."""

Event = dict[str, str]
_SNAPSHOT = re.compile(r"[A-Za-z0-9_.-]{1,80}")


class Status(StrEnum):
    ERROR = "SANDBOX_ERROR"
    CREATING = "SANDBOX_CREATING"
    RUNNING = "SANDBOX_RUNNING"
    NOT_FOUND = "SANDBOX_NOT_FOUND"
    IN_USE = "SANDBOX_IN_USE"
    CREATION_ERROR = "SANDBOX_CREATION_ERROR"
    RESTORING = "SANDBOX_RESTORING"
    RESTORE_ERROR = "SANDBOX_RESTORE_ERROR"
    PERMISSION_DENIAL_ERROR = "SANDBOX_PERMISSION_DENIAL_ERROR"
    EXECUTION_RUNNING = "SANDBOX_EXECUTION_RUNNING"
    EXECUTION_DONE = "SANDBOX_EXECUTION_DONE"
    EXECUTION_ERROR = "SANDBOX_EXECUTION_ERROR"
    EXECUTION_UNSUPPORTED_LANGUAGE_ERROR = "SANDBOX_EXECUTION_UNSUPPORTED_LANGUAGE_ERROR"
    EXECUTION_IN_PROGRESS_ERROR = "SANDBOX_EXECUTION_IN_PROGRESS_ERROR"
    EXECUTION_FORCE_KILLED = "SANDBOX_EXECUTION_FORCE_KILLED"
    EXECUTION_FORCE_KILL_ERROR = "SANDBOX_EXECUTION_FORCE_KILL_ERROR"
    STDIN_ERROR = "SANDBOX_STDIN_ERROR"
    CHECKPOINTING = "SANDBOX_CHECKPOINTING"
    CHECKPOINTED = "SANDBOX_CHECKPOINTED"
    CHECKPOINT_ERROR = "SANDBOX_CHECKPOINT_ERROR"
    FILESYSTEM_SNAPSHOT_CREATING = "SANDBOX_FILESYSTEM_SNAPSHOT_CREATING"
    FILESYSTEM_SNAPSHOT_CREATED = "SANDBOX_FILESYSTEM_SNAPSHOT_CREATED"
    FILESYSTEM_SNAPSHOT_ERROR = "SANDBOX_FILESYSTEM_SNAPSHOT_ERROR"
    DELETING = "SANDBOX_DELETING"
    DELETED = "SANDBOX_DELETED"
    KILLING = "SANDBOX_KILLING"
    KILLED = "SANDBOX_KILLED"
    KILL_ERROR = "SANDBOX_KILL_ERROR"
    LOCK_ACQUIRING = "SANDBOX_LOCK_ACQUIRING"
    LOCK_ACQUIRED = "SANDBOX_LOCK_ACQUIRED"
    LOCK_RELEASE_REQUESTED = "SANDBOX_LOCK_RELEASE_REQUESTED"
    LOCK_RENEWAL_ERROR = "SANDBOX_LOCK_RENEWAL_ERROR"
    LOCK_RELEASING = "SANDBOX_LOCK_RELEASING"
    LOCK_RELEASED = "SANDBOX_LOCK_RELEASED"


class Close:
    DONE = 1000
    REFUSED = 1011
    FATAL = 4000


class Malformed(Exception):
    """Not one JSON object in a text frame: the socket is dropped without a word."""


def status(value: Status) -> Event:
    return {"event": "status_update", "status": value.value}


def error(message: str) -> Event:
    return {"event": "error", "message": message}


def identity(id: str, token: str) -> Event:
    return {"event": "sandbox_id", "sandbox_id": id, "sandbox_token": token}


def output(stream: str, data: str) -> Event:
    return {"event": stream, "data": data}


@dataclass(frozen=True)
class Options:
    """What the first message on /create asks for."""

    idle_timeout: float = 300
    enable_checkpoint: bool = False
    enable_idle_timeout_auto_checkpoint: bool = False
    enable_sandbox_handoff: bool = False
    filesystem_snapshot_name: str | None = None
    idle_ends: bool = False
    """Whether the client itself has said when it is idle too long; nobody else's default ends what was not saved."""

    @classmethod
    def read(cls, message: dict[str, Any]) -> Options:
        """Unknown keys are left to later versions; a known one of the wrong type is refused."""
        given = {one.name: message[one.name] for one in fields(cls) if one.name in message}
        idle = given.get("idle_timeout", cls.idle_timeout)
        idle = 0 if idle is None else idle
        if isinstance(idle, bool) or not isinstance(idle, (int, float)) or not math.isfinite(idle) or idle < 0:
            raise BadArgument("idle_timeout must be a number of seconds; 0 or null means never.")
        for name, value in given.items():
            if name.startswith("enable_") and not isinstance(value, bool):
                raise BadArgument(f"{name} must be true or false.")
        snapshot = given.get("filesystem_snapshot_name")
        if snapshot is not None and not isinstance(snapshot, str):
            raise BadArgument("filesystem_snapshot_name must be a text.")
        ends = message.get("idle_ends", "idle_timeout" in message)
        return cls(
            **{**given, "idle_timeout": idle, "filesystem_snapshot_name": snapshot or None, "idle_ends": ends is True}
        )

    @property
    def sleeps(self) -> bool:
        """When idle: whoever wants checkpoints, or has not said how long it may be idle, is saved and not ended."""
        return self.enable_checkpoint or not self.idle_ends

    def check(self) -> None:
        if self.enable_sandbox_handoff and not self.enable_checkpoint:
            raise BadArgument("Sandbox handoff requires checkpointing to be enabled.")
        if self.enable_idle_timeout_auto_checkpoint and not self.enable_checkpoint:
            raise BadArgument("Idle timeout auto checkpoint requires checkpointing to be enabled.")

    def metadata(self) -> dict[str, Any]:
        return {METADATA: asdict(self)}

    @classmethod
    def of(cls, metadata: dict[str, Any]) -> Options | None:
        """The options a sandbox was made with; None if it was not made by this protocol."""
        kept = metadata.get(METADATA)
        return cls.read(kept) if isinstance(kept, dict) else None


@dataclass(frozen=True)
class Checkpoint:
    pass


@dataclass(frozen=True)
class SnapshotFilesystem:
    name: Any


@dataclass(frozen=True)
class KillProcess:
    pass


@dataclass(frozen=True)
class KillSandbox:
    pass


@dataclass(frozen=True)
class Stdin:
    data: Any


@dataclass(frozen=True)
class Reconnect:
    """`received` is our own addition: UTF-8 bytes of the current execution's output that the client has, by stream."""

    received: dict[str, int] | None


@dataclass(frozen=True)
class Execute:
    language: Any
    code: Any


Request = Checkpoint | SnapshotFilesystem | KillProcess | KillSandbox | Stdin | Reconnect | Execute


def parse(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text if text is not None else "")
    except (ValueError, RecursionError):
        raise Malformed from None
    if not isinstance(found, dict):
        raise Malformed
    return found


def request(message: dict[str, Any]) -> Request:
    """What a message after the first means; whatever it is not, it is an attempt to execute."""
    match message:
        case {"action": "checkpoint"}:
            return Checkpoint()
        case {"action": "snapshot_filesystem"}:
            return SnapshotFilesystem(message.get("name"))
        case {"action": "kill_process"}:
            return KillProcess()
        case {"action": "kill_sandbox"}:
            return KillSandbox()
        case {"event": "stdin"}:
            return Stdin(message.get("data"))
        case {"action": "reconnect"}:
            return Reconnect(_received(message.get("received")))
    return Execute(message.get("language"), message.get("code"))


def _received(value: Any) -> dict[str, int] | None:
    if not isinstance(value, dict):
        return None
    counts = {stream: value.get(stream, 0) for stream in ("stdout", "stderr")}
    fit = all(isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in counts.values())
    return counts if fit else None


def refusal(asked: Execute) -> tuple[Status, str] | None:
    """Why this can't be executed, if it can't."""
    if asked.language not in LANGUAGES:
        why = f"Unsupported language: '{asked.language}'. Supported languages are: {', '.join(LANGUAGES)}"
        return Status.EXECUTION_UNSUPPORTED_LANGUAGE_ERROR, why
    if not isinstance(asked.code, str):
        why = "Invalid message format. 'language' and 'code' fields are required. 'code' must be a text."
        return Status.EXECUTION_ERROR, why
    return None


def check_snapshot(name: str) -> None:
    if not _SNAPSHOT.fullmatch(name):
        raise BadArgument(
            f"{name!r} can't name a filesystem snapshot", "use letters, digits, '.', '_' and '-', at most 80"
        )


def snapshot_name(name: str) -> str:
    """The name of its checkpoint in the owner's store, apart from the names that the owner gives by other ways."""
    return f"websocket/{name}"
