"""Process 1: binds the socket, accepts clients, reaps whoever dies, sleeps and wakes.

Started as `python3 -I -S -B -X utf8 -c "…; from guest.main import main; main()"` with this folder as package `guest`.
"""

from __future__ import annotations

import gc
import os
import socket
import sys

from . import files, house, jobs, ops, proc, spawn
from .loop import READ, Loop
from .numbers import Numbers
from .processes import Table
from .session import Session
from .starting import Spare
from .wire import Connection

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional, Set, Tuple

    from .egress import Egress
    from .tunnel import Tunnel
    from .watch import Watch

RUN = "/.sandkeep/run"
_WAKE_POLL = 0.02
_ACCEPT_PAUSE = 0.05


class Guest:
    def __init__(self, run: str) -> None:
        spawn.reserve()
        self.run = run
        self.loop = Loop()
        self.session = Session()
        self.table = Table(self.loop)
        self.numbers = Numbers(run)
        self.spare = Spare(self)
        self.table.on_other = self.spare.reaped
        self.boot = os.urandom(16).hex()
        self.wake_token: Optional[str] = None
        self.stopped: Set[int] = set()
        self.holders: Set[house.Hold] = set()
        self.tunnels: Set[Tunnel] = set()
        self.watches: Dict[str, Watch] = {}  # by the names that clients gave them
        self.egress: Optional[Egress] = None
        self._waiting: List[Tuple[Connection, Dict[str, Any]]] = []
        self._runs = 0
        self._listener: Optional[socket.socket] = None
        self._clients: Set[Connection] = set()
        self.listen()

    def next_run(self) -> str:
        self._runs += 1
        return "{}-{}".format(self.boot[:12], self._runs)

    def listen(self) -> None:
        """The socket has its name only once it can be connected to."""
        os.chdir(self.run)  # the folder's path may be longer than a socket's name can be
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.setblocking(False)
        if os.path.lexists("guest.sock"):
            os.unlink("guest.sock")
        mask = os.umask(0o177)
        listener.bind("guest.sock")
        os.umask(mask)
        listener.listen(256)
        os.chdir("/")
        self._listener = listener
        self.loop.watch(listener.fileno(), READ, self._accept)

    def _accept(self, _mask: int) -> None:
        listener = self._listener
        if listener is None:
            return
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError:  # too many descriptors: let some be closed first
            self.loop.change(listener.fileno(), 0)
            self.loop.later(_ACCEPT_PAUSE, self._accept_again)
            return
        conn = Connection(self.loop, sock, self._serve)
        conn.on_close = self._clients.discard
        self._clients.add(conn)

    def _accept_again(self) -> None:
        if self._listener is not None:
            self.loop.change(self._listener.fileno(), READ)

    def _serve(self, conn: Connection, request: Dict[str, Any]) -> None:
        if self.holders and request.get("op") in ops.HELD:
            conn.pause(True)
            self._waiting.append((conn, request))
        else:
            ops.serve(self, conn, request)

    def release(self, holder: house.Hold) -> None:
        self.holders.discard(holder)
        if not self.holders:
            waiting, self._waiting = self._waiting, []
            for conn, request in waiting:
                if not conn.closed:
                    ops.serve(self, conn, request)
                    conn.pause(False)

    @property
    def still(self) -> bool:
        """Nothing may be started now."""
        return bool(self.holders or self.stopped) or self._listener is None

    def file_tasks(self) -> bool:
        return any(isinstance(conn.task, (files.Read, files.Write, jobs.Job)) for conn in self._clients)

    def _close(self) -> None:
        """The socket's name goes last: who sees it gone knows that nothing is open."""
        for conn in list(self._clients):
            conn.close()
        if self._listener is not None:
            self.loop.forget(self._listener.fileno())
            self._listener.close()
            self._listener = None
            os.unlink(os.path.join(self.run, "guest.sock"))

    def sleep(self) -> None:
        if self._listener is None:
            return
        self.spare.drop()
        self.session.clean()
        self.session.secrets = {}
        for conn in list(self._clients):
            conn.close()
        for tunnel in list(self.tunnels):
            tunnel.close()
        gc.collect()  # what ended commands wrote is held in cycles only
        self._close()
        self.loop.later(_WAKE_POLL, self._wake)

    def _wake(self) -> None:
        path = os.path.join(self.run, "wake")
        try:
            with open(path, "rb") as source:
                token = source.read(256)
            os.unlink(path)
        except FileNotFoundError:
            self.loop.later(_WAKE_POLL, self._wake)
            return
        self.wake_token = token.decode("utf-8", "replace")
        self.numbers.read()
        self.listen()

    def shutdown(self) -> None:
        self._close()
        proc.kill(proc.others(), 9)
        self.loop.stopped = True


def main() -> None:
    guest = Guest(os.environ.get("SANDKEEP_RUN", RUN))
    os.environ.clear()
    guest.loop.run()
    sys.stdout.flush()
    os._exit(0)
