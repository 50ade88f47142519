"""The boot id that a sandbox sees: one of its own for each start of process 1, in the place of the host's.

A file of the sandbox's folder, mounted read-only over the host's in process 1's mount namespace, below `/proc`: what moves
`/proc` to another root takes it along.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from sandkeep.runtime import kernel

_PLACE = "proc/sys/kernel/random/boot_id"
_CLOSED = kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC


def show(dir: Path, pid: int) -> None:
    """A new one, to process `pid`. The calling thread has a mount namespace of its own, and is in that process's afterwards."""
    file = _write(dir)
    kernel.mount(file, file, None, kernel.MS_BIND)
    kernel.mount("none", file, None, kernel.MS_REMOUNT | kernel.MS_BIND | _CLOSED)
    tree = kernel.clone_tree(file)
    try:
        kernel.enter_mounts(pid)
        root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            place = kernel.open_beneath(root, _PLACE, os.O_PATH)
        finally:
            os.close(root)
        try:
            kernel.attach(tree, place)
        finally:
            os.close(place)
    finally:
        os.close(tree)


def _write(dir: Path) -> str:
    """Never into a file that a sandbox may still see."""
    fresh, file = dir / "bundle/boot_id.new", dir / "bundle/boot_id"
    fresh.write_text(f"{uuid.uuid4()}\n")
    fresh.chmod(0o444)
    fresh.rename(file)
    return str(file)
