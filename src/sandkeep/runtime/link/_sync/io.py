"""One connection to a guest, blocking, without threads. Written by hand on both sides."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from sandkeep.runtime.link import door, protocol

CHUNK = 256 << 10
Body = Iterable[bytes]


class Wire:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._pid = os.getpid()
        self._pieces: Iterator[bytes] | None = None
        self._source = -1
        self._held = memoryview(b"")

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

    def send(self, data: bytes) -> None:
        self._sock.sendall(data)

    def feed(self, body: Body) -> None:
        """Send this while answers are received. What has a `fileno` is asked for more only when that has some: answers never wait for it."""
        self._pieces = protocol.body_frames(body)
        self._source = body.fileno() if hasattr(body, "fileno") else -1

    @property
    def sending(self) -> bool:
        return self._pieces is not None

    def receive(self, timeout: float | None) -> bytes:
        """Some bytes; none at the end. TimeoutError when nothing comes in time."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            waits = self._source >= 0 and self.sending and not self._held
            wanted = {self._sock.fileno(): select.POLLIN | (select.POLLOUT if self.sending and not waits else 0)}
            told = polled({**wanted, **({self._source: select.POLLIN} if waits else {})}, left)
            if not told:
                raise TimeoutError
            found = told.get(self._sock.fileno(), 0)
            if found & select.POLLOUT or self._source in told:
                self._send_some()
            if found & ~select.POLLOUT:
                try:
                    return self._sock.recv(CHUNK)
                except ConnectionResetError:
                    return b""

    def _send_some(self) -> None:
        if not self._held and self._pieces is not None:
            piece = next(self._pieces, None)
            if piece is None:
                self._pieces = None
                return
            self._held = memoryview(piece)
        try:
            self._held = self._held[self._sock.send(self._held, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):
            self._pieces, self._held = None, memoryview(b"")

    def end_sending(self) -> None:
        self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
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


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def _answered(call: door.Call, timeout: float | None) -> None:
    told = polled({call.listener.fileno(): select.POLLIN, call.pipe: 0}, timeout)
    if not told:
        raise TimeoutError
    if call.listener.fileno() not in told:
        raise ConnectionRefusedError
