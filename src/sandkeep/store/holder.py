"""Who holds a lease, so that others on the same host see at once that it has died. In doubt it lives, and the lease lapses by time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def here() -> dict[str, Any]:
    """This process, as no other was or will be; nothing where that can't be told."""
    try:
        return {**_host(), "pid": os.getpid(), "start": _state(os.getpid())[1]}
    except (OSError, ValueError, IndexError):
        return {}


def has_died(holder: Any) -> bool:
    try:
        pid, start = int(holder["pid"]), holder["start"]
        if pid <= 0 or any(holder[name] != value for name, value in _host().items()):
            return False
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # another user's, and there
    except (OSError, ValueError, LookupError, TypeError, OverflowError):
        return False
    try:
        state, began = _state(pid)
        return began != start or (state in "ZX" and len(os.listdir(f"/proc/{pid}/task")) <= 1)
    except (OSError, ValueError, IndexError):
        return False  # it may be hidden from this user


def _host() -> dict[str, Any]:
    """This life of this host, and the space in which its pids mean something."""
    if os.readlink("/proc/self") != str(os.getpid()):
        raise ValueError("/proc shows other pids than ours")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {"boot": boot, "pids": os.stat("/proc/self/ns/pid").st_ino}


def _state(pid: int) -> tuple[str, int]:
    """A process's state and when it started."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])
