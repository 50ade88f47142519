"""Changes of files, told as they happen, through inotify."""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from .loop import READ
from .problems import BUSY, UNSUPPORTED, Problem, file_problem
from .wire import Task

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

    from .main import Guest
    from .wire import Connection

_MODIFY, _ATTRIB, _MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x2, 0x4, 0x40, 0x80, 0x100, 0x200
_OVERFLOW, _IGNORED, _IS_FOLDER = 0x4000, 0x8000, 0x40000000
_WANTED = _MODIFY | _ATTRIB | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE
_HEAD = struct.Struct("iIII")


class Watch(Task):
    """Ends when the client leaves. A client that does not read is told of an overflow instead of what it missed."""

    in_files = True

    def __init__(self, conn: Connection, path: str, recursive: bool, left: Callable[[], Any]) -> None:
        self._conn = conn
        self._left = left
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._recursive = recursive
        self._top = path
        self._folders: Dict[int, str] = {}
        self._fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise Problem(UNSUPPORTED, "this sandbox has no inotify", ctypes.get_errno())
        try:
            self._add(path)
            for folder in self._below(path):
                self._add_quietly(folder)
        except BaseException:
            os.close(self._fd)
            raise
        conn.task = self
        conn.loop.watch(self._fd, READ, self._event)

    def _add(self, path: str) -> None:
        number = self._libc.inotify_add_watch(self._fd, os.fsencode(path), _WANTED)
        if number < 0:
            raise file_problem(OSError(ctypes.get_errno(), ""), path)
        self._folders[number] = path

    def _add_quietly(self, path: str) -> None:
        try:
            self._add(path)
        except Problem as problem:
            if problem.number not in (errno.ENOENT, errno.ENOTDIR):
                raise

    def _below(self, path: str) -> List[str]:
        if not self._recursive:
            return []
        return [os.path.join(folder, name) for folder, names, _ in os.walk(path) for name in names]

    def mark(self, number: int) -> None:
        """Tell all that has happened until now, and then this."""
        while self._drain():
            pass
        if self._conn.task is self:
            self._conn.send_json({"mark": number})

    def _event(self, _mask: int) -> None:
        self._drain()

    def _drain(self) -> bool:
        """True if there was anything."""
        if self._conn.task is not self:
            return False
        try:
            events = list(self._read())
        except BlockingIOError:
            return False
        try:
            for told in self._tell(events):
                if self._conn.full:
                    self._conn.send_json({"event": "overflow"})
                    break
                self._conn.send_json(told)
        except Problem as problem:
            self.gone()
            self._conn.finish(problem.answer())
        return True

    def _read(self) -> Iterator[Tuple[int, int, int, str]]:
        data = os.read(self._fd, 64 << 10)
        at = 0
        while at < len(data):
            number, mask, cookie, length = _HEAD.unpack_from(data, at)
            at += _HEAD.size
            yield number, mask, cookie, os.fsdecode(data[at : at + length].rstrip(b"\0"))
            at += length

    def _tell(self, events: List[Tuple[int, int, int, str]]) -> Iterator[Dict[str, Any]]:
        arrivals = {cookie for _, mask, cookie, _ in events if mask & _MOVED_TO}
        left: Dict[int, str] = {}
        for number, mask, cookie, name in events:
            if mask & _OVERFLOW:
                yield {"event": "overflow"}
                continue
            if mask & _IGNORED:
                self._folders.pop(number, None)
                continue
            folder = self._folders.get(number)
            if folder is None:
                continue
            if not name and folder != self._top:
                continue  # the folder above tells it as well
            path = os.path.join(folder, name) if name else folder
            if mask & _MOVED_FROM and cookie in arrivals:
                left[cookie] = path
                continue
            if mask & _MOVED_TO and cookie in left:
                yield {"event": "moved", "path": path, "from": left[cookie]}
            else:
                kind = (
                    "created"
                    if mask & (_CREATE | _MOVED_TO)
                    else "removed"
                    if mask & (_DELETE | _MOVED_FROM)
                    else "modified"
                )
                yield {"event": kind, "path": path, **({"attributes": True} if mask & _ATTRIB else {})}
            if mask & _IS_FOLDER and mask & (_CREATE | _MOVED_TO) and self._recursive:
                for found in self._enter(path):
                    yield found

    def _enter(self, path: str) -> Iterator[Dict[str, Any]]:
        """Watch a new folder, and tell what was put into it before we could."""
        self._add_quietly(path)
        for folder, names, files in os.walk(path):
            for name in names:
                self._add_quietly(os.path.join(folder, name))
            for name in names + files:
                yield {"event": "created", "path": os.path.join(folder, name)}

    def gone(self) -> None:
        self._conn.loop.forget(self._fd)
        os.close(self._fd)
        self._left()


def watch(guest: Guest, conn: Connection, path: str, recursive: bool, name: Optional[str]) -> None:
    path = guest.session.resolve(path)
    if name is not None and name in guest.watches:
        raise Problem(BUSY, "there is a watch {!r}".format(name))
    made = Watch(conn, path, recursive, lambda: guest.watches.pop(name or "", None))
    if name is not None:
        guest.watches[name] = made
    conn.send_json({"watching": path})


def mark(guest: Guest, conn: Connection, name: str, mark: int) -> Dict[str, Any]:
    """Into the events of a watch, behind all that happened before."""
    found = guest.watches.get(name)
    if found is not None:
        found.mark(mark)
    return {"ok": True, "watched": found is not None}
