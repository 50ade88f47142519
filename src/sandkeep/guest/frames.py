"""The wire format: u32 big-endian length of what follows, u8 kind, payload. Pure; the host has its own reader.

A JSON object longer than one frame is sent as PART frames closed by a JSON frame.
"""

from __future__ import annotations

import json
import struct

from .problems import BAD_ARGUMENT, GUEST_PROTOCOL, Problem

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional, Tuple

JSON, STDOUT, STDERR, DATA, PART = range(5)
CHUNK = 64 << 10
MAX_FRAME = (1 << 20) + (64 << 10)
MAX_JSON = 32 << 20
_PIECE = 1 << 20
_HEAD = struct.Struct("!IB")


def encode(kind: int, payload: bytes) -> bytes:
    return _HEAD.pack(len(payload) + 1, kind) + payload


def encode_json(value: Dict[str, Any]) -> bytes:
    text = json.dumps(value, separators=(",", ":")).encode("ascii")
    if len(text) <= _PIECE:
        return encode(JSON, text)
    if len(text) > MAX_JSON:
        raise Problem(BAD_ARGUMENT, "the answer is larger than {} bytes: ask for less".format(MAX_JSON))
    pieces = [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]
    return b"".join(encode(PART, piece) for piece in pieces[:-1]) + encode(JSON, pieces[-1])


def decode_json(text: bytes) -> Dict[str, Any]:
    try:
        value = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError):
        raise Problem(GUEST_PROTOCOL, "a request is not JSON")
    if not isinstance(value, dict):
        raise Problem(GUEST_PROTOCOL, "a request must be a JSON object")
    return value


class Decoder:
    """Bytes in, (kind, payload) out; parts are joined here."""

    def __init__(self) -> None:
        self.buffer = bytearray()
        self._parts: List[bytes] = []
        self._size = 0

    def next(self) -> Optional[Tuple[int, bytes]]:
        while len(self.buffer) >= 5:
            length, kind = _HEAD.unpack_from(self.buffer)
            if not 1 <= length <= MAX_FRAME or kind > PART:
                raise Problem(GUEST_PROTOCOL, "a frame of {} bytes of kind {}".format(length, kind))
            if len(self.buffer) < 4 + length:
                return None
            payload = bytes(memoryview(self.buffer)[5 : 4 + length])
            del self.buffer[: 4 + length]
            if kind == PART:
                self._size += len(payload)
                if self._size > MAX_JSON:
                    raise Problem(GUEST_PROTOCOL, "a request is larger than {} bytes".format(MAX_JSON))
                self._parts.append(payload)
                continue
            if self._parts:
                if kind != JSON:
                    raise Problem(GUEST_PROTOCOL, "a request was begun and not finished")
                payload = b"".join(self._parts) + payload
                self._parts, self._size = [], 0
            return kind, payload
        return None
