"""Copies that a sandbox left behind when it went to another host, or was killed there: found and removed.

Only a sleeping copy goes, and only as this process's one operation on that sandbox, so none that is being woken here.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from sqlalchemy import and_, or_, select

from sandkeep.layers.pool import throw_away
from sandkeep.model import State
from sandkeep.sandbox._async.bridge import blocking
from sandkeep.sandbox.machine import Machine
from sandkeep.sandbox.sweeping import discard_unused, sweep_trash
from sandkeep.server.services import Services
from sandkeep.sessions import Session, SessionState
from sandkeep.sessions.tables import sessions as rows

_log = logging.getLogger(__name__)
_AT_ONCE = 500


class Strays:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._keeper = services.keeper

    async def forever(self) -> None:
        while True:
            try:
                await self.sweep()
            except Exception as error:
                _log.warning("removing strays failed, will be tried again: %s", error)
            await asyncio.sleep(self._services.settings.sweep_interval)

    async def sweep(self) -> None:
        here = await blocking(self._services.hands.home.ids)
        for at in range(0, len(here), _AT_ONCE):
            for id in await self._services.db.call(self._left, here[at : at + _AT_ONCE]):
                await self._keeper._alone(id, partial(self._remove, id))

    def _left(self, ids: list[str]) -> list[str]:
        elsewhere = and_(rows.c.state == SessionState.RUNNING, rows.c.host != self._keeper.host)
        killed = and_(rows.c.state == SessionState.KILLED, or_(rows.c.removed, rows.c.host != self._keeper.host))
        with self._services.db.read() as connection:
            wanted = select(rows.c.id).where(rows.c.id.in_(ids), or_(elsewhere, killed))
            return list(connection.execute(wanted).scalars())

    async def _remove(self, id: str) -> Session:
        if await self._services.db.call(self._left, [id]):
            await blocking(self._drop, Machine(self._services.hands.home, id))
        return await self._services.db.call(self._services.sessions.get, id)

    @staticmethod
    def _drop(machine: Machine) -> None:
        """Nothing of it runs, so nothing is stopped: on one machine the control group of this id is the living copy's."""
        with machine.held() as record:
            if record.state is not State.PAUSED:
                return
            throw_away(machine.folder, machine.home.trash)
        discard_unused(machine.home)
        sweep_trash(machine.home)
