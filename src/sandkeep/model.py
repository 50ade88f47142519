"""The nouns that cross module borders: plain, frozen, without behaviour beyond checking themselves."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from sandkeep.errors import BadArgument

WORKSPACE = "/home/user/workspace"
HOME = "/home/user"

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", re.IGNORECASE)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_size(text: int | str, what: str = "size") -> int:
    """Bytes from 1048576, "512m" or "1.5g" (powers of 1024)."""
    if isinstance(text, bool) or not isinstance(text, (int, str)):
        raise BadArgument(f"{what} must be a number of bytes or a text such as '512m', not {text!r}")
    if isinstance(text, int):
        value = text
    else:
        match = _SIZE.fullmatch(text.strip())
        if not match:
            raise BadArgument(f"{what} {text!r} is not a size", "write it as bytes or with k, m, g or t: '512m'")
        value = int(float(match[1]) * _UNITS[match[2].lower()])
    if value <= 0:
        raise BadArgument(f"{what} must be above zero, not {text!r}")
    return value


METADATA_BYTES = 1 << 20
_DEEPEST = 100


def check_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """A copy of what a user keeps beside a sandbox or checkpoint: only what every format gives back as it was."""
    if metadata is not None and not isinstance(metadata, Mapping):
        raise BadArgument(f"metadata must be a dict, not {type(metadata).__name__}")
    found: dict[str, Any] = _plain(dict(metadata or {}), "metadata", 0)
    if len(json.dumps(found, separators=(",", ":"))) > METADATA_BYTES:
        raise BadArgument("metadata is larger than 1 MiB", "keep large values in a file of the workspace")
    return found


def _plain(value: Any, where: str, depth: int) -> Any:
    remedy = "use texts, numbers, lists and dicts with text keys"
    if depth > _DEEPEST:
        raise BadArgument(f"metadata is nested deeper than {_DEEPEST} levels", "flatten it")
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise BadArgument(f"{_shown(where)} can't be kept as JSON: its key {key!r} is no text", remedy)
        return {
            _plain(key, where, depth): _plain(item, f"{where}.{key[:40]}", depth + 1) for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
    if isinstance(value, str):
        if value.encode(errors="ignore").decode() != value:
            raise BadArgument("metadata has characters that no text may have", "remove the lone surrogates")
        return str(value)
    if isinstance(value, int) and not isinstance(value, bool):
        if not -(1 << 63) <= value < 1 << 64:
            raise BadArgument(f"{_shown(where)} is too large an integer", "store it as text")
        return int(value)
    if value is None or isinstance(value, bool) or (isinstance(value, float) and math.isfinite(value)):
        return value
    what = f"{value} is not a number there" if isinstance(value, float) else f"it is a {type(value).__name__}"
    raise BadArgument(f"{_shown(where)} can't be kept as JSON: {what}", remedy)


def _shown(where: str) -> str:
    return where if len(where) <= 200 else f"{where[:200]}…"


class State(StrEnum):
    """A sandbox's life; docs/design.md draws the moves."""

    CREATING = "creating"
    RUNNING = "running"
    PAUSED = "paused"
    DEAD = "dead"


@dataclass(frozen=True)
class Limits:
    """What a sandbox may use; None is unlimited. A limit that the host can't enforce is refused at create."""

    memory: int | str | None = None
    cpus: float | None = None
    pids: int | None = 4096
    disk: int | str | None = None

    def __post_init__(self) -> None:
        if self.memory is not None:
            memory = parse_size(self.memory, "limits.memory")
            if memory < 32 << 20:
                raise BadArgument(
                    f"limits.memory must be at least 32m, not {self.memory!r}", "the guest and a shell need that"
                )
            object.__setattr__(self, "memory", memory)
        if self.disk is not None:
            object.__setattr__(self, "disk", parse_size(self.disk, "limits.disk"))
        if self.cpus is not None and not 0 < self.cpus <= 4096:
            raise BadArgument(f"limits.cpus must be above 0, not {self.cpus!r}")
        if self.pids is not None and self.pids < 8:
            raise BadArgument(f"limits.pids must be at least 8, not {self.pids!r}", "the guest and a shell need a few")


@dataclass(frozen=True)
class Mount:
    """A folder or file of the host shown inside. Never part of a snapshot or checkpoint."""

    host: str
    guest: str
    readonly: bool = True


@dataclass(frozen=True)
class CommandResult:
    stdout: str
    stderr: str
    exit_code: int
    duration_ms: float
    error_class: str | None = None  # TIMEOUT, KILLED, CANCELLED, NOT_FOUND, or None
    truncated: bool = False
    stdout_bytes: bytes = field(default=b"", repr=False)
    stderr_bytes: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class FileInfo:
    path: str
    name: str
    kind: Literal["file", "dir", "symlink", "fifo", "socket", "device"]
    size: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    target: str | None = None


@dataclass(frozen=True)
class FileEvent:
    """A change. `overflow`: more happened below the watched folder than could be told; look for yourself."""

    kind: Literal["created", "modified", "removed", "moved", "overflow"]
    path: str


@dataclass(frozen=True)
class ProcessInfo:
    pid: int
    argv: list[str]
    cwd: str
    running: bool
    exit_code: int | None
    started: float
    pty: bool = False
    tag: str | None = None
    background: bool = True
    ports: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class HistoryEntry:
    index: int
    command: str
    timestamp: float


@dataclass(frozen=True)
class SnapshotInfo:
    id: str
    comment: str
    timestamp: float
    layers: list[str] = field(default_factory=list)
    how: str = ""  # rotated, copied or unchanged


@dataclass(frozen=True)
class SandboxInfo:
    id: str
    state: State
    runtime: str
    base: str
    created: float
    layers: int
    cwd: str
    env: dict[str, str]
    limits: Limits
    network: str
    mounts: list[Mount] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    forked_from: str | None = None
    checkpoint: str | None = None
    notes: list[str] = field(default_factory=list)  # what the host could not give


@dataclass(frozen=True)
class CheckpointInfo:
    id: str
    hash: str
    parent_id: str | None
    tag: str | None
    comment: str | None
    timestamp: str  # ISO 8601, UTC
    size_bytes: int
    new_bytes: int
    base: str
    scope: str = "all"
    excluded: list[str] = field(default_factory=list)
    memory: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(
        default_factory=list, compare=False
    )  # of a pause: what was not kept; no part of the checkpoint


@dataclass(frozen=True)
class RestoreReport:
    """Where a restore stopped on the ladder memory, relaunched, files; and why not higher."""

    level: Literal["memory", "relaunched", "files"]
    relaunched: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    why: str = ""
