"""How E2B writes things down: times, files and their owners."""

from __future__ import annotations

import posixpath
import stat
from datetime import UTC, datetime
from typing import Any

METADATA = "user.e2b."
"""What an attribute of a file that is E2B's metadata begins with."""

_TYPES = {"dir": "FILE_TYPE_DIRECTORY"}


def stamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def stamp_ns(nanoseconds: int) -> str:
    seconds, rest = divmod(nanoseconds, 10**9)
    return f"{datetime.fromtimestamp(seconds, UTC).strftime('%Y-%m-%dT%H:%M:%S')}.{rest:09d}Z"


def entry_info(entry: dict[str, Any], kind: str, owner: str, group: str) -> dict[str, Any]:
    """A file of the guest's as `EntryInfo`; `kind` is the target's for a link."""
    link = entry["kind"] == "symlink"
    letter = "d" if entry["kind"] == "dir" else "L" if link else "-"
    told = {
        "name": entry["name"], "type": _TYPES.get(kind, "FILE_TYPE_FILE"), "path": entry["path"], "size": str(entry["size"]),
        "mode": entry["mode"] & 0o777, "permissions": letter + stat.filemode(entry["mode"] & 0o777)[1:],
        "owner": owner, "group": group, "modifiedTime": stamp_ns(entry["mtime_ns"]),
    }  # fmt: skip
    if link:
        above = posixpath.dirname(entry["path"])
        told |= {"symlinkTarget": posixpath.normpath(posixpath.join(above, entry["target"])), "isSymlink": True}
    if labels := {k.removeprefix(METADATA): v for k, v in entry.get("xattrs", {}).items() if k.startswith(METADATA)}:
        told["metadata"] = labels
    return told
