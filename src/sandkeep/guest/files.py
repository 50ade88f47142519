"""Files of the sandbox for the host. Paths are resolved here, inside; calls act as root unless a user is named, and what
is new belongs to the session's user."""

from __future__ import annotations

import errno
import os
import stat as st

from . import frames, labels, moving
from .jobs import Pulse, outcome
from .people import Acting
from .problems import BAD_ARGUMENT, Problem, file_problem
from .wire import Task

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional, Tuple, Union

    from .jobs import Steps
    from .labels import Labels
    from .main import Guest
    from .people import Person
    from .wire import Connection

    Who = Optional[Union[str, int]]

_KINDS = {st.S_IFREG: "file", st.S_IFDIR: "dir", st.S_IFLNK: "symlink", st.S_IFIFO: "fifo", st.S_IFSOCK: "socket"}
_SLICE = 256


def _rights(guest: Guest, user: Who) -> Acting:
    return Acting(None if user is None else guest.session.choose(user))


def _owner(guest: Guest, user: Who) -> Person:
    return guest.session.choose(user)


def info(path: str, found: os.stat_result, kept: Optional[Labels] = None) -> Dict[str, Any]:
    """With `kept`, also its attributes: its own, and those of them that are kept beside it."""
    kind = _KINDS.get(st.S_IFMT(found.st_mode), "device")
    entry = {
        "path": path,
        "name": os.path.basename(path) or "/",
        "kind": kind,
        "size": found.st_size,
        "mode": st.S_IMODE(found.st_mode),
        "uid": found.st_uid,
        "gid": found.st_gid,
        "mtime_ns": found.st_mtime_ns,
        "target": os.readlink(path) if kind == "symlink" else None,
    }
    if kept is not None:
        entry["xattrs"] = {**labels.of(kept, path), **_attributes(path)} if kind in ("file", "dir") else {}
    return entry


def _attributes(path: str) -> Dict[str, str]:
    """Those that any user may set; none where the file system has none, or where they may not be read."""
    try:
        names = [name for name in os.listxattr(path) if name.startswith("user.")]
        return {name: os.fsdecode(os.getxattr(path, name)) for name in names}
    except OSError as error:
        if error.errno in (errno.ENOTSUP, errno.ENODATA, errno.EACCES, errno.ENOENT):
            return {}
        raise


def _set_attributes(fd: int, path: str, xattrs: Dict[str, str]) -> bool:
    """False where files can't carry any."""
    for name, value in xattrs.items():
        try:
            os.setxattr(fd, name, os.fsencode(value))
        except OSError as error:
            if error.errno == errno.ENOTSUP:
                return False
            raise file_problem(error, path)
    return True


def stat(guest: Guest, conn: Connection, path: str, follow: bool, xattrs: bool, user: Who) -> Dict[str, Any]:
    path = guest.session.resolve(path)
    kept = labels.read() if xattrs else None
    with _rights(guest, user):
        return {"ok": True, "entry": info(path, os.stat(path, follow_symlinks=follow), kept)}


def list_folder(guest: Guest, conn: Connection, path: str, depth: int, xattrs: bool, user: Who) -> Steps:
    found: List[Dict[str, Any]] = []
    folders = [(guest.session.resolve(path), depth)]
    kept = labels.read() if xattrs else None
    first = True
    while folders:
        folder, left = folders.pop()
        below = []
        try:
            with _rights(guest, user):
                names = sorted(os.listdir(folder))
        except (FileNotFoundError, NotADirectoryError):
            if first:
                raise
            continue  # it went away while we looked
        first = False
        for at in range(0, len(names), _SLICE):
            with _rights(guest, user):
                for name in names[at : at + _SLICE]:
                    entry = os.path.join(folder, name)
                    try:
                        found.append(info(entry, os.lstat(entry), kept))
                    except FileNotFoundError:
                        continue
                    if left > 1 and found[-1]["kind"] == "dir":
                        below.append((entry, left - 1))
            yield
        folders += reversed(below)
    return {"ok": True, "entries": found}


def mkdir(guest: Guest, conn: Connection, path: str, parents: bool, mode: int, user: Who) -> Dict[str, Any]:
    path = guest.session.resolve(path)
    with _rights(guest, user):
        made = _make_folder(path, parents, mode, _owner(guest, user))
    return {"ok": True, "made": made}


def _make_folder(path: str, parents: bool, mode: int, owner: Person) -> bool:
    """True if it was made; with parents, False if it was there."""
    try:
        os.mkdir(path, mode)
    except FileNotFoundError:
        above = os.path.dirname(path.rstrip("/"))
        if not parents or above in ("", path):
            raise
        _make_folder(above, True, 0o755, owner)
        return _make_folder(path, True, mode, owner)
    except FileExistsError:
        if parents and os.path.isdir(path):
            return False
        raise
    os.chmod(path, mode)
    _give(path, owner)
    return True


def _give(where: Union[str, int], owner: Person) -> None:
    if owner.uid != os.geteuid():
        os.chown(where, owner.uid, owner.gid)


def move(
    guest: Guest, conn: Connection, path: str, to: str, overwrite: bool, user: Who
) -> Union[Dict[str, Any], Steps]:
    path, to = guest.session.resolve(path), guest.session.resolve(to)
    try:
        with labels.moved(path, to), _rights(guest, user):
            if not overwrite and os.path.lexists(to):
                raise file_problem(FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)), to)
            try:
                os.rename(path, to)
            except FileNotFoundError as error:
                raise file_problem(error, path if not os.path.lexists(path) else to)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        return _move_across(guest, conn, path, to, user)
    return {"ok": True}


def _move_across(guest: Guest, conn: Connection, path: str, to: str, user: Who) -> Steps:
    kept = labels.moved(path, to)
    done = yield from moving.move(guest, conn, path, to, None if user is None else guest.session.choose(user))
    with kept:
        return done


def remove(guest: Guest, conn: Connection, path: str, recursive: bool, user: Who) -> Steps:
    path = guest.session.resolve(path)
    place = labels.place(path)
    done = yield from _remove(guest, conn, path, recursive, user)
    labels.removed(place)
    return done


def _remove(guest: Guest, conn: Connection, path: str, recursive: bool, user: Who) -> Steps:
    with _rights(guest, user):
        found = os.lstat(path)
        if os.path.samestat(found, os.lstat("/")):
            raise Problem(BAD_ARGUMENT, "the root folder can't be removed")
        if not st.S_ISDIR(found.st_mode):
            os.unlink(path)
            return {"ok": True, "removed": 1}
        if not recursive:
            os.rmdir(path)
            return {"ok": True, "removed": 1}
    removed, pulse = 0, Pulse(conn, "removing")
    stack = [(path, False)]
    while stack:
        folder, empty = stack.pop()
        with _rights(guest, user):
            if empty:
                os.rmdir(folder)
                removed += 1
                continue
            entries = [(entry.path, entry.is_dir(follow_symlinks=False)) for entry in os.scandir(folder)]
        stack.append((folder, True))
        for at in range(0, len(entries), _SLICE):
            with _rights(guest, user):
                for entry, is_folder in entries[at : at + _SLICE]:
                    if is_folder:
                        stack.append((entry, False))
                    else:
                        os.unlink(entry)
                        removed += 1
            pulse.beat(removed)
            yield
    return {"ok": True, "removed": removed}


def chmod(guest: Guest, conn: Connection, path: str, mode: int, user: Who) -> Dict[str, Any]:
    with _rights(guest, user):
        os.chmod(guest.session.resolve(path), mode)
    return {"ok": True}


def chown(guest: Guest, conn: Connection, path: str, uid: int, gid: int, follow: bool) -> Dict[str, Any]:
    os.chown(guest.session.resolve(path), uid, gid, follow_symlinks=follow)
    return {"ok": True}


def symlink(guest: Guest, conn: Connection, path: str, target: str, user: Who) -> Dict[str, Any]:
    path = guest.session.resolve(path)
    owner = _owner(guest, user)
    with _rights(guest, user):
        os.symlink(target, path)
        if owner.uid != os.geteuid():
            os.lchown(path, owner.uid, owner.gid)
    return {"ok": True}


def _open_regular(path: str, flags: int, mode: int = 0o666) -> Tuple[int, os.stat_result]:
    """Never waits for the other end of a fifo or device, and refuses them."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, mode)
    found = os.fstat(fd)
    if not st.S_ISREG(found.st_mode):
        os.close(fd)
        number = errno.EISDIR if st.S_ISDIR(found.st_mode) else errno.EINVAL
        raise file_problem(OSError(number, os.strerror(number)), path)
    return fd, found


class Read(Task):
    in_files = True

    def __init__(self, conn: Connection, fd: int, length: Optional[int]) -> None:
        self._conn = conn
        self._fd = fd
        self._left = length
        self._sent = 0
        conn.task = self

    def drained(self) -> None:
        while not self._conn.full:
            answer = outcome(self._step)
            if answer is not None:
                os.close(self._fd)
                self._conn.finish(answer)
                return

    def _step(self) -> Optional[Dict[str, Any]]:
        count = frames.CHUNK * 4 if self._left is None else min(frames.CHUNK * 4, self._left)
        data = os.read(self._fd, count) if count else b""
        if not data:
            return {"ok": True, "size": self._sent}
        self._sent += len(data)
        if self._left is not None:
            self._left -= len(data)
        self._conn.send(frames.DATA, data)
        return None

    def gone(self) -> None:
        os.close(self._fd)


def read(guest: Guest, conn: Connection, path: str, offset: int, length: Optional[int], user: Who) -> None:
    path = guest.session.resolve(path)
    with _rights(guest, user):
        fd, _ = _open_regular(path, os.O_RDONLY)
    if offset:
        os.lseek(fd, offset, os.SEEK_SET)
    Read(conn, fd, length).drained()


class Write(Task):
    """Data frames into a file: aside and renamed over it at the end, or in place."""

    in_files = True

    def __init__(self, guest: Guest, conn: Connection, path: str, user: Who) -> None:
        self._guest = guest
        self._conn = conn
        self._path = path
        self._user = user
        self._fd = -1
        self._aside: Optional[str] = None
        self._labels: Dict[str, str] = {}
        self._size = 0

    def open_aside(self, mode: Optional[int], parents: bool, xattrs: Dict[str, str]) -> None:
        owner = _owner(self._guest, self._user)
        with _rights(self._guest, self._user):
            self._path = os.path.realpath(self._path)
            folder = os.path.dirname(self._path)
            if parents:
                _make_folder(folder, True, 0o755, owner)
            try:
                old: Optional[os.stat_result] = os.lstat(self._path)
            except FileNotFoundError:
                old = None
            if old is not None and not st.S_ISREG(old.st_mode):
                number = errno.EISDIR if st.S_ISDIR(old.st_mode) else errno.EINVAL
                raise file_problem(OSError(number, os.strerror(number)), self._path)
            aside = os.path.join(folder, ".sandkeep-{}".format(os.urandom(8).hex()))
            try:
                self._fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise file_problem(error, self._path)
            self._aside = aside
            self._guest.asides.add(aside)
            try:
                if not _set_attributes(self._fd, self._path, xattrs):
                    self._labels = xattrs
                if old is not None and (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()) and os.geteuid() == 0:
                    os.fchown(self._fd, old.st_uid, old.st_gid)
                elif old is None:
                    _give(self._fd, owner)
                os.fchmod(self._fd, mode if mode is not None else st.S_IMODE(old.st_mode) if old is not None else 0o644)
            except BaseException:
                self.gone()
                raise

    def open_place(self, mode: Optional[int], parents: bool, append: bool, offset: int) -> None:
        owner = _owner(self._guest, self._user)
        with _rights(self._guest, self._user):
            if parents:
                _make_folder(os.path.dirname(self._path), True, 0o755, owner)
            new = not os.path.exists(self._path)
            flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else 0)
            self._fd, _ = _open_regular(self._path, flags, 0o644)
            try:
                if new:
                    _give(self._fd, owner)
                if mode is not None:
                    os.fchmod(self._fd, mode)
                os.lseek(self._fd, offset, os.SEEK_SET)
            except BaseException:
                self.gone()
                raise

    def frame(self, kind: int, payload: bytes) -> None:
        if kind != frames.DATA:
            super().frame(kind, payload)
            return
        self._conn.body = bool(payload)
        answer = outcome(lambda: self._put(payload) if payload else self._close())
        if answer is not None:
            self.gone()
            self._conn.finish(answer)

    def _put(self, payload: bytes) -> None:
        view = memoryview(payload)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            raise file_problem(error, self._path)
        self._size += len(payload)

    def _close(self) -> Dict[str, Any]:
        if self._aside is not None:
            with labels.written(self._path, self._labels), _rights(self._guest, self._user):
                try:
                    os.rename(self._aside, self._path)
                except OSError as error:
                    raise file_problem(error, self._path)
            self._guest.asides.discard(self._aside)
            self._aside = None
        return {"ok": True, "size": self._size, "entry": info(self._path, os.fstat(self._fd))}

    def gone(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._aside is not None:
            os.unlink(self._aside)
            self._guest.asides.discard(self._aside)
            self._aside = None


def write(guest: Guest, conn: Connection, path: str, mode: Optional[int], append: bool, offset: Optional[int], parents: bool,
          xattrs: Optional[Dict[str, str]], user: Who) -> None:  # fmt: skip
    if (append, offset is not None, xattrs is not None).count(True) > 1:
        raise Problem(BAD_ARGUMENT, "give append, offset or xattrs, not two of them")
    task = Write(guest, conn, guest.session.resolve(path), user)
    if append or offset is not None:
        task.open_place(mode, parents, append, offset or 0)
    else:
        task.open_aside(mode, parents, xattrs or {})
    conn.task = task
