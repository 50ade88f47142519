"""Handing a sandbox from one client to another: on this server, or from another server through the database.

The row is the lock: its host has the sandbox. Who wants it from a living host leaves an event; that host's watch sees it,
puts the sandbox to sleep and so lets it go. On one server nothing has to sleep: a checkpoint is made, the seat changes.
"""

from __future__ import annotations

import asyncio
import contextlib

from sqlalchemy import func, select

from sandkeep.errors import Busy, SandkeepError
from sandkeep.server.protocol import executing
from sandkeep.server.protocol.client import Client
from sandkeep.server.protocol.hall import Hall, Stage
from sandkeep.server.protocol.messages import Close, Status
from sandkeep.server.services import Services
from sandkeep.sessions import Database, SessionState
from sandkeep.sessions.tables import events

REQUESTED = "handoff_requested"
PATIENCE = 30.0
_POLL = 0.25


async def take_seat(hall: Hall, stage: Stage, client: Client) -> Stage | None:
    """From another client of this server. The execution goes on; the new client may reconnect to it."""
    await client.tell(Status.RESTORING, Status.LOCK_ACQUIRING)
    try:
        holder = _begin(stage)
        await holder.tell(Status.LOCK_RELEASE_REQUESTED, Status.CHECKPOINTING)
        await stage.stop_delivery()
        try:
            session = await hall.services.get(None, stage.id)
            await hall.services.checkpoint(
                None, stage.id, comment="handoff", memory=session.config["runtime"] == "runsc"
            )
        except SandkeepError as error:
            await _keep(stage, holder, error)
            raise
    except SandkeepError as error:
        await client.refuse(Status.RESTORE_ERROR, f"Failed to restore sandbox ID: {stage.id}. {error.told()}")
        await client.close(Close.FATAL)
        return None
    stage.client, stage.state = client, "RUNNING"
    await _told(stage, holder)
    await client.tell(Status.LOCK_ACQUIRED, Status.RUNNING)
    return stage


async def ask(services: Services, id: str) -> None:
    """Ask the host that has it; returns when it has let go."""
    await services.db.call(services.log.event, id, REQUESTED, by=services.keeper.host)
    try:
        async with asyncio.timeout(PATIENCE):
            while (await services.get(None, id)).state is not SessionState.PAUSED:
                await asyncio.sleep(_POLL)
    except TimeoutError:
        raise Busy(f"its holder did not let go in {PATIENCE:.0f} s", "try again") from None


async def release(hall: Hall, stage: Stage) -> None:
    """Another server wants it. Its memory might not come up there, so an execution is ended, and that is said."""
    try:
        holder = _begin(stage)
    except Busy:
        return
    await holder.tell(Status.LOCK_RELEASE_REQUESTED, Status.CHECKPOINTING)
    try:
        if stage.executing and stage.execution is not None:
            async with stage.execution.killing():
                await holder.tell(Status.EXECUTION_FORCE_KILLED)
            if stage.delivery is not None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(stage.delivery), PATIENCE / 3)
        await hall.services.pause(None, stage.id)
    except SandkeepError as error:
        await _keep(stage, holder, error)
        return
    hall.drop(stage)
    stage.client, stage.state = None, "STOPPED"
    await _told(stage, holder)


class _Nobody(Client):
    """Holds the seat of a sandbox to which nobody is attached."""

    def __init__(self) -> None:
        self._sending = asyncio.Lock()
        self.gone = asyncio.Event()
        self.gone.set()


def _begin(stage: Stage) -> Client:
    if stage.state != "RUNNING":
        raise Busy(f"the sandbox is {stage.state}", "try again")
    stage.state = "CHECKPOINTING"
    return stage.client or _Nobody()


async def _keep(stage: Stage, holder: Client, error: SandkeepError) -> None:
    """It could not be saved: it stays where it is, and nobody is told otherwise."""
    stage.state = "RUNNING"
    await holder.refuse(Status.CHECKPOINT_ERROR, f"Failed to checkpoint sandbox ID: {stage.id}. {error.told()}")
    if stage.client is holder and stage.execution is not None and not stage.execution.delivered:
        executing.deliver(stage, holder, stage.execution)


async def _told(stage: Stage, holder: Client) -> None:
    """The old client's socket stays open."""
    await holder.tell(Status.DELETING, Status.LOCK_RELEASING, Status.LOCK_RELEASED, Status.DELETED, Status.CHECKPOINTED)


def newest(database: Database) -> int:
    """Where to begin looking for requests."""
    with database.read() as connection:
        return connection.execute(select(func.max(events.c.id))).scalar() or 0


def requested(database: Database, after: int) -> list[tuple[int, str]]:
    """(event, sandbox) of the requests after an event."""
    wanted = select(events.c.id, events.c.sandbox).where(events.c.id > after, events.c.kind == REQUESTED)
    with database.read() as connection:
        return [(row.id, row.sandbox) for row in connection.execute(wanted.order_by(events.c.id))]
