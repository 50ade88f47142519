"""What processes are called outside. A number is one process's for as long as the sandbox lives, and is never given again.

It is the pid, unless that has been a number before: a sandbox that wakes without its memory begins its pids anew. Then it is one
that no pid can be. What was given is noted in the run folder, which outlives process 1, and goes with the session into whatever
is made from this sandbox.
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
_LINES = 4096  # of the note, before it is written anew in short


class Numbers:
    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, "numbers")
        self._pids = bytearray()  # a bit for each pid that is or was a number
        self._own = PIDS  # the highest number that was no pid
        self._lines = 0
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
        if self._note(number):
            try:
                self._append(number)
            except OSError:
                self._lines = _LINES  # the next one writes all

    def saved(self) -> Dict[str, Any]:
        return {"pids": binascii.hexlify(zlib.compress(bytes(self._pids))).decode(), "own": self._own}

    def add(self, saved: Dict[str, Any]) -> None:
        """What another process 1 gave, or this one in a life that it does not remember."""
        pids, own = _checked(saved)
        self._merge(pids, own)
        try:
            self._write()
        except OSError:
            self._lines = _LINES

    def read(self) -> None:
        """What the note says has been given. A last line that was not written to its end is of a process that never began."""
        try:
            with open(self._path, encoding="ascii", errors="replace") as source:
                *lines, torn = source.read().split("\n")
        except FileNotFoundError:
            return
        for line in lines:
            pids, _, own = line.partition(" ")
            try:
                if own:
                    self._merge(*_checked({"pids": pids, "own": int(own)}))
                else:
                    self._note(int(pids))
            except (ValueError, Problem):
                continue  # somebody inside wrote it: they confuse nobody but themselves
        self._lines = _LINES if torn else len(lines)

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

    def _append(self, number: int) -> None:
        if self._lines >= _LINES:
            self._write()
            return
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, b"%d\n" % number)
        finally:
            os.close(fd)
        self._lines += 1

    def _write(self) -> None:
        fresh = self._path + ".new"
        with open(fresh, "w", encoding="ascii") as target:
            target.write("{pids} {own}\n".format(**self.saved()))
        os.rename(fresh, self._path)
        self._lines = 1


def _checked(saved: Dict[str, Any]) -> Any:
    try:
        packed, own = binascii.unhexlify(saved["pids"]), saved["own"]
        opener = zlib.decompressobj()
        pids = opener.decompress(packed, PIDS // 8)
    except (KeyError, TypeError, ValueError, zlib.error):
        raise Problem(BAD_ARGUMENT, "numbers of processes can't be read")
    if not opener.eof or isinstance(own, bool) or not isinstance(own, int) or not PIDS <= own < MOST:
        raise Problem(BAD_ARGUMENT, "numbers of processes can't be read")
    return pids, own
