"""The way out, for sandboxes that have one: programs inside connect to a port here, and whoever holds the request on the
host takes each connection over. What may go where is decided there; the guest only carries bytes.
"""

from __future__ import annotations

import os
import socket

from .loop import BROKEN, READ
from .problems import BAD_ARGUMENT, BUSY, Problem
from .tunnel import Tunnel
from .wire import Task

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, Optional

    from .main import Guest
    from .wire import Connection

MOST = 100
_PAUSE = 0.05


class Egress(Task):
    """Lives as long as its client stays. Then nobody listens, and what was not taken over is closed."""

    def __init__(self, guest: Guest, conn: Connection, port: int) -> None:
        self.port = port
        self._guest = guest
        self._conn = conn
        self._count = 0
        self._waiting: Dict[int, socket.socket] = {}
        self._open = 0
        self._listener: Optional[socket.socket] = _listen(port)
        self._accepting = True
        conn.loop.watch(self._listener.fileno(), READ, self._accept)

    def _accept(self, _mask: int) -> None:
        listener = self._listener
        if listener is None:
            return
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError:  # too many descriptors: let some be closed first
            self._rest(True)
            self._conn.loop.later(_PAUSE, self._again)
            return
        sock.setblocking(False)
        self._count += 1
        self._open += 1
        number = self._count
        self._waiting[number] = sock
        self._conn.loop.watch(sock.fileno(), 0, lambda mask: self._left(number, mask))
        self._conn.send_json({"accepted": number})
        self._again()

    def _left(self, number: int, mask: int) -> None:
        """Somebody hung up before the connection was taken over."""
        if mask & BROKEN:
            self._let_go(number).close()
            self.closed()

    def _let_go(self, number: int) -> socket.socket:
        sock = self._waiting.pop(number)
        self._conn.loop.forget(sock.fileno())
        return sock

    def closed(self) -> None:
        """A connection has ended: there is room for one more."""
        self._open -= 1
        self._again()

    def drained(self) -> None:
        self._again()

    def _again(self) -> None:
        self._rest(self._open >= MOST or self._conn.full)

    def _rest(self, resting: bool) -> None:
        if self._listener is not None and self._accepting is resting:
            self._accepting = not resting
            self._conn.loop.change(self._listener.fileno(), 0 if resting else READ)

    def take(self, conn: Connection, number: int) -> None:
        if number not in self._waiting:
            raise Problem(BAD_ARGUMENT, "no connection {} waits".format(number))
        sock = self._let_go(number)
        conn.send_json({"ok": True})
        Tunnel(self._guest.tunnels, conn.loop, conn.sock, sock, conn.detach(), self.closed)

    def gone(self) -> None:
        for number in list(self._waiting):
            self._let_go(number).close()
        if self._listener is not None:
            self._conn.loop.forget(self._listener.fileno())
            self._listener.close()
            self._listener = None
        self._guest.egress = None


def _listen(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(MOST)
    except OSError as error:
        listener.close()
        number = error.errno or 0
        raise Problem(BUSY, "port {}: {}".format(port, os.strerror(number)), number)
    return listener


def hold(guest: Guest, conn: Connection, port: int, env: Dict[str, str]) -> None:
    """Be the way out until the client leaves. The variables are those that the session does not have."""
    if guest.egress is not None:
        raise Problem(BUSY, "somebody else holds the way out")
    guest.egress = conn.task = Egress(guest, conn, port)
    guest.session.set_env({name: value for name, value in env.items() if name not in guest.session.env})
    conn.send_json({"listening": port})


def take(guest: Guest, conn: Connection, number: int) -> None:
    if guest.egress is None:
        raise Problem(BAD_ARGUMENT, "nobody holds the way out")
    guest.egress.take(conn, number)
