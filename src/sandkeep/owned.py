"""Temporaries whose owner can be told: it holds a lock on them that dies with it, and whoever finds one without removes it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

Remove = Callable[[Path], object]


def take(handle: int, path: Path) -> bool:
    """Make what was just made at `path` ours; False if somebody took it for a remain and removed it meanwhile."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except (BlockingIOError, FileNotFoundError):
        return False


@contextlib.contextmanager
def folder(prefix: str, below: Path, remove: Remove = shutil.rmtree) -> Iterator[Path]:
    """A new folder in `below`, for one block."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=below))
        with contextlib.suppress(FileNotFoundError):
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            if take(handle, path):
                break
            os.close(handle)
    try:
        yield path
    finally:
        try:
            remove(path)
        finally:
            os.close(handle)


def sweep(path: Path, remove: Remove) -> bool:
    """Remove a temporary whose owner has died."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove(path)
    except (BlockingIOError, FileNotFoundError):
        return False
    finally:
        os.close(handle)
    return True


@contextlib.contextmanager
def whole(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """A file that appears whole, or not at all: it has no name before the end, where the file system can do that."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
        sweep(left, os.unlink)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    handle, named = _nameless(path.parent, partial)
    try:
        with os.fdopen(handle, "wb") as file:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield file
            file.flush()
            if durable:
                os.fsync(handle)
            if not named:
                _name(handle, partial)
                named = True
            partial.replace(path)
            named = False
    finally:
        if named:
            with contextlib.suppress(OSError):
                partial.unlink()


def _nameless(folder: Path, otherwise: Path) -> tuple[int, bool]:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o666), False
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    return os.open(otherwise, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), True


def _name(handle: int, path: Path) -> None:
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.link(
            f"/proc/self/fd/{handle}", path.name, dst_dir_fd=folder
        )  # with a folder's descriptor it follows the link
    finally:
        os.close(folder)
