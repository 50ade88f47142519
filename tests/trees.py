"""For the checkpoint tests: real overlay mounts, what a tree looks like in every respect, and a store in a folder."""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sandkeep.checkpoints import records
from sandkeep.checkpoints.base import Base
from sandkeep.checkpoints.capture import Source, capture
from sandkeep.checkpoints.catalog import Store
from sandkeep.model import CheckpointInfo
from sandkeep.runtime import kernel
from sandkeep.store.objects import open_objects
from sandkeep.store.repository import Repository

BASE = {"name": "test", "fingerprint": "test-1"}


def open_repo(folder: Path, name: str = "store") -> Repository:
    return Repository.open(open_objects(folder / name), folder / f"{name}-cache")


def save(
    repo: Repository, *trees: Path, parent: str | None = None, below: Base | None = None, **how: Any
) -> CheckpointInfo:
    how = {"base": BASE, "session": {"cwd": "/"}, **how}
    return capture(repo, Source(trees, parent, below or Base()), **how)


def put(root: Path, store: Store, files: dict[str, bytes], parent: str | None = None, **how: Any) -> str:
    """Save these files, all of one time, as a checkpoint; its id."""
    tree = root / f"tree-{records.new_id()}"
    tree.mkdir()
    for name, data in files.items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        os.utime(path, ns=(10**18, 10**18))
    for folder in [tree, *(path for path in tree.rglob("*") if path.is_dir())]:
        os.utime(folder, ns=(10**18, 10**18))
    return save(store.repo, tree, parent=parent, **how).id


def fill(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    root.mkdir(exist_ok=True)
    return root


def whiteout(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mknod(path, 0o020000, 0)


@contextmanager
def quick_folder() -> Iterator[Path]:
    """A folder where many files and many syncs cost little: in memory, if the host has such a place."""
    with tempfile.TemporaryDirectory(prefix="sk-test-", dir="/dev/shm" if _memory_will_do() else None) as name:
        yield Path(name)


def _memory_will_do() -> bool:
    """Whether /dev/shm is there, has room for the largest test, and keeps user attributes."""
    try:
        room = os.statvfs("/dev/shm")
        with tempfile.NamedTemporaryFile(dir="/dev/shm") as probe:
            os.setxattr(probe.name, "user.probe", b"")
    except OSError:
        return False
    return room.f_bavail * room.f_frsize > 4 << 30 and (not room.f_files or room.f_favail > 1_000_000)


@contextmanager
def overlay(at: Path, lowers: Sequence[Path], upper: Path) -> Iterator[Path]:
    """A writable mount; `lowers` lowest first."""
    work = at / f"work-{upper.name}"
    for folder in (work, upper):
        folder.mkdir(parents=True, exist_ok=True)
    with _mounted(lowers, ("upperdir", str(upper)), ("workdir", str(work)), ("volatile", None)) as mounted:
        yield mounted


@contextmanager
def view(at: Path, lowers: Sequence[Path]) -> Iterator[Path]:
    """A mount to read."""
    empty = at / "empty"
    empty.mkdir(parents=True, exist_ok=True)
    with _mounted([empty, *lowers]) as mounted:
        yield mounted


@contextmanager
def _mounted(lowers: Sequence[Path], *more: tuple[str, str | None]) -> Iterator[Path]:
    """Attached nowhere: a mount namespace that another test makes meanwhile would copy it, and keep it."""
    stack: list[tuple[str, str | None]] = [("lowerdir+", str(lower)) for lower in reversed(lowers)]
    fd = kernel.make_mount("overlay", [("userxattr", None), *stack, *more], 0)
    try:
        yield Path(f"/proc/{os.getpid()}/fd/{fd}")
    finally:
        os.close(fd)


def looks(root: Path, raw: bool = False) -> dict[bytes, Any]:
    """Everything about everything below `root` but sockets; `raw` shows a layer's own marks too."""
    found: dict[bytes, Any] = {}
    links: dict[tuple[int, int], list[bytes]] = {}
    todo = [b""]
    top = os.fsencode(root)
    while todo:
        path = todo.pop()
        full = os.path.join(top, path)
        state = os.lstat(full)
        if stat.S_ISSOCK(state.st_mode):
            continue
        xattrs = {
            name: os.getxattr(full, name, follow_symlinks=False)
            for name in os.listxattr(full, follow_symlinks=False)
            if (name == "user.overlay.opaque" and raw) or not name.startswith("user.overlay.")
        }
        facts: list[Any] = [state.st_mode, state.st_uid, state.st_gid, xattrs]
        if stat.S_ISCHR(state.st_mode):
            facts = ["whiteout"]
        else:
            facts.append(state.st_mtime_ns)
        if stat.S_ISREG(state.st_mode):
            facts += [state.st_size, content(full)]
            if state.st_nlink > 1:
                links.setdefault((state.st_dev, state.st_ino), []).append(path)
        elif stat.S_ISLNK(state.st_mode):
            facts.append(os.readlink(full))
        elif stat.S_ISDIR(state.st_mode):
            todo += [os.path.join(path, name) for name in os.listdir(full)]
        found[path] = facts
    for paths in links.values():
        for path in paths if len(paths) > 1 else []:
            found[path].append(tuple(sorted(paths)))
    return found


def content(path: bytes) -> str:
    total = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            total.update(piece)
    return total.hexdigest()


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            sock.bind(f"/proc/self/fd/{folder}/{path.name}")
        finally:
            os.close(folder)
