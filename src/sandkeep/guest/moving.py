"""Moving what rename(2) refuses with EXDEV: a folder that lies in a lower layer, anything that goes to another mount.

It is built beside the target under a name of its own and renamed: whole or not there. Files are linked, not copied, where both
are on one mount: so they stay the very files that they were, with all they have, and a write during the move is not lost. Then
the source is removed, but nothing in it that came or changed meanwhile.
"""

from __future__ import annotations

import errno
import os
import stat as st

from .jobs import Pulse
from .people import Acting
from .problems import BUSY, FILE_ERROR, Problem, file_problem

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator
    from typing import Dict, List, Optional, Tuple

    from .jobs import Steps
    from .main import Guest
    from .people import Person
    from .wire import Connection

_SLICE = 256
_PIECE = 4 << 20
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EINVAL)


def move(guest: Guest, conn: Connection, path: str, to: str, person: Optional[Person]) -> Steps:
    """One slice at a time, with that person's rights; stands still while somebody holds the sandbox."""
    task = _Move(path, to)
    steps = task.steps()
    guest.asides.add(task.aside)
    pulse = Pulse(conn, "moving")
    try:
        while True:
            while guest.holders:
                yield
            try:
                with Acting(person):
                    next(steps)
            except StopIteration:
                return {"ok": True}
            pulse.beat(len(task.seen))
            yield
    finally:
        with Acting(person):
            steps.close()
        guest.asides.discard(task.aside)


class _Move:
    def __init__(self, path: str, to: str) -> None:
        self.path = _real(path)
        self.to = _real(to)
        self.aside = os.path.join(os.path.dirname(self.to), ".sandkeep-" + os.urandom(8).hex())
        self.seen: Dict[
            str, Tuple[os.stat_result, bool]
        ] = {}  # by path below the source: as it was, and whether it was linked
        self._folders: Dict[str, List[str]] = {}  # what was in each
        self._names: Dict[Tuple[int, int], str] = {}  # of files with several names the first

    def steps(self) -> Generator[None, None, None]:
        self._check()
        done = False
        try:
            yield from self._build()
            for below in reversed(list(self._folders)):
                _dress(_at(self.path, below), _at(self.aside, below), self.seen[below][0])
            yield
            self._verify()
            os.rename(self.aside, self.to)
            done = True
        finally:
            if not done:
                _remove(self.aside)
        removing = self._remove_source()
        try:
            yield from removing
        except GeneratorExit:  # nobody waits any more, but half a source helps nobody
            for _ in self._remove_source():
                pass
            raise

    def _check(self) -> None:
        """What rename(2) would refuse, before anything is copied."""
        is_folder = st.S_ISDIR(os.lstat(self.path).st_mode)
        if is_folder and (self.to + "/").startswith(self.path.rstrip("/") + "/"):
            raise _refused(errno.EINVAL, self.to)
        if os.path.ismount(self.path):
            raise _refused(errno.EBUSY, self.path)
        if os.statvfs(os.path.dirname(self.path)).f_flag & os.ST_RDONLY:
            raise _refused(errno.EROFS, self.path)
        if not os.access(os.path.dirname(self.path), os.W_OK | os.X_OK, effective_ids=True):
            raise _refused(errno.EACCES, self.path)
        try:
            there = st.S_ISDIR(os.lstat(self.to).st_mode)
        except FileNotFoundError:
            return
        if there != is_folder:
            raise _refused(errno.EISDIR if there else errno.ENOTDIR, self.to)
        if there and os.listdir(self.to):
            raise _refused(errno.ENOTEMPTY, self.to)

    def _build(self) -> Generator[None, None, None]:
        device = os.lstat(self.path).st_dev
        todo = [""]
        count = 0
        while todo:
            below = todo.pop()
            source, target = _at(self.path, below), _at(self.aside, below)
            found = os.lstat(source)
            if not st.S_ISDIR(found.st_mode):
                linked = yield from self._leaf(source, target, found)
                self.seen[below] = found, linked
            elif found.st_dev != device:
                raise _refused(errno.EBUSY, source)
            else:
                os.mkdir(target, 0o700)
                self.seen[below] = found, False
                self._folders[below] = sorted(os.listdir(source))
                todo += [os.path.join(below, name) for name in self._folders[below]]
            count += 1
            if count % _SLICE == 0:
                yield

    def _leaf(self, source: str, target: str, found: os.stat_result) -> Generator[None, None, bool]:
        """Link it, or copy it where that can't be. True if it was linked, or has a name here already."""
        number = found.st_dev, found.st_ino
        first = self._names.get(number)
        if first is not None:
            os.link(first, target, follow_symlinks=False)
            return True
        linked = _link(source, target)
        if not linked:
            yield from _copy(source, target, found)
        if found.st_nlink > 1:
            self._names[number] = target
        return linked

    def _verify(self) -> None:
        for below, (before, linked) in self.seen.items():
            if below in self._folders and sorted(os.listdir(_at(self.path, below))) != self._folders[below]:
                raise _changed(_at(self.path, below))
            if not self._same(below, before, linked, self.aside):
                raise _changed(_at(self.path, below))

    def _same(self, below: str, before: os.stat_result, linked: bool, where: str) -> bool:
        """Whether the source's entry is the one that was moved. Linking changes the times of none but the inode."""
        try:
            now = os.lstat(_at(self.path, below))
        except FileNotFoundError:
            return False
        if linked and os.path.samestat(now, os.lstat(_at(where, below))):
            return True
        kept = ("st_dev", "st_mode", "st_uid", "st_gid")
        if not st.S_ISDIR(before.st_mode):
            quiet = linked or before.st_nlink > 1  # its change time moves with its other names
            kept += ("st_ino", "st_size", "st_mtime_ns", *(() if quiet else ("st_ctime_ns",)))
        return all(getattr(now, name) == getattr(before, name) for name in kept)

    def _remove_source(self) -> Generator[None, None, None]:
        stays = ""
        for count, below in enumerate(reversed(list(self.seen))):
            before, linked = self.seen[below]
            source = _at(self.path, below)
            try:
                if below in self._folders:
                    os.rmdir(source)
                elif self._same(below, before, linked, self.to):
                    os.unlink(source)
                else:
                    stays = stays or source
            except FileNotFoundError:
                pass
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                stays = stays or source
            if count % _SLICE == _SLICE - 1:
                yield
        if stays and os.path.lexists(stays):
            raise Problem(
                FILE_ERROR, "{}: moved, but this came or changed meanwhile and stays".format(stays), errno.EBUSY
            )


def _real(path: str) -> str:
    """The path without links but a last one."""
    path = path.rstrip("/") or "/"
    return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


def _at(top: str, below: str) -> str:
    return os.path.join(top, below) if below else top


def _refused(number: int, path: str) -> Problem:
    return file_problem(OSError(number, os.strerror(number)), path)


def _changed(path: str) -> Problem:
    return Problem(BUSY, "{}: changed while it was moved; all is as it was".format(path), errno.EBUSY)


def _link(source: str, target: str) -> bool:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        return False
    return True


def _copy(source: str, target: str, found: os.stat_result) -> Generator[None, None, None]:
    if st.S_ISLNK(found.st_mode):
        os.symlink(os.readlink(source), target)
    elif st.S_ISREG(found.st_mode):
        yield from _contents(source, target, found)
    else:
        os.mknod(target, st.S_IFMT(found.st_mode) | 0o600, found.st_rdev)
    _dress(source, target, found)


def _contents(source: str, target: str, found: os.stat_result) -> Generator[None, None, None]:
    read = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        write = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            at = 0
            while at < found.st_size:
                at, end = _data(read, at, found.st_size)
                while at < end:
                    piece = os.pread(read, min(_PIECE, end - at), at)
                    if not piece:
                        raise _changed(source)
                    view = memoryview(piece)
                    while view:
                        done = os.pwrite(write, view, at)
                        view, at = view[done:], at + done
                    yield
            os.ftruncate(write, found.st_size)
        finally:
            os.close(write)
    finally:
        os.close(read)


def _data(fd: int, at: int, size: int) -> Tuple[int, int]:
    """The next run of bytes that is no hole; where holes are not told, all."""
    try:
        at = os.lseek(fd, at, os.SEEK_DATA)
        return at, min(os.lseek(fd, at, os.SEEK_HOLE), size)
    except OSError as error:
        return (size, size) if error.errno == errno.ENXIO else (at, size)


def _dress(source: str, target: str, found: os.stat_result) -> None:
    """Owner, mode, attributes (access lists are such) and times; what can't be had is an error."""
    now = os.lstat(target)
    if (now.st_uid, now.st_gid) != (found.st_uid, found.st_gid):
        os.chown(target, found.st_uid, found.st_gid, follow_symlinks=False)
    if not st.S_ISLNK(found.st_mode):
        os.chmod(target, st.S_IMODE(found.st_mode))
    for name, value in _attributes(source):
        os.setxattr(target, name, value, follow_symlinks=False)
    os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns), follow_symlinks=False)


def _attributes(path: str) -> List[Tuple[str, bytes]]:
    try:
        names = [name for name in os.listxattr(path, follow_symlinks=False) if name != "security.selinux"]
        return [(name, os.getxattr(path, name, follow_symlinks=False)) for name in names]
    except OSError as error:
        if error.errno in (errno.ENOTSUP, errno.ENOSYS, errno.EPERM):
            return []
        raise


def _remove(path: str) -> None:
    """All of what was built; nobody else knows of it."""
    try:
        if not st.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
            return
        os.chmod(path, 0o700)
    except FileNotFoundError:
        return
    for name in os.listdir(path):
        _remove(os.path.join(path, name))
    os.rmdir(path)
