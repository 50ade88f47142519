"""How workflow state reaches the disk: private folders, a lock per name, writes that are whole or absent.

A file is written under a temporary name (a dot before it, `.tmp` behind it), synced, renamed, and its folder synced.
Every operating system error leaves here as one of ours.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sandkeep.errors import Busy, Corrupt, StoreDenied, StoreError, StoreFull, Unsupported
from sandkeep.workflow.state import canonical, parse

FORMAT = 1
LOCK_PATIENCE = 60.0

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}


@contextlib.contextmanager
def typed_errors(what: str, place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message = f"can't {what}: {error.strerror or error}"
        if error.errno in _FULL:
            raise StoreFull(message, "free some space; everything saved before is intact").at(place) from error
        if error.errno in _DENIED:
            raise StoreDenied(message, "check the owner and mode of the folder").at(place) from error
        raise StoreError(message, "choose another folder").at(place) from error


def make_folder(folder: Path) -> None:
    """The folder and what is missing above it, each for the owner only."""
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)
        sync_folder(each.parent)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Only one holder among all threads and processes. The lock dies with its holder, however that dies."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        _wait_for(descriptor, path)
        yield
    finally:
        os.close(descriptor)


def _wait_for(descriptor: int, path: Path) -> None:
    deadline = time.monotonic() + LOCK_PATIENCE
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise Busy(
                    f"{path.name} has been locked for {LOCK_PATIENCE:.0f} s", "see which process holds it: fuser"
                )
            time.sleep(0.003)


def write_whole(path: Path, data: bytes, temporary: Path) -> None:
    """Afterwards `path` durably holds `data`; after an error or a crash, what it held before. The caller holds the lock:
    the temporary name is fixed, so that what a killed writer leaves is overwritten by the next."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        with open(os.open(temporary, flags, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_file(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with open(descriptor, "rb") as file:
        return file.read()


def seal(record: dict[str, Any]) -> bytes:
    """The record as JSON, a line for each field, with its format and the checksum of everything in it."""
    whole = {"format": FORMAT, **record}
    sealed = {**whole, "sha256": _digest(whole)}
    lines = (
        f"  {json.dumps(name)}: {json.dumps(value, ensure_ascii=False, allow_nan=False)}"
        for name, value in sealed.items()
    )
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def unseal(data: bytes, name: str) -> dict[str, Any]:
    """What `seal` was given; Corrupt if a bit of it changed, Unsupported if a newer Sandkeep wrote it."""
    try:
        record = parse(data)
        version, digest = record.get("format"), record.pop("sha256", None)
        if type(version) is int and version > FORMAT:
            raise Unsupported(f"{name} has format {version}; this Sandkeep reads up to {FORMAT}", "upgrade sandkeep")
        whole = version == FORMAT and digest == _digest(record)
    except Corrupt as error:
        raise Corrupt(f"{name}: {error.message}", error.remedy)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{name} holds what JSON can't: {error}", "load an older checkpoint")
    if not whole:
        raise Corrupt(f"{name} does not match its checksum", "load an older checkpoint")
    del record["format"]
    return record


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(canonical(record).encode()).hexdigest()
