"""What processes are called outside. A number is one process's for as long as the sandbox lives, and is never given again.

It is the pid, unless that has been a number before: a sandbox that wakes without its memory begins its pids anew. Then it is one
that no pid can be. What was given is noted in a file of the host's, which outlives process 1, and goes with the session into
whatever is made from this sandbox.

The note is written in place: a bit for each pid, then the highest number that was none. No moment of it is wrong.
"""

from __future__ import annotations

import binascii
import os
import zlib

from .problems import BAD_ARGUMENT, BUSY, Problem

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict

PIDS = 1 << 22  # Linux gives no pid as high
MOST = (1 << 31) - 1
_PLACE = PIDS // 8  # of the highest number in the note


class Numbers:
    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, "numbers")
        self._pids = bytearray()  # a bit for each pid that is or was a number
        self._own = PIDS  # the highest number that was no pid
        self._behind = False  # the note does not have all
        self.read()

    def give(self, pid: int) -> int:
        """A number for a process that begins with this pid."""
        if not self._given(pid):
            number = pid
        elif self._own < MOST:
            number = self._own + 1
        else:
            raise Problem(BUSY, "all numbers of processes have been given")
        self.take(number)
        return number

    def take(self, number: int) -> None:
        """Given from now on, if it was not before. A disk that is full keeps nobody from starting what makes room on it."""
        if not self._note(number):
            return
        if self._behind:
            self._write()
        elif number >= PIDS:
            self._put(_PLACE, self._own.to_bytes(8, "little"))
        else:
            self._put(number // 8, bytes(self._pids[number // 8 : number // 8 + 1]))

    def saved(self) -> Dict[str, Any]:
        return {"pids": binascii.hexlify(zlib.compress(bytes(self._pids))).decode(), "own": self._own}

    def add(self, saved: Dict[str, Any]) -> None:
        """What another process 1 gave, or this one in a life that it does not remember."""
        self._merge(*_checked(saved))
        self._write()

    def read(self) -> None:
        """What the note says has been given; then it has all that is known here. Who writes to it inside confuses nobody but themselves."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return
        try:
            found = os.pread(fd, _PLACE, 0).rstrip(b"\0")
            own = int.from_bytes(os.pread(fd, 8, _PLACE), "little")
        finally:
            os.close(fd)
        self._merge(found, own if own <= MOST else PIDS)
        self._write()

    def _given(self, pid: int) -> bool:
        place, bit = divmod(pid, 8)
        return pid >= PIDS or (place < len(self._pids) and bool(self._pids[place] >> bit & 1))

    def _note(self, number: int) -> bool:
        """True if it is new."""
        if number >= PIDS:
            new = self._own < number <= MOST
            self._own = number if new else self._own
            return new
        if number < 0 or self._given(number):
            return False
        place, bit = divmod(number, 8)
        self._pids.extend(bytes(max(0, place + 1 - len(self._pids))))
        self._pids[place] |= 1 << bit
        return True

    def _merge(self, pids: bytes, own: int) -> None:
        both = int.from_bytes(pids, "little") | int.from_bytes(self._pids, "little")
        self._pids[:] = both.to_bytes(max(len(pids), len(self._pids)), "little")
        self._own = max(self._own, own)

    def _write(self) -> None:
        self._behind = False
        if self._pids:
            self._put(0, bytes(self._pids))
        if self._own > PIDS:
            self._put(_PLACE, self._own.to_bytes(8, "little"))

    def _put(self, place: int, data: bytes) -> None:
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                self._behind |= os.pwrite(fd, data, place) != len(data)
            finally:
                os.close(fd)
        except OSError:
            self._behind = True


def _checked(saved: Dict[str, Any]) -> Any:
    try:
        packed, own = binascii.unhexlify(saved["pids"]), saved["own"]
        opener = zlib.decompressobj()
        pids = opener.decompress(packed, PIDS // 8)
    except (KeyError, TypeError, ValueError, zlib.error):
        raise Problem(BAD_ARGUMENT, "numbers of processes can't be read")
    if not opener.eof or isinstance(own, bool) or not isinstance(own, int) or not PIDS <= own <= MOST:
        raise Problem(BAD_ARGUMENT, "numbers of processes can't be read")
    return pids, own
