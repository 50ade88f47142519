"""Process 1: takes clients in, reaps whoever dies, sleeps and wakes.

Started as `python3 -I -S -B -X utf8 -c "…; from guest.main import main; main()"` with this folder as package `guest`.
"""

from __future__ import annotations

import gc
import os
import socket
import sys

from . import door, house, ops, proc, spawn
from .loop import Loop
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
_SOON = 0.005


class Guest:
    def __init__(self, run: str) -> None:
        spawn.reserve()
        self.loop = Loop()
        self.session = Session()
        self.table = Table(self.loop)
        self.numbers = Numbers(run)
        self.spare = Spare(self)
        self.table.on_other = self.spare.reaped
        self.boot = os.urandom(16).hex()
        self.asleep = False
        self.stopped: Set[int] = set()
        self.leaving = False  # it is the guest that hangs up
        self.holders: Set[house.Hold] = set()
        self.asides: Set[str] = set()  # what is being written under a name of its own, until it gets the right one
        self.tunnels: Set[Tunnel] = set()
        self.watches: Dict[str, Watch] = {}  # by the names that clients gave them
        self.egress: Optional[Egress] = None
        self._waiting: List[Tuple[Connection, Dict[str, Any]]] = []
        self._runs = 0
        self._clients: Set[Connection] = set()
        self._door = door.find(self.loop, run, self._take, self._woken)

    def next_run(self) -> str:
        self._runs += 1
        return "{}-{}".format(self.boot[:12], self._runs)

    def _take(self, sock: socket.socket) -> None:
        conn = Connection(self.loop, sock, self._serve)
        conn.on_close = self._clients.discard
        self._clients.add(conn)

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
        return bool(self.holders or self.stopped) or self.asleep

    def file_tasks(self) -> bool:
        return any(conn.task is not None and conn.task.in_files for conn in self._clients)

    @property
    def can_sleep(self) -> bool:
        return self._door.can_sleep

    def sleep(self, asked: Connection) -> None:
        """Who asked reads the end of its connection: then nothing of the host is open here any more."""
        if asked.unsent:
            self.loop.later(_SOON, lambda: self.sleep(asked))
            return
        if asked.closed:
            return
        self.asleep = True
        self._door.sleep()
        self.spare.drop()
        self.session.clean()
        self.session.secrets = {}
        self._hang_up(but=asked)
        for tunnel in list(self.tunnels):
            tunnel.close()
        gc.collect()  # what ended commands wrote is held in cycles only
        asked.close()

    def _woken(self) -> None:
        self.asleep = False
        self.numbers.read()

    def _hang_up(self, but: Optional[Connection] = None) -> None:
        self.leaving = True
        for conn in list(self._clients):
            if conn is not but:
                conn.close()
        self.leaving = False

    def shutdown(self) -> None:
        self._hang_up()
        self._door.close()
        proc.kill(proc.others(), 9)
        self.loop.stopped = True


def main() -> None:
    guest = Guest(os.environ.get("SANDKEEP_RUN", RUN))
    os.environ.clear()
    guest.loop.run()
    sys.stdout.flush()
    os._exit(0)
