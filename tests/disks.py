"""A small disk of a test's own, and filling it."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def mounted(path: Path, size: str) -> Iterator[Path]:
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@contextlib.contextmanager
def full(disk: Path) -> Iterator[None]:
    """No byte is left on it."""
    ballast = disk / "ballast"
    for piece in (1 << 20, 1 << 10):
        with open(ballast, "ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(piece))
    assert os.statvfs(disk).f_bavail == 0
    try:
        yield
    finally:
        ballast.unlink()
