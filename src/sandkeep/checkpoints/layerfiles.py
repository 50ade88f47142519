"""Making the files, folders and special entries of a layer with few system calls. Decides nothing: it is told what to make."""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sandkeep.checkpoints.nodes import CHUNK, FIFO, HOLE, INLINE, SYMLINK, Entry
from sandkeep.checkpoints.places import reach
from sandkeep.errors import Corrupt

if TYPE_CHECKING:
    from sandkeep.checkpoints.merge import Progress

_OPEN_FILES = 128
_PAGE = 4096
_ZERO_PAGE = bytes(_PAGE)
_REPORT_EVERY = 512
_MAKE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
_CANNOT = (errno.EPERM, errno.EINVAL, errno.ENOTSUP, errno.EOVERFLOW)


class LayerFiles:
    """`files` are to be made below the folder `root`."""

    def __init__(self, root: int, files: list[tuple[bytes, Entry]], progress: Progress | None) -> None:
        self._root = root
        self._files = files
        self._progress = progress
        self._open: OrderedDict[int, int] = OrderedDict()
        self._umask = _umask()
        self._me = (os.geteuid(), os.getegid())
        self.lost: Counter[str] = Counter()
        self.given_up = False
        self.done = self.bytes = 0
        self.beside: tuple[int, int, Counter[str]] = (0, 0, Counter())  # the same of a process that makes some too

    @contextmanager
    def or_give_up(self) -> Iterator[None]:
        """Of several threads that work here: the others see in `given_up` that one has failed."""
        try:
            yield
        except BaseException:
            self.given_up = True
            raise

    def make_folders(self, paths: list[bytes]) -> None:
        """Parents first."""
        os.fchmod(self._root, 0o700)
        os.fchown(self._root, *self._me)
        for path in paths:
            with self._at(path) as (where, rest):
                os.mkdir(rest, 0o700, dir_fd=where)

    def start(self, holey: set[int]) -> None:
        """Make every file that needs no chunk, and a place for every one that needs many. The files numbered in `holey` have chunks
        of zeros that nobody will write."""
        for number, (path, entry) in enumerate(self._files):
            if entry.size <= INLINE:
                self._whole(path, entry, entry.data)
            elif entry.size <= CHUNK:
                if entry.data == HOLE:
                    self._whole(path, entry, bytes(entry.size))
            else:
                fd = self._make(path, 0o600)
                if number in holey and not entry.flag:
                    os.posix_fallocate(fd, 0, entry.size)
                else:
                    os.ftruncate(fd, entry.size)
                os.close(fd)

    def whole(self, path: bytes, entry: Entry, data: bytes) -> None:
        """A file of at most one chunk."""
        _check(path, entry, 0, data)
        self._whole(path, entry, data)

    def chunk(self, number: int, chunk: int, data: bytes) -> None:
        """A part of a larger file. One thread may write these while another makes whole ones."""
        path, entry = self._files[number]
        _check(path, entry, chunk, data)
        (_write_sparse if entry.flag else _write_at)(self._large(number, path), data, chunk * CHUNK)

    def finish(
        self, linked: dict[bytes, bytes], others: list[tuple[bytes, Entry]], folders: list[tuple[bytes, Entry]]
    ) -> None:
        """All that must come after the contents: large files' attributes, links, special entries, folders' attributes."""
        for number, (path, entry) in enumerate(self._files):
            if entry.size > CHUNK:
                self._dress(self._large(number, path), entry, made=0o600)
        self.close()
        for path, first in linked.items():
            with self._at(path) as (here, name), self._at(first) as (there, source):
                os.link(source, name, src_dir_fd=there, dst_dir_fd=here, follow_symlinks=False)
        for path, entry in sorted(others, key=lambda item: item[1].kind == SYMLINK):
            with self._at(path) as (where, rest):
                self._special(where, rest, entry)
        for path, entry in reversed(folders):
            with self._at(path) as (where, rest):
                self._folder(where, rest, entry)
        self._report(final=True)

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def notes(self) -> list[str]:
        return [f"{what} could not be set on {count} entries" for what, count in (self.lost + self.beside[2]).items()]

    @contextmanager
    def _at(self, path: bytes) -> Iterator[tuple[int, bytes]]:
        where, rest, own = reach(self._root, path)
        try:
            yield where, rest
        finally:
            if own:
                os.close(where)

    def _make(self, path: bytes, mode: int) -> int:
        where, rest, own = reach(self._root, path)
        try:
            return os.open(rest, _MAKE, mode, dir_fd=where)
        finally:
            if own:
                os.close(where)

    def _whole(self, path: bytes, entry: Entry, data: bytes) -> None:
        fd = self._make(path, entry.mode)
        try:
            if entry.flag:
                os.ftruncate(fd, entry.size)
                _write_sparse(fd, data, 0)
            elif data:
                _write_at(fd, data, 0)
            self._dress(fd, entry, made=entry.mode & ~self._umask)
        finally:
            os.close(fd)

    def _large(self, number: int, path: bytes) -> int:
        """A large file, open; of too many the one that waited longest is closed."""
        fd = self._open.get(number)
        if fd is None:
            if len(self._open) >= _OPEN_FILES:
                os.close(self._open.popitem(last=False)[1])
            with self._at(path) as (where, rest):
                fd = self._open[number] = os.open(rest, os.O_WRONLY | os.O_NOFOLLOW, dir_fd=where)
        return fd

    def _dress(self, fd: int, entry: Entry, made: int) -> None:
        if (entry.uid, entry.gid) != self._me:
            self._try("the owner", os.fchown, fd, entry.uid, entry.gid)
        if entry.mode != made or entry.mode & 0o6000:
            os.fchmod(fd, entry.mode)
        for name, value in entry.xattrs or ():
            self._try("attribute " + os.fsdecode(name), os.setxattr, fd, name, value)
        os.utime(fd, ns=(entry.mtime, entry.mtime))
        self._report(entry.size)

    def _special(self, where: int, name: bytes, entry: Entry) -> None:
        if entry.kind == SYMLINK:
            os.symlink(entry.data, name, dir_fd=where)
        elif entry.kind == FIFO:
            os.mkfifo(name, entry.mode, dir_fd=where)
        else:
            os.mknod(name, stat.S_IFCHR, 0, dir_fd=where)
            return
        if (entry.uid, entry.gid) != self._me:
            self._try("the owner", os.chown, name, entry.uid, entry.gid, dir_fd=where, follow_symlinks=False)
        if entry.kind == FIFO:
            os.chmod(name, entry.mode, dir_fd=where)
        for key, value in entry.xattrs or ():
            place = b"/proc/self/fd/%d/%b" % (where, name)
            self._try("attribute " + os.fsdecode(key), os.setxattr, place, key, value, follow_symlinks=False)
        os.utime(name, ns=(entry.mtime, entry.mtime), dir_fd=where, follow_symlinks=False)

    def _folder(self, where: int, name: bytes, entry: Entry) -> None:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=where)
        try:
            if entry.flag:
                os.setxattr(fd, "user.overlay.opaque", b"y")
            self._dress(fd, entry._replace(size=0), made=0o700)
        finally:
            os.close(fd)

    def _try(self, what: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        try:
            call(*args, **kwargs)
        except OSError as error:
            if error.errno not in _CANNOT:
                raise
            self.lost[what] += 1

    def _report(self, size: int = 0, final: bool = False) -> None:
        self.done += not final
        self.bytes += size
        if self._progress is not None and (final or self.done % _REPORT_EVERY == 0):
            self._progress("unpack", self.done + self.beside[0], self.bytes + self.beside[1])


def _check(path: bytes, entry: Entry, chunk: int, data: bytes) -> None:
    if len(data) != min(CHUNK, entry.size - chunk * CHUNK):
        raise Corrupt(f"a chunk of {os.fsdecode(path)} has a wrong size", "run verify to see which checkpoints suffer")


def _write_at(fd: int, data: bytes, at: int) -> None:
    done = os.pwrite(fd, data, at)
    while done < len(data):
        done += os.pwrite(fd, data[done:], at + done)


def _write_sparse(fd: int, data: bytes, at: int) -> None:
    """Write all but the pages of zeros."""
    if data.find(_ZERO_PAGE) < 0:
        _write_at(fd, data, at)
        return
    start = None
    for page in range(0, len(data) + _PAGE, _PAGE):
        piece = data[page : page + _PAGE]
        if piece and piece != _ZERO_PAGE[: len(piece)]:
            start = page if start is None else start
        elif start is not None:
            _write_at(fd, data[start:page], at + start)
            start = None


def _umask() -> int:
    with open("/proc/self/status", "rb") as status:
        return next(int(line.split()[1], 8) for line in status if line.startswith(b"Umask:"))
