"""The overlayfs upper format: how deletions and replaced folders look on disk. Layers, tops and unpacked checkpoints all use it.

A whiteout is a character device 0:0; an opaque folder carries `user.overlay.opaque=y` (all our mounts use `userxattr`,
so trees made with and without root are the same). Other `user.overlay.*` attributes are the kernel's own and never state;
`user.overlay.overlay.*` are those of an overlay inside the sandbox, as the kernel keeps them.
"""

from __future__ import annotations

import errno
import os
import stat

PRIVATE = "user.overlay."
NESTED = "user.overlay.overlay."
OPAQUE = "user.overlay.opaque"


def is_whiteout(info: os.stat_result) -> bool:
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == 0


def make_whiteout(name: str | bytes, dir_fd: int | None = None) -> None:
    os.mknod(name, stat.S_IFCHR | 0o000, 0, dir_fd=dir_fd)


def is_opaque(path: str | bytes | int) -> bool:
    try:
        return os.getxattr(path, OPAQUE) == b"y"
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.ENOTSUP):
            return False
        raise


def set_opaque(path: str | bytes | int) -> None:
    os.setxattr(path, OPAQUE, b"y")


def is_state(attribute: str) -> bool:
    return not attribute.startswith(PRIVATE) or attribute.startswith(NESTED)


def attributes(path: str | bytes) -> tuple[list[tuple[str, bytes]], bool]:
    """Of a folder: those that are its state, by name, and whether it is opaque."""
    names = os.listxattr(path, follow_symlinks=False)
    state = [(name, os.getxattr(path, name, follow_symlinks=False)) for name in sorted(names) if is_state(name)]
    return state, OPAQUE in names and is_opaque(path)


def copy_attributes(
    source: int | str | bytes, target: int | str | bytes, info: os.stat_result, *, follow: bool = False
) -> None:
    """Owner, mode, attributes and times of one entry, in the order in which each survives the next."""
    os.chown(target, info.st_uid, info.st_gid, **_links(target, follow))
    if not stat.S_ISLNK(info.st_mode):
        os.chmod(target, stat.S_IMODE(info.st_mode))
    for name in os.listxattr(source, **_links(source, follow)):
        if is_state(name):
            os.setxattr(target, name, os.getxattr(source, name, **_links(source, follow)), **_links(target, follow))
    os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns), follow_symlinks=isinstance(target, int) or follow)


def _links(path: int | str | bytes, follow: bool) -> dict[str, bool]:
    return {} if isinstance(path, int) else {"follow_symlinks": follow}
