"""One connection to a guest, blocking, without threads. Written by hand on both sides."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from sandkeep.runtime.link import door, protocol
from sandkeep.runtime.link.told import Told, decode

CHUNK = 256 << 10
Body = Iterable[bytes]


class Wire:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._pid = os.getpid()
        self._pieces: Iterator[bytes] | None = None
        self._source = -1
        self._held = memoryview(b"")
        self._spent = (0.0, 0.0, 0)

    @classmethod
    def connect(cls, dir: Path, timeout: float | None) -> Wire:
        """To the guest of the sandbox in this folder. TimeoutError when it does not come in time."""
        sock = door.listening(dir)
        if sock is None:
            with door.Call(dir) as call:
                _answered(call, timeout)
                sock = call.accept()
        sock.setblocking(True)
        return cls(sock)

    @property
    def stale(self) -> bool:
        """An idle connection that has something to say has only its end to tell; one from before a fork is the parent's."""
        return self._pid != os.getpid() or bool(ready(self._sock, select.POLLIN, 0))

    def send(self, data: bytes, seconds: float | None = None) -> None:
        if seconds is None or len(data) <= protocol.ROOM:
            self._sock.sendall(data)
            return
        self._sock.settimeout(seconds)
        self._sock.sendall(data)
        self._sock.settimeout(None)

    def say(self, data: bytes) -> None:
        """A last word, if there is room for it."""
        with contextlib.suppress(OSError):
            self._sock.send(data, socket.MSG_DONTWAIT)

    def spent(self) -> tuple[float, float, int]:
        """Since the last call: seconds waited, those in which it was not the guest's turn, bytes that moved."""
        spent, self._spent = self._spent, (0.0, 0.0, 0)
        return spent

    def _note(self, waited: float, lent: float, moved: int) -> None:
        before = self._spent
        self._spent = before[0] + waited, before[1] + lent, before[2] + moved

    def feed(self, body: Body) -> None:
        """Send this while answers are received. What has a `fileno` is asked for more only when that has some: answers never wait for it."""
        self._pieces = protocol.body_frames(body)
        self._source = body.fileno() if hasattr(body, "fileno") else -1

    @property
    def sending(self) -> bool:
        return self._pieces is not None

    def receive(self, timeout: float | None) -> bytes | None:
        """Some bytes; empty at the end, None when nothing comes in time."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            began = time.monotonic()
            left = None if deadline is None else max(0.0, deadline - began)
            waits = self._source >= 0 and self.sending and not self._held
            wanted = {self._sock.fileno(): select.POLLIN | (select.POLLOUT if self.sending and not waits else 0)}
            told = polled({**wanted, **({self._source: select.POLLIN} if waits else {})}, left)
            waited = time.monotonic() - began
            self._note(waited, waited if waits else 0, 0)
            if not told:
                return None
            found = told.get(self._sock.fileno(), 0)
            if found & select.POLLOUT or self._source in told:
                self._send_some()
            if found & ~select.POLLOUT:
                try:
                    data = self._sock.recv(CHUNK)
                except ConnectionResetError:
                    return b""
                self._note(0, 0, len(data))
                return data

    def _send_some(self) -> None:
        if not self._held and self._pieces is not None:
            piece = next(self._pieces, None)
            if piece is None:
                self._pieces = None
                return
            self._held = memoryview(piece)
        try:
            sent = self._sock.send(self._held, socket.MSG_DONTWAIT)
            self._held = self._held[sent:]
            self._note(0, 0, sent)
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):
            self._pieces, self._held = None, memoryview(b"")

    def end_sending(self) -> None:
        self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Also where a child that was forked meanwhile has a copy: the guest learns that nobody waits any more."""
        if self._pid == os.getpid():
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def ready(sock: socket.socket, wanted: int, seconds: float | None) -> int:
    """What a socket is ready for."""
    return polled({sock.fileno(): wanted}, seconds).get(sock.fileno(), 0)


def polled(wanted: dict[int, int], seconds: float | None) -> dict[int, int]:
    """Which descriptors are ready, for what. By poll: select knows none above 1023."""
    poll = select.poll()
    for descriptor, events in wanted.items():
        poll.register(descriptor, events)
    return dict(poll.poll(None if seconds is None else seconds * 1000))


def aside(function: Callable[[], None]) -> None:
    """Something that blocks."""
    function()


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def _answered(call: door.Call, timeout: float | None) -> None:
    told = polled({call.listener.fileno(): select.POLLIN, call.pipe: 0}, timeout)
    if not told:
        raise TimeoutError
    if call.listener.fileno() not in told:
        raise ConnectionRefusedError


def turn() -> None:
    """Threads take theirs by themselves."""


def decoded(text: bytes) -> Told:
    return decode(text)
