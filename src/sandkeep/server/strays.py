"""Copies that a sandbox left behind when it went to another host, or was killed there: found and removed.

A copy that still runs, since this host was given up while it lived, has what came after the checkpoint that the other went on
from: it is put to sleep first, and the event `left_behind` names the checkpoint. All of this only as this process's one operation
on that sandbox, so nothing goes that is being woken here.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from sqlalchemy import and_, or_, select

from sandkeep.model import State
from sandkeep.sandbox import pausing
from sandkeep.sandbox._async.bridge import blocking
from sandkeep.sandbox.machine import Machine
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
        settled = (SessionState.RUNNING, SessionState.PAUSED)
        elsewhere = and_(rows.c.state.in_(settled), rows.c.host != self._keeper.host)
        killed = and_(rows.c.state == SessionState.KILLED, or_(rows.c.removed, rows.c.host != self._keeper.host))
        with self._services.db.read() as connection:
            wanted = select(rows.c.id).where(rows.c.id.in_(ids), or_(elsewhere, killed))
            return list(connection.execute(wanted).scalars())

    async def _remove(self, id: str) -> Session:
        services = self._services
        session = await services.db.call(services.sessions.get, id)
        if await services.db.call(self._left, [id]):
            machine = await blocking(services.hands.machine, session)
            if session.state is not SessionState.KILLED and (saved := await blocking(self._save, machine)) is not None:
                host = self._keeper.host
                await services.db.call(services.log.event, id, "left_behind", host=host, checkpoint=saved)
            await services.hands.discard(session)
        return session

    @staticmethod
    def _save(machine: Machine) -> str | None:
        """The checkpoint that a running copy now sleeps in; None if it slept already."""
        with machine.held() as record:
            if record.state is State.PAUSED or not machine.alive(record):
                return None
        return pausing.pause(machine, comment="left behind when another host went on").id
