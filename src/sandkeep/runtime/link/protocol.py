"""Frames, pure: u32 big-endian length of what follows, u8 kind, payload. What a guest sends is bounded and never trusted."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from sandkeep.errors import BadArgument, GuestLied, SandkeepError, by_code
from sandkeep.runtime.link.told import Told

JSON, STDOUT, STDERR, DATA, PART = range(5)
KINDS = {STDOUT: "stdout", STDERR: "stderr", DATA: "data"}
MAX_FRAME = (1 << 20) + (64 << 10)
MAX_JSON = 32 << 20
MAX_PARTS = 64
PIECE = 256 << 10
QUICK = 60.0
GRACE = 15.0  # a guest answers 2 s after a time-out at the latest
SLOWEST = 16 << 10  # bytes a second that whoever moves many must reach
TIMED = frozenset(["run", "wait"])
OPEN_ENDED = TIMED | {"start", "attach", "stdin", "file_watch"}
GOES_ON = frozenset(["file_move", "file_remove"])  # they say so every few seconds
LONGEST = 3600.0
TICK = 1.0
ROOM = 32 << 10  # a new connection takes as much at once
_HEAD = struct.Struct("!IB")


class Host(Protocol):
    """Who knows more of a sandbox than its socket tells."""

    def absent(self) -> SandkeepError:
        """Why nobody answers."""

    def undone(self) -> bool:
        """Whether an operation is under way, or was when its process died."""

    def mend(self) -> None:
        """Finish or undo what a dead process left. Blocking."""


class Patience:
    """How long a guest may take when it is its turn; bytes that move give time back, unless the `whole` is limited."""

    def __init__(self, seconds: float | None, whole: bool = False) -> None:
        self.seconds = seconds
        self._left = seconds
        self._whole = whole
        self._waited = 0.0

    @property
    def tick(self) -> float:
        """The longest to wait before another look round."""
        return TICK if self._left is None else max(0.0, min(TICK, self._left))

    def spend(self, waited: float, lent: float, moved: int) -> bool:
        """Whether there is any left. `lent` of the time it was not the guest's turn."""
        if self._left is None or self.seconds is None:
            return True
        self._waited += waited
        if self._whole:
            self._left -= waited
        else:
            self._left = min(self.seconds, self._left - waited + lent + moved / SLOWEST)
        return self._left > 0

    def renew(self) -> None:
        """The guest said that it goes on, which it may do for an hour."""
        if self._waited < LONGEST:
            self._left = self.seconds


def patience(op: str, fields: dict[str, Any], seconds: float | None) -> Patience:
    """A request with a time-out of its own is bounded by that as a whole."""
    limit = fields.get("timeout")
    if op in TIMED and not fields.get("background") and isinstance(limit, (int, float)):
        return Patience(limit + GRACE, whole=True)
    return Patience(seconds)


def request(op: str, fields: dict[str, Any]) -> bytes:
    text = json.dumps({**fields, "op": op}, separators=(",", ":")).encode("ascii")
    if len(text) > MAX_JSON:
        raise BadArgument(
            f"a request of {len(text)} bytes is too large: {MAX_JSON} is the most",
            "give large data as stdin or write it to a file",
        )
    pieces = [text[at : at + (1 << 20)] for at in range(0, len(text), 1 << 20)]
    return b"".join(frame(PART, piece) for piece in pieces[:-1]) + frame(JSON, pieces[-1])


def frame(kind: int, payload: bytes) -> bytes:
    return _HEAD.pack(len(payload) + 1, kind) + payload


def data_frames(data: bytes) -> Iterator[bytes]:
    """A piece of a request's data, cut to size. An empty piece is none: the end has its own frame."""
    for at in range(0, len(data), PIECE):
        yield frame(DATA, bytes(data[at : at + PIECE]))


def body_frames(body: Iterable[bytes]) -> Iterator[bytes]:
    """A request's data with the empty frame that ends it."""
    for data in body:
        yield from data_frames(data)
    yield END


END = frame(DATA, b"")
LEAVE = frame(JSON, b'{"op":"leave"}')


class Reader:
    """Bytes in, events out: ("stdout" | "stderr" | "data", bytes), and ("text", bytes) of JSON that nobody has decoded yet."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> None:
        self._buffer += data

    @property
    def empty(self) -> bool:
        return not self._buffer

    def rest(self) -> bytes:
        """What follows the last event, raw."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        return rest

    def next(self) -> tuple[str, bytes] | None:
        while len(self._buffer) >= 5:
            length, kind = _HEAD.unpack_from(self._buffer)
            if not 1 <= length <= MAX_FRAME or kind > PART:
                raise GuestLied(f"the guest sent a frame of {length} bytes of kind {kind}", "kill this sandbox")
            if len(self._buffer) < 4 + length:
                return None
            payload = bytes(memoryview(self._buffer)[5 : 4 + length])
            del self._buffer[: 4 + length]
            if not payload and kind != DATA:
                raise GuestLied("the guest sent a frame of nothing", "kill this sandbox")
            if kind in KINDS:
                return KINDS[kind], payload
            self._parts.append(payload)
            self._size += len(payload)
            if self._size > MAX_JSON or len(self._parts) > MAX_PARTS:
                raise GuestLied(
                    f"the guest's answer is larger than {MAX_JSON} bytes or {MAX_PARTS} parts", "ask for less"
                )
            if kind == JSON:
                text = b"".join(self._parts)
                self._parts, self._size = [], 0
                return "text", text
        return None


def answer(value: dict[str, Any]) -> Told:
    """The answer without its mark, or the error that it is."""
    if value.get("ok") is True:
        return Told((name, inner) for name, inner in value.items() if name != "ok")
    code, message = value.get("code"), value.get("message")
    kind = by_code(code) if isinstance(code, str) else SandkeepError
    more = {"errno": value["errno"]} if isinstance(value.get("errno"), int) else {}
    raise kind(str(message)[:2000], **more)
