"""How clients come in: by what the host made and gave to process 1 as its standard input. No name inside leads there.

A socket, bound where nobody inside sees it: we listen. A pipe, where a runtime can't be given such a socket: the host writes
names of sockets of its own in a folder that is read-only here, one a line, and we go there; the line `wake` ends a sleep.
"""

from __future__ import annotations

import errno
import os
import socket
import stat

from .loop import READ

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, List

    from .loop import Loop

    Take = Callable[[socket.socket], None]

WAKE = b"wake"
_PAUSE = 0.05
_LOOK = 0.05
_CROWDED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
_MOST_LINES = 4096


def find(loop: Loop, run: str, take: Take, woken: Callable[[], None]) -> Door:
    """By what standard input is, whose place is left to /dev/null."""
    given = os.dup(0)
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.close(null)
    if stat.S_ISSOCK(os.fstat(given).st_mode):
        return Listener(loop, socket.socket(fileno=given), take)
    return Calls(loop, given, run, take, woken)


class Door:
    can_sleep = False

    def sleep(self) -> None:
        """Let nobody in until the host says so."""

    def close(self) -> None:
        """For good."""


class Listener(Door):
    def __init__(self, loop: Loop, sock: socket.socket, take: Take) -> None:
        self._loop, self._sock, self._take = loop, sock, take
        self._open = True
        sock.setblocking(False)
        sock.listen(256)
        loop.watch(sock.fileno(), READ, self._accept)

    def _accept(self, _mask: int) -> None:
        try:
            sock, _ = self._sock.accept()
        except BlockingIOError:
            return
        except OSError:  # too many descriptors: let some be closed first
            self._loop.change(self._sock.fileno(), 0)
            self._loop.later(_PAUSE, self._again)
            return
        self._take(sock)

    def _again(self) -> None:
        if self._open:
            self._loop.change(self._sock.fileno(), READ)

    def close(self) -> None:
        self._open = False
        self._loop.forget(self._sock.fileno())
        self._sock.close()


class Calls(Door):
    can_sleep = True

    def __init__(self, loop: Loop, fd: int, run: str, take: Take, woken: Callable[[], None]) -> None:
        self._loop, self._fd, self._take, self._woken = loop, fd, take, woken
        self._run = run
        self._begun = b""
        self._waiting: List[bytes] = []
        self._open = True
        self._asleep = False
        os.set_blocking(fd, False)
        loop.watch(fd, READ, self._read)

    def sleep(self) -> None:
        self._asleep = True
        self._loop.later(_LOOK, self._look)

    def _look(self) -> None:
        """By the clock: gVisor comes back from some images without knowing that somebody waits for the pipe."""
        if self._open and self._asleep:
            self._read(READ)
        if self._open and self._asleep:
            self._loop.later(_LOOK, self._look)

    def _wake(self) -> None:
        if self._asleep:
            self._asleep = False
            self._loop.forget(self._fd)
            self._loop.watch(self._fd, READ, self._read)
        self._woken()

    def close(self) -> None:
        self._open = False
        self._loop.forget(self._fd)
        os.close(self._fd)

    def _read(self, _mask: int) -> None:
        try:
            data = os.read(self._fd, 4096)
        except BlockingIOError:
            return
        *lines, self._begun = (self._begun[-256:] + data).split(b"\n")
        for line in lines:
            if line == WAKE:
                self._wake()
            elif line and len(self._waiting) < _MOST_LINES:
                self._waiting.append(line)
        self._answer()

    def _answer(self) -> None:
        """Go where we were called to; a caller who gave up meanwhile has taken its socket away."""
        while self._waiting and not self._asleep and self._open:
            name = self._waiting.pop(0)
            try:
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                try:
                    sock.setblocking(False)
                    sock.connect(os.path.join(os.fsencode(self._run), name))
                except BaseException:
                    sock.close()
                    raise
            except OSError as error:
                if error.errno in _CROWDED:
                    self._waiting.insert(0, name)
                    self._loop.later(_PAUSE, self._answer)
                    return
                continue
            self._take(sock)
