"""Reaching a place below a folder by any path, however long, and never through a symlink at its end."""

from __future__ import annotations

import os

_STEP = 3900  # below PATH_MAX


def reach(root: int, path: bytes) -> tuple[int, bytes, bool]:
    """(folder descriptor, rest of the path, whether the descriptor is the caller's to close)."""
    if len(path) <= _STEP:
        return root, path or b".", False
    here, own = root, False
    while len(path) > _STEP:
        cut = path.rfind(b"/", 0, _STEP)
        below = os.open(path[:cut], os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
        if own:
            os.close(here)
        here, own, path = below, True, path[cut + 1 :]
    return here, path, own


def open_folder(root: int, path: bytes) -> int:
    """A descriptor of the folder at `path` below `root`."""
    here, rest, own = reach(root, path)
    try:
        return os.open(rest, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
    finally:
        if own:
            os.close(here)


def join(folder: bytes, name: bytes) -> bytes:
    return folder + b"/" + name if folder else name
