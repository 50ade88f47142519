"""The last bytes of a stream, by position from its start. What was overwritten is counted, never guessed."""

from __future__ import annotations

CAPACITY = 1 << 20


class Ring:
    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        self.start = 0
        self._bytes = bytearray()

    @property
    def end(self) -> int:
        return self.start + len(self._bytes)

    def append(self, data: bytes) -> None:
        self._bytes += data
        self.shrink(self.capacity)

    def shrink(self, capacity: int) -> None:
        excess = len(self._bytes) - capacity
        if excess > 0:
            del self._bytes[:excess]
            self.start += excess

    def read(self, position: int, count: int) -> bytes:
        """From position on, which must not lie before start."""
        at = position - self.start
        return bytes(memoryview(self._bytes)[at : at + count])
