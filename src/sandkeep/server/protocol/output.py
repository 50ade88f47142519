"""An execution's output on its way to a client: decoded across reads, gathered for a moment, bounded, and sent once. No I/O.

Bytes of a stream become text whose characters are never cut. Text is held back until its line ends or a moment has passed,
so that what a program prints at once arrives as one event. What was sent is kept for a while, for a client that comes back
and says how much of it arrived.
"""

from __future__ import annotations

import codecs
from collections import deque

STREAMS = ("stdout", "stderr")
MOMENT = 0.02
LARGEST_EVENT = 64 << 10
MOST_WAITING = 1 << 20
MOST_KEPT = 4 << 20

Piece = tuple[str, str]


class Output:
    def __init__(self) -> None:
        self.read = dict.fromkeys(STREAMS, 0)
        """Bytes taken from the process: where to go on reading."""
        self.sent = dict.fromkeys(STREAMS, 0)
        """UTF-8 bytes of text given to a client."""
        self._decoders = {stream: codecs.getincrementaldecoder("utf-8")("replace") for stream in STREAMS}
        self._open: Piece | None = None
        self._waiting: deque[Piece] = deque()
        self._kept: deque[Piece] = deque()
        self._waiting_size = self._kept_size = 0

    @property
    def full(self) -> bool:
        return self._waiting_size >= MOST_WAITING

    @property
    def gathering(self) -> bool:
        """Text is held back that `flush` would let go."""
        return self._open is not None

    @property
    def unsent(self) -> bool:
        return bool(self._waiting) or self._open is not None

    def take(self, stream: str, data: bytes) -> None:
        self.read[stream] += len(data)
        self._gather(stream, self._decoders[stream].decode(data))

    def end(self) -> None:
        for stream, decoder in self._decoders.items():
            self._gather(stream, decoder.decode(b"", True))
        self.flush()

    def flush(self) -> None:
        if self._open is not None:
            self._queue(self._open)
            self._open = None

    def next(self) -> Piece | None:
        """The piece to send now; it stays the next one until `done`."""
        return self._waiting[0] if self._waiting else None

    def done(self) -> None:
        piece = self._waiting.popleft()
        size = _size(piece)
        self._waiting_size -= size
        self.sent[piece[0]] += size
        self._kept.append(piece)
        self._kept_size += size
        while self._kept_size > MOST_KEPT:
            self._kept_size -= _size(self._kept.popleft())

    def rewind(self, received: dict[str, int]) -> bool:
        """Put back what was sent and did not arrive. False, and nothing put back, if that is no longer known."""
        back: list[Piece] = []
        left = {stream: self.sent[stream] - received[stream] for stream in STREAMS}
        kept = deque(self._kept)
        while any(left.values()):
            if not kept:
                return False
            piece = kept.pop()
            stream, size = piece[0], _size(piece)
            if left[stream] == 0:
                continue
            if size > left[stream]:
                return False
            left[stream] -= size
            back.append(piece)
        gone = {id(piece) for piece in back}
        self._kept = deque(piece for piece in self._kept if id(piece) not in gone)
        for piece in back:
            size = _size(piece)
            self._kept_size -= size
            self._waiting_size += size
            self.sent[piece[0]] -= size
            self._waiting.appendleft(piece)
        return True

    def _gather(self, stream: str, text: str) -> None:
        if not text:
            return
        if self._open is not None and self._open[0] != stream:
            self.flush()
        held = self._open[1] if self._open else ""
        self._open = (stream, held + text)
        if text.endswith("\n") or len(held) + len(text) >= LARGEST_EVENT:
            self.flush()

    def _queue(self, piece: Piece) -> None:
        self._waiting.append(piece)
        self._waiting_size += _size(piece)


def _size(piece: Piece) -> int:
    return len(piece[1].encode())
