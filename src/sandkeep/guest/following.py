"""Clients of a process: who follows its output, feeds its input, waits for its end."""

from __future__ import annotations

from . import frames
from .problems import BAD_ARGUMENT, Problem
from .processes import STREAMS, Follower, Process
from .wire import Task

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Dict, Optional

    from .main import Guest
    from .streams import Input
    from .wire import Connection


class Follow(Task, Follower):
    """A client that reads a process's output live, and may write its input on the same connection."""

    def __init__(self, guest: Guest, conn: Connection, process: Process, at: Dict[int, int], limit: Optional[int],
                 then: Optional[Callable[[], None]] = None, foreground: bool = False, stays: bool = False) -> None:  # fmt: skip
        super().__init__()
        self._guest = guest
        self._conn = conn
        self._process = process
        self._limit = limit
        self._then = then  # once all is told
        self._foreground = foreground  # the process is for this client alone
        self._stays = stays  # it ends with its client only if that says so, or goes in the middle of its input
        self._sent = {1: 0, 2: 0}
        self._dropped = {1: 0, 2: 0}
        self._truncated = False
        self._done = False
        self.at.update(at)
        for stream, output in process.outputs.items():
            if self.at[stream] > output.ring.end:
                raise Problem(BAD_ARGUMENT, "{} has not come as far as {}".format(STREAMS[stream], self.at[stream]))
            self._skip(stream)
        conn.task = self
        process.follow(self)

    def _skip(self, stream: int) -> None:
        missed = self._process.outputs[stream].ring.start - self.at[stream]
        if missed > 0:
            self._dropped[stream] += missed
            self.at[stream] += missed

    def pump(self) -> None:
        if self._done:
            return
        behind = False
        for stream, output in self._process.outputs.items():
            self._skip(stream)
            while self.at[stream] < output.ring.end and not self._conn.full:
                data = output.ring.read(self.at[stream], frames.CHUNK)
                self.at[stream] += len(data)
                self._send(stream, data)
            behind = behind or self.at[stream] < output.ring.end
        self._process.advance()
        if self._process.settled and not behind:
            self._finish()

    def _send(self, stream: int, data: bytes) -> None:
        if self._limit is not None and self._sent[stream] + len(data) > self._limit:
            self._truncated = True
            data = data[: self._limit - self._sent[stream]]
        if data:
            self._sent[stream] += len(data)
            self._conn.send(stream, data)

    def _finish(self) -> None:
        self._done = True
        process = self._process
        process.leave(self)
        if process.input is not None:
            process.input.on_room = None
        if not process.background:
            self._guest.table.forget(process)
        missed = {stream: count for stream, count in self._dropped.items() if count}
        told = {"truncated": self._truncated, "dropped": _by_name(missed), "positions": _by_name(self.at)}
        self._conn.finish({"ok": True, **process.result(), **told})
        if self._then is not None:
            self._then()

    def frame(self, kind: int, payload: bytes) -> None:
        source = self._process.input
        if kind == frames.JSON and self._foreground and frames.decode_json(payload).get("op") == "leave":
            self._stays = False
            self._conn.close()
        elif kind != frames.DATA or not self._conn.body or source is None:
            super().frame(kind, payload)
        elif payload:
            _feed(self._conn, source, payload)
        else:
            self._conn.body = False
            source.end()

    def drained(self) -> None:
        self.pump()

    def gone(self) -> None:
        self._done = True
        self._process.leave(self)
        if self._process.input is not None and self._conn.body:
            self._process.input.on_room = None
            self._process.input.end()
        cut = self._conn.body or not self._stays
        ends = self._foreground and cut and not self._guest.leaving
        if ends and self._process.status is None:
            self._process.end_tree()


class Feed(Task):
    """Data frames of one request into a process's input."""

    def __init__(self, conn: Connection, source: Input) -> None:
        self._conn = conn
        self._source = source
        conn.task = self

    def frame(self, kind: int, payload: bytes) -> None:
        if kind != frames.DATA:
            super().frame(kind, payload)
        elif payload:
            _feed(self._conn, self._source, payload)
        else:
            self._conn.body = False
            self._conn.finish({"ok": True, "open": self._source.open})

    def gone(self) -> None:
        self._source.on_room = None


class Wait(Task):
    """A client that waits for a process to settle. It reads no output, so it holds none back."""

    def __init__(self, conn: Connection, process: Process, timeout: Optional[float]) -> None:
        self._conn = conn
        self._process = process
        self._timer = None if timeout is None else conn.loop.later(timeout, lambda: self._answer(None))
        conn.task = self
        process.on_settled.append(self._answer)

    def _answer(self, _process: Optional[Process]) -> None:
        if self._conn.task is self:
            self.gone()
            self._conn.finish({"ok": True, "running": not self._process.settled, **self._process.result()})

    def gone(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._answer in self._process.on_settled:
            self._process.on_settled.remove(self._answer)


def _feed(conn: Connection, source: Input, payload: bytes) -> None:
    source.write(payload)
    if source.full:
        source.on_room = lambda: _go_on(conn, source)
        conn.pause(True)


def _go_on(conn: Connection, source: Input) -> None:
    source.on_room = None
    conn.pause(False)


def _by_name(counts: Dict[int, int]) -> Dict[str, int]:
    return {STREAMS[stream]: count for stream, count in counts.items()}
