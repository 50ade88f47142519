"""Whether sandboxes can be made on this machine: doctor's checks, kept for a while."""

from __future__ import annotations

import asyncio
import time

from sandkeep.errors import SandkeepError
from sandkeep.runtime.pick import ready
from sandkeep.sandbox._async.bridge import blocking
from sandkeep.server.settings import Settings

_KEPT = 30.0
_PATIENCE = 10.0


class Readiness:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._looking: asyncio.Task[str] | None = None
        self._until = 0.0

    async def problem(self) -> str:
        """Why none can be made; empty when all is well. The first look may take its time; nobody waits long for it."""
        if self._looking is None or (self._looking.done() and time.monotonic() > self._until):
            self._looking = asyncio.create_task(self._look())
        try:
            return await asyncio.wait_for(asyncio.shield(self._looking), _PATIENCE)
        except TimeoutError:
            return "the runtimes are being looked at"

    async def _look(self) -> str:
        try:
            return await blocking(ready, self._settings.runtime, self._settings.home)
        except SandkeepError as error:
            return error.code
        finally:
            self._until = time.monotonic() + _KEPT

    async def stop(self) -> None:
        if self._looking is not None:
            await asyncio.gather(self._looking, return_exceptions=True)
