"""A client's connection: frames in, frames out, one request at a time, bounded buffers both ways."""

from __future__ import annotations

from . import frames
from .loop import BROKEN, READ, WRITE
from .problems import GUEST_PROTOCOL, Problem

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from socket import socket
    from typing import Any, Dict, Optional

    from .loop import Loop

HIGH = 256 << 10
_CHUNK = 64 << 10  # above 128 KiB every buffer is a mapping of its own, and slow
_SOON = 0.005


class Task:
    """Who answers the request at hand, when it is not answered at once."""

    in_files = False  # it holds something of the root as it is mounted now

    def frame(self, kind: int, payload: bytes) -> None:
        raise Problem(GUEST_PROTOCOL, "no frame of kind {} was expected".format(kind))

    def drained(self) -> None:
        """The client has read; there is room for more."""

    def gone(self) -> None:
        """The client has left."""


class Connection:
    def __init__(self, loop: Loop, sock: socket, serve: Callable[[Connection, Dict[str, Any]], None]) -> None:
        self.loop = loop
        self.sock = sock
        self.task: Optional[Task] = None
        self.body = False  # data frames of the request are still to come
        self.closed = False
        self.on_close: Optional[Callable[[Connection], None]] = None
        self._serve = serve
        self._in = frames.Decoder()
        self._out = bytearray()
        self._paused = False
        self._mask = READ
        self._parsing = False
        self._last = False
        self._held = False
        sock.setblocking(False)
        loop.watch(sock.fileno(), READ, self._event)

    @property
    def full(self) -> bool:
        return len(self._out) >= HIGH

    @property
    def unsent(self) -> bool:
        return bool(self._out) and not self.closed

    def send(self, kind: int, payload: bytes) -> None:
        self._send(frames.encode(kind, payload))

    def send_json(self, value: Dict[str, Any]) -> None:
        self._send(frames.encode_json(value))

    def send_soon(self, value: Dict[str, Any]) -> None:
        """With the next frame if one comes in a moment, which spares a short request a wake-up of its client."""
        self._out += frames.encode_json(value)
        self._held = True
        self.loop.later(_SOON, self._release)

    def _release(self) -> None:
        if self._held and not self.closed:
            self._held = False
            self._flush()

    def finish(self, answer: Dict[str, Any]) -> None:
        """The last frame of an answer; the connection is free for the next request."""
        self.task = None
        self._paused = False
        try:
            self.send_json(answer)
        except Problem as problem:
            self.send_json(problem.answer())
        self._remask()
        self._parse()

    def pause(self, paused: bool) -> None:
        """Stop or go on taking frames from the client."""
        if self.closed:
            return
        self._paused = paused
        self._remask()
        if not paused:
            self._parse()

    def detach(self) -> bytes:
        """Leave the socket to somebody else; gives what was read and not yet used."""
        self.loop.forget(self.sock.fileno())
        self.closed = True
        if self.on_close is not None:
            self.on_close(self)
        return bytes(self._in.buffer)

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.loop.forget(self.sock.fileno())
        self.sock.close()
        task, self.task = self.task, None
        if task is not None:
            task.gone()
        if self.on_close is not None:
            self.on_close(self)

    def _event(self, mask: int) -> None:
        if mask & WRITE:
            self._flush()
            if not self.closed and not self.full:
                if self.task is not None:
                    self.task.drained()
                self._parse()
        if self.closed:
            return
        if mask & READ and not self._paused:
            self._read()
        elif mask & BROKEN:
            self.close()

    def _read(self) -> None:
        try:
            data = self.sock.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        self._in.buffer += data
        self._parse()

    def _parse(self) -> None:
        if self._parsing:
            return
        self._parsing = True
        try:
            while not self.closed and not self._paused and not self._last and not self.full:
                frame = self._in.next()
                if frame is None:
                    break
                self._take(*frame)
        except Problem as problem:
            if problem.code != GUEST_PROTOCOL or self.closed:
                raise
            task, self.task = self.task, None
            if task is not None:
                task.gone()
            self._last = True
            self.send_json(problem.answer())
            if not self._out:
                self.close()
        finally:
            self._parsing = False

    def _take(self, kind: int, payload: bytes) -> None:
        if self.task is not None:
            self.task.frame(kind, payload)
        elif kind == frames.JSON and not self.body:
            self._serve(self, frames.decode_json(payload))
        elif kind == frames.DATA and self.body:
            self.body = bool(payload)
        else:
            raise Problem(GUEST_PROTOCOL, "a frame of kind {} where a request was expected".format(kind))

    def _send(self, data: bytes) -> None:
        if self.closed:
            return
        waiting = bool(self._out) and not self._held
        self._held = False
        self._out += data
        if not waiting:
            self._flush()

    def _flush(self) -> None:
        try:
            while self._out:
                sent = self.sock.send(memoryview(self._out)[: 4 * HIGH])
                del self._out[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self.loop.later(0, self.close)
            self._out.clear()
            return
        if self._last and not self._out:
            self.close()
        else:
            self._remask()

    def _remask(self) -> None:
        if self.closed:
            return
        mask = (0 if self._paused or self._last or self.full else READ) | (WRITE if self._out else 0)
        if mask != self._mask:
            self._mask = mask
            self.loop.change(self.sock.fileno(), mask)
