"""A process's streams as the guest holds them: output from a pipe or terminal into a ring, input from a buffer."""

from __future__ import annotations

import os

from .loop import BROKEN, READ, WRITE
from .ring import Ring

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Optional

    from .loop import Loop

_CHUNK = 64 << 10
_HIGH = 256 << 10


class Output:
    """Reads as fast as its slowest follower allows; with nobody following, as fast as it comes."""

    def __init__(self, loop: Loop, fd: int, changed: Callable[[], None], room: Callable[[], int]) -> None:
        self.ring = Ring()
        self.open = True
        self.paused = False
        self._loop = loop
        self._fd = fd
        self._changed = changed
        self._room = room
        os.set_blocking(fd, False)
        loop.watch(fd, READ, self._event)

    def _event(self, _mask: int) -> None:
        self.drain(once=True)
        self._changed()

    def drain(self, once: bool = False) -> bool:
        """Take what is there; True if anything was."""
        taken = False
        while self.open:
            room = self._room()
            if room <= 0:
                self._pause(True)
                break
            try:
                data = os.read(self._fd, min(room, _CHUNK))
            except BlockingIOError:
                break
            except OSError:  # EIO: the terminal's other side is closed
                data = b""
            if not data:
                self.close()
                return True
            taken = True
            self.ring.append(data)
            if once:
                break
        return taken

    def resume(self) -> None:
        if self.paused and self._room() > 0:
            self._pause(False)

    def _pause(self, paused: bool) -> None:
        if paused == self.paused or not self.open:
            return
        self.paused = paused
        if paused:  # not mask 0: a pipe whose writers have gone would report it without end
            self._loop.forget(self._fd)
        else:
            self._loop.watch(self._fd, READ, self._event)

    def close(self) -> None:
        if self.open:
            self.open = False
            self.paused = False
            self._loop.forget(self._fd)
            os.close(self._fd)


class Input:
    """What is to be written into a process; more is welcome while it is not full."""

    def __init__(self, loop: Loop, fd: int) -> None:
        self.open = True
        self.on_room: Optional[Callable[[], None]] = None
        self._loop = loop
        self._fd = fd
        self._buffer = bytearray()
        self._ending = False
        self._watched = False
        self._held = False
        os.set_blocking(fd, False)

    def hold(self) -> None:
        """Keep what is written, until `release`."""
        self._held = True

    def release(self) -> None:
        self._held = False
        self._event(WRITE)

    def reopen(self, fd: int) -> None:
        """Into another pipe. Only while it is held: nothing was written into the one before."""
        os.close(self._fd)
        self._fd = fd
        os.set_blocking(fd, False)

    @property
    def full(self) -> bool:
        return len(self._buffer) >= _HIGH

    def write(self, data: bytes) -> None:
        if self.open and not self._ending:
            self._buffer += data
            self._flush()

    def end(self) -> None:
        """Close, once all that was written has been taken."""
        self._ending = True
        self._flush()

    def close(self) -> None:
        if not self.open:
            return
        self.open = False
        if self._watched:
            self._loop.forget(self._fd)
        os.close(self._fd)
        self._buffer.clear()
        self._tell()

    def _event(self, mask: int) -> None:
        if mask & BROKEN and not mask & WRITE:
            self.close()
            return
        self._flush()
        if not self.full:
            self._tell()

    def _tell(self) -> None:
        if self.on_room is not None:
            self.on_room()

    def _flush(self) -> None:
        if not self.open or self._held:
            return
        try:
            while self._buffer:
                sent = os.write(self._fd, memoryview(self._buffer)[:_CHUNK])
                del self._buffer[:sent]
        except BlockingIOError:
            pass
        except OSError:  # EPIPE: nobody reads any more
            self.close()
            return
        if self._ending and not self._buffer:
            self.close()
        elif bool(self._buffer) != self._watched:
            self._watched = bool(self._buffer)
            if self._watched:
                self._loop.watch(self._fd, WRITE, self._event)
            else:
                self._loop.forget(self._fd)
