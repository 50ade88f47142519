"""A connection to a TCP port inside, as raw bytes both ways; either side may close its half."""

from __future__ import annotations

import errno
import os
import socket
import struct

from .loop import BROKEN, READ, WRITE
from .problems import BAD_ARGUMENT, Problem
from .wire import Task

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Optional, Set

    from .loop import Loop
    from .main import Guest
    from .wire import Connection

_CHUNK = 64 << 10
_RESET = struct.pack("ii", 1, 0)


class Half:
    """Bytes from one socket to the other; never more than a chunk is held."""

    def __init__(self, source: socket.socket, sink: socket.socket, held: bytes = b"") -> None:
        self.source = source
        self.sink = sink
        self.held = memoryview(held)
        self.ended = False
        self.done = False

    def receive(self) -> bytes:
        return self.source.recv(_CHUNK)

    def move(self) -> None:
        try:
            while not self.done:
                if self.held:
                    self.held = self.held[self.sink.send(self.held) :]
                elif self.ended:
                    self.done = True
                    self.sink.shutdown(socket.SHUT_WR)
                else:
                    self.held = memoryview(self.receive())
                    self.ended = not self.held
        except BlockingIOError:
            pass


class Whole(Half):
    """From a source that sends pieces, each after its length (u32), and an empty one at its end: to just hang up is to break off."""

    def __init__(self, source: socket.socket, sink: socket.socket, early: bytes) -> None:
        super().__init__(source, sink)
        self._early = early
        self._head = b""
        self._left = 0

    def receive(self) -> bytes:
        while not self._left:
            self._head += self._some(4 - len(self._head))
            if len(self._head) == 4:
                self._left, self._head = int.from_bytes(self._head, "big"), b""
                if not self._left:
                    return b""
        data = self._some(min(self._left, _CHUNK))
        self._left -= len(data)
        return data

    def _some(self, most: int) -> bytes:
        data, self._early = self._early[:most], self._early[most:]
        data = data or self.source.recv(most)
        if not data:
            raise ConnectionResetError
        return data


class Tunnel:
    """Is among `all` from its begin to its end, which it tells to `ended`, if given. Then the client's half is a `Whole` one, and an
    early end of it is passed on as a reset, so that nobody takes a part for all.
    """

    def __init__(
        self,
        all: Set[Tunnel],
        loop: Loop,
        client: socket.socket,
        server: socket.socket,
        early: bytes,
        ended: Optional[Callable[[], None]] = None,
    ) -> None:
        self._all = all
        self._ended = ended
        self._server = server
        self._loop = loop
        inward = Half(client, server, early) if ended is None else Whole(client, server, early)
        self._halves = {client: inward, server: Half(server, client)}
        self._other = {client: server, server: client}
        self._masks = {client: READ, server: READ}
        self._closed = False
        all.add(self)
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
        if self._closed:
            return
        self._closed = True
        self._all.discard(self)
        if self._ended is not None and not all(half.done for half in self._halves.values()):
            self._server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        for sock in self._halves:
            self._loop.forget(sock.fileno())
            sock.close()
        if self._ended is not None:
            self._ended()


class Connect(Task):
    def __init__(self, guest: Guest, conn: Connection, server: socket.socket, host: str, port: int) -> None:
        self._guest = guest
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
        Tunnel(self._guest.tunnels, self._conn.loop, self._conn.sock, server, self._conn.detach())

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
    Connect(guest, conn, server, host, port)
