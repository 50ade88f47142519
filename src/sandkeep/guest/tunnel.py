"""A connection to a TCP port inside, as raw bytes both ways; either side may close its half."""

from __future__ import annotations

import errno
import os
import socket

from .loop import BROKEN, READ, WRITE
from .problems import BAD_ARGUMENT, Problem
from .wire import Task

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional

    from .loop import Loop
    from .main import Guest
    from .wire import Connection

_CHUNK = 64 << 10


class Half:
    """Bytes from one socket to the other; never more than a chunk is held."""

    def __init__(self, source: socket.socket, sink: socket.socket, held: bytes = b"") -> None:
        self.source = source
        self.sink = sink
        self.held = memoryview(held)
        self.ended = False
        self.done = False

    def move(self) -> None:
        try:
            while not self.done:
                if self.held:
                    self.held = self.held[self.sink.send(self.held) :]
                elif self.ended:
                    self.done = True
                    self.sink.shutdown(socket.SHUT_WR)
                else:
                    self.held = memoryview(self.source.recv(_CHUNK))
                    self.ended = not self.held
        except BlockingIOError:
            pass


class Tunnel:
    def __init__(self, loop: Loop, client: socket.socket, server: socket.socket, early: bytes) -> None:
        self._loop = loop
        self._halves = {client: Half(client, server, early), server: Half(server, client)}
        self._other = {client: server, server: client}
        self._masks = {client: READ, server: READ}
        self._closed = False
        loop.watch(client.fileno(), READ, lambda mask: self._event(client, mask))
        loop.watch(server.fileno(), READ, lambda mask: self._event(server, mask))
        self._move()

    def _event(self, sock: socket.socket, mask: int) -> None:
        if mask & BROKEN and sock in self._masks:  # it reads no more; what it sent is still to be moved
            del self._masks[sock]
            self._loop.forget(sock.fileno())
        if not self._closed:
            self._move()

    def _move(self) -> None:
        try:
            for half in self._halves.values():
                half.move()
        except OSError:
            self.close()
            return
        done = [sock for sock, half in self._halves.items() if half.done]
        if len(done) == 2 or any(sock not in self._masks for sock in done):
            self.close()
            return
        for sock in list(self._masks):
            mine, other = self._halves[sock], self._halves[self._other[sock]]
            mask = (READ if not mine.held and not mine.ended else 0) | (WRITE if other.held else 0)
            if self._masks[sock] != mask:
                self._masks[sock] = mask
                self._loop.change(sock.fileno(), mask)

    def close(self) -> None:
        self._closed = True
        for sock in self._halves:
            self._loop.forget(sock.fileno())
            sock.close()


class Connect(Task):
    def __init__(self, conn: Connection, server: socket.socket, host: str, port: int) -> None:
        self._conn = conn
        self._server: Optional[socket.socket] = server
        self._name = "{}:{}".format(host, port)
        conn.task = self
        conn.loop.watch(server.fileno(), WRITE, self._event)

    def _event(self, mask: int) -> None:
        server = self._server
        if server is None:
            return
        self._server = None
        self._conn.loop.forget(server.fileno())
        number = server.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number or mask & BROKEN:
            server.close()
            self._conn.finish(refused(self._name, number or errno.ECONNREFUSED).answer())
            return
        self._conn.task = None
        self._conn.send_json({"ok": True})
        Tunnel(self._conn.loop, self._conn.sock, server, self._conn.detach())

    def gone(self) -> None:
        if self._server is not None:
            self._conn.loop.forget(self._server.fileno())
            self._server.close()
            self._server = None


def refused(name: str, number: int) -> Problem:
    return Problem("CONNECT_FAILED", "{}: {}".format(name, os.strerror(number)), number)


def connect(guest: Guest, conn: Connection, port: int, host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.inet_pton(family, host)
    except (OSError, UnicodeError):
        raise Problem(BAD_ARGUMENT, "host must be an IP address, not {!r}".format(host))
    server = socket.socket(family, socket.SOCK_STREAM)
    server.setblocking(False)
    number = server.connect_ex((host, port))
    if number not in (0, errno.EINPROGRESS):
        server.close()
        raise refused("{}:{}".format(host, port), number)
    Connect(conn, server, host, port)
