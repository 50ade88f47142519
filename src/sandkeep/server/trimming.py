"""Memory that is free goes back to the machine. glibc keeps what a busy hour took, in pieces between what is still used, until it
is asked; other C libraries give it back by themselves, or not at all.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from pathlib import Path

EVERY = 30.0
_WORTH = 8 << 20
_PAGE = os.sysconf("SC_PAGE_SIZE")
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


class Trimmer:
    """Asks when the process has grown since it last asked: it costs a few milliseconds, and helps only then."""

    def __init__(self) -> None:
        self._last = 0

    async def forever(self) -> None:
        while _trim is not None:
            await asyncio.sleep(EVERY)
            await asyncio.to_thread(self.look)

    def look(self) -> None:
        if _trim is not None and resident() > self._last + _WORTH:
            _trim(0)
            self._last = resident()
