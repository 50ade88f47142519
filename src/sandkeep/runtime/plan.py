"""What the runtime needs to know to start one sandbox, checked once, here, before anything is made."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal

from sandkeep.errors import BadArgument
from sandkeep.model import Limits, Mount
from sandkeep.runtime.base import Base

_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_HOSTNAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
_OURS = ("/proc", "/sys", "/dev", "/.sandkeep")

RUN = "/.sandkeep/run"
CODE = "/.sandkeep/guest"


@dataclass(frozen=True)
class Plan:
    """One sandbox as the runtime sees it. `dir` holds bundle/, root/, run/, runtime/ and log/; see docs/design.md."""

    id: str
    dir: Path
    base: Base
    layers: list[Path]  # whole-root trees, the top one first
    upper: Path
    work: Path
    hostname: str
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    network: Literal["none", "host"] = "none"
    mounts: list[Mount] = field(default_factory=list)
    code: Path | None = None  # shown read-only at /.sandkeep/guest
    volatile: bool = False  # nothing of the top is written back until somebody syncs it: who commits a top must

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.id):
            raise BadArgument(f"{self.id!r} is not a sandbox id", "use a-z, 0-9 and '-', at most 63 characters")
        if not _HOSTNAME.fullmatch(self.hostname):
            raise BadArgument(f"{self.hostname!r} is not a host name", "use letters, digits and '-'")
        if not self.argv or any("\0" in text for text in self.argv):
            raise BadArgument("process 1 needs an argv without NUL bytes")
        for name, value in self.env.items():
            if not name or "=" in name or "\0" in name + value:
                raise BadArgument(f"{name!r} is not a variable's name, or its value holds a NUL byte")
        if self.network not in ("none", "host"):
            raise BadArgument(f"network {self.network!r} is unknown", "use 'none' or 'host'")
        check_mounts(self.mounts)


def check_mounts(mounts: list[Mount]) -> None:
    """Refuse a mount that is not plain: relative, with `..`, missing on the host, or over what the sandbox needs."""
    seen: set[str] = set()
    for mount in mounts:
        for what, path in (("host", mount.host), ("guest", mount.guest)):
            if not path.startswith("/") or "\0" in path or ".." in PurePosixPath(path).parts:
                raise BadArgument(f"mount {what} path {path!r} must be absolute and without '..'")
        guest = os.path.normpath("/" + mount.guest.lstrip("/"))
        if guest == "/" or any(guest == place or guest.startswith(place + "/") for place in _OURS):
            raise BadArgument(
                f"mount guest path {guest!r} covers what the sandbox needs", f"mount elsewhere than / {' '.join(_OURS)}"
            )
        if guest in ("/usr", "/etc", "/bin", "/sbin", "/lib", "/lib64"):
            raise BadArgument(f"mount guest path {guest!r} covers the base", "mount below it, or use another base")
        if guest in seen:
            raise BadArgument(f"two mounts at {guest!r}")
        seen.add(guest)
        if not os.path.exists(mount.host):
            raise BadArgument(f"mount host path {mount.host!r} does not exist")
