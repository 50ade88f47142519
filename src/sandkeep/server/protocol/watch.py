"""The watch over the protocol's sandboxes on this server: idle ones end or sleep, requests of other servers are answered, and a
client whose sandbox went away by another door (the sweeper, REST, another server) is told.

Idleness counts from the last activity in the row, as for every session; a sandbox in use is not idle. An execution whose
client has gone is in use as long as it writes, is written to, or computes.
"""

from __future__ import annotations

import asyncio
import logging
import time

from sandkeep.errors import SandboxNotFound, SandkeepError, StateConflict
from sandkeep.server.protocol import handoff
from sandkeep.server.protocol.hall import Hall, Stage
from sandkeep.server.protocol.messages import Options, Status
from sandkeep.sessions import Session, SessionState

_S = SessionState
_log = logging.getLogger(__name__)
_EVERY = 2.0
_BUSY_CPU = 0.1


class Watch:
    def __init__(self, hall: Hall) -> None:
        self._hall = hall
        self._services = hall.services
        self._seen = 0
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._seen = await self._services.db.call(handoff.newest, self._services.db)
        self._task = asyncio.create_task(self._forever())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _forever(self) -> None:
        while True:
            try:
                await self.look()
            except SandkeepError as error:
                _log.warning("the watch of WebSocket sandboxes failed, will be tried again: %s", error)
            await asyncio.sleep(min(_EVERY, self._services.settings.sweep_interval))

    async def look(self) -> None:
        services, hall = self._services, self._hall
        rows = await services.db.call(services.sessions.at, services.keeper.host, frozenset({_S.RUNNING}))
        ours = {row.id: (row, options) for row in rows if (options := Options.of(row.metadata)) is not None}
        for event, id in await services.db.call(handoff.requested, services.db, self._seen):
            self._seen = event
            if id in ours:
                hall.spawn(handoff.release(hall, hall.stage(id, ours[id][1])))
        now = await services.db.call(services.db.now)
        for row, options in ours.values():
            await self._idle(row, options, now)
        for stage in list(hall.stages.values()):
            if stage.id not in ours and stage.state == "RUNNING":
                await self._missed(stage)
            elif stage.id not in ours and stage.state == "STOPPED":
                await self._forget(stage)

    async def _idle(self, row: Session, options: Options, now: float) -> None:
        if not options.idle_timeout or now - row.last_activity < options.idle_timeout:
            return
        stage = self._hall.stages.get(row.id)
        if stage is not None and stage.state != "RUNNING":
            return
        if row.id in self._services.keeper.used:
            if stage is None or not await self._forsaken(row, stage):
                return
        elif options.enable_idle_timeout_auto_checkpoint:
            return  # the sweeper's
        stage = self._hall.stage(row.id, options)
        stage.state = "STOPPING"
        self._hall.spawn(self._put_away(row, stage))

    async def _forsaken(self, row: Session, stage: Stage) -> bool:
        """Only an execution that nobody follows holds it, and that has been silent and at rest for the whole time-out."""
        execution, options = stage.execution, stage.options
        if stage.client is not None or execution is None or not execution.running:
            return False
        if time.monotonic() - execution.touched < options.idle_timeout:
            stage.cpu = -1.0
            return False
        if options.enable_checkpoint and row.config["runtime"] != "runsc":
            return False  # sleeping would end it
        sandbox = await self._services.hands.handle(row)
        used = float((await sandbox.usage())["cpu_seconds"])
        before, stage.cpu = stage.cpu, used
        if before < 0 or used - before > _BUSY_CPU:
            execution.touched = time.monotonic() if before >= 0 else execution.touched
            return False
        return True

    async def _put_away(self, row: Session, stage: Stage) -> None:
        """To sleep unless its client wanted it to end, and if it was ever saved in any case: nothing that could be restored is lost."""
        services = self._services
        asleep = stage.options.sleeps or row.checkpoint is not None
        try:
            if asleep:
                await services.pause(None, row.id)
            else:
                ended = await services.db.call(
                    services.sessions.move, row.id, _S.RUNNING, _S.KILLED, generation=row.generation,
                    last_activity=row.last_activity, event="idle_timeout",
                )  # fmt: skip
                await services.keeper.remove(ended)
        except StateConflict:
            stage.state = "RUNNING"
            return
        except SandkeepError as error:
            stage.state = "RUNNING"
            _log.warning("%s is idle and could not be put away, will be tried again: %s", row.id, error)
            return
        await self._gone(stage, asleep=asleep)

    async def _missed(self, stage: Stage) -> None:
        try:
            row = await self._services.get(None, stage.id)
        except SandboxNotFound:
            await self._gone(stage, asleep=False)
            return
        if stage.state != "RUNNING":
            return
        if row.host != self._services.keeper.host:
            if stage.options.enable_sandbox_handoff:
                await stage.tell(Status.LOCK_RENEWAL_ERROR)
            await self._gone(stage, asleep=False)
        elif row.state in (_S.PAUSED, _S.ERROR):
            await self._gone(stage, asleep=row.state is _S.PAUSED)

    async def _forget(self, stage: Stage) -> None:
        """What sleeps here with its execution, until it is gone or wakes elsewhere."""
        try:
            row = await self._services.get(None, stage.id)
        except SandboxNotFound:
            self._hall.drop(stage)
            return
        if row.host != self._services.keeper.host and stage.state == "STOPPED":
            self._hall.drop(stage)

    async def _gone(self, stage: Stage, *, asleep: bool) -> None:
        """The client's socket stays open; what it asks from now on is refused. An execution sleeps with its sandbox."""
        stage.state = "STOPPED"
        await stage.stop_delivery()
        self._hall.drop(stage)
        if asleep and stage.executing:
            self._hall.stage(stage.id, stage.options).execution = stage.execution
            self._hall.stages[stage.id].state = "STOPPED"
        await stage.tell(Status.DELETING, *stage.unlocking, Status.DELETED)
