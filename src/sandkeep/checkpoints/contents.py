"""Reading what a captured file holds: its chunks on the fixed grid, its holes, its extended attributes."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

from sandkeep.checkpoints.nodes import CHUNK, DIRECT, HOLE, INLINE, SEGMENT, Add, chunk_count
from sandkeep.checkpoints.places import reach
from sandkeep.errors import StateConflict

_ZEROS = bytes(CHUNK)
_PRIVATE = ("user.overlay.", "trusted.overlay.", "security.selinux")
_NESTED = ("user.overlay.overlay.", "trusted.overlay.overlay.")  # how an overlay keeps those of an overlay inside it
_SPARSE_FROM = 16 << 10
_PART = 16  # chunks


def is_zeros(data: bytes | memoryview) -> bool:
    return not data[0] and data == (_ZEROS if len(data) == CHUNK else bytes(len(data)))


def read_small(fd: int, state: os.stat_result, add: Add) -> tuple[bytes, bool]:
    """The `data` of a file of at most one chunk, and whether it is sparse; raises if the file moved meanwhile."""
    size = state.st_size
    whole = os.read(fd, size + 1)
    if len(whole) != size:
        raise _changed()
    if size <= INLINE:
        return whole, False
    return HOLE if is_zeros(whole) else add(whole), is_sparse(state)


def is_sparse(state: os.stat_result) -> bool:
    return state.st_size >= _SPARSE_FROM and state.st_blocks * 512 < state.st_size


class LargeFile(NamedTuple):
    """A file of more than one chunk, to be read in parts by other threads."""

    root: int
    path: bytes
    state: os.stat_result

    def parts(self) -> Iterator[Callable[[Add], bytes]]:
        """Works that each store a part, and answer with its chunk ids."""
        total = chunk_count(self.state.st_size)
        for first in range(0, total, _PART):
            yield partial(self._part, first, min(first + _PART, total))

    def _part(self, first: int, last: int, add: Add) -> bytes:
        here, rest, own = reach(self.root, self.path)
        try:
            fd = os.open(rest, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=here)
        finally:
            if own:
                os.close(here)
        try:
            ids = _chunks(fd, first, last, self.state.st_size, is_sparse(self.state), add)
            if not same_state(self.state, os.fstat(fd)):
                raise _changed()
        finally:
            os.close(fd)
        return ids

    def data(self, parts: Iterable[bytes], add: Add) -> bytes:
        """The `data` of its row."""
        ids = b"".join(parts)
        if len(ids) <= 32 * DIRECT:
            return ids
        lists = (ids[at : at + 32 * SEGMENT] for at in range(0, len(ids), 32 * SEGMENT))
        return b"".join(HOLE if not any(part) else add(part) for part in lists)


def _chunks(fd: int, first: int, last: int, size: int, sparse: bool, add: Add) -> bytes:
    ids: list[bytes] = []
    number = first
    while number < last:
        if sparse:
            ahead = min(_next_data(fd, number * CHUNK, size) // CHUNK, last)
            if ahead > number:
                ids.append(HOLE * (ahead - number))
                number = ahead
                continue
        want = min(CHUNK, size - number * CHUNK)
        data = os.pread(fd, want, number * CHUNK)
        if len(data) != want:
            raise _changed()
        ids.append(HOLE if is_zeros(data) else add(data))
        number += 1
    return b"".join(ids)


def _next_data(fd: int, at: int, size: int) -> int:
    try:
        return os.lseek(fd, at, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return -(-size // CHUNK) * CHUNK


def same_state(before: os.stat_result, after: os.stat_result) -> bool:
    return (before.st_ino, before.st_size, before.st_mtime_ns, before.st_ctime_ns) == (
        after.st_ino,
        after.st_size,
        after.st_mtime_ns,
        after.st_ctime_ns,
    )


def _changed() -> StateConflict:
    return StateConflict("a file changed while it was read", "capture frozen layers only")


def read_xattrs(place: int | bytes) -> tuple[tuple[bytes, bytes], ...] | None:
    """The attributes of an open file, or of the path of a symlink, that are the sandbox's own."""
    follow = isinstance(place, int)
    try:
        names = os.listxattr(place, follow_symlinks=follow)
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            return None
        raise
    own = [name for name in names if not name.startswith(_PRIVATE) or name.startswith(_NESTED)]
    if not own:
        return None
    return tuple(sorted((os.fsencode(name), os.getxattr(place, name, follow_symlinks=follow)) for name in own))
