"""One client from its first word to its last: what it asks, in the order it asks, and the events that answer.

Messages are taken one after another; what takes long (checkpoint, snapshot, kill) goes on beside them and beyond the socket.
The orders of events are those of docs/protocol.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.websockets import WebSocket

from sandkeep.errors import SandkeepError
from sandkeep.sandbox._async.bridge import blocking
from sandkeep.server.protocol import executing, messages
from sandkeep.server.protocol.client import Client
from sandkeep.server.protocol.hall import Hall, Stage
from sandkeep.server.protocol.messages import (
    Checkpoint,
    Close,
    Execute,
    KillProcess,
    KillSandbox,
    Malformed,
    Reconnect,
    Request,
    SnapshotFilesystem,
    Status,
    Stdin,
)

_BACKLOG = 64
Begin = Callable[["Conversation"], Awaitable[Stage | None]]


class Conversation:
    def __init__(self, hall: Hall, socket: WebSocket) -> None:
        self.hall = hall
        self.services = hall.services
        self.client = Client(socket)
        self.inbox: asyncio.Queue[dict[str, object] | None] = asyncio.Queue(_BACKLOG)
        self.stage: Stage | None = None

    async def run(self, begin: Begin) -> None:
        """Returning without a close frame is what a malformed message gets."""
        reading = asyncio.create_task(self._read())
        try:
            self.stage = await begin(self)
            if self.stage is not None:
                while (message := await self.inbox.get()) is not None:
                    await self._handle(self.stage, messages.request(message))
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            if self.stage is not None:
                await self.hall.leave(self.stage, self.client)

    async def _read(self) -> None:
        try:
            while (message := await self.client.receive()) is not None:
                await self.inbox.put(message)
        except Malformed:
            pass
        await self.inbox.put(None)

    async def _handle(self, stage: Stage, request: Request) -> None:
        match request:
            case Checkpoint():
                self.hall.spawn(self._checkpoint(stage))
                await asyncio.sleep(0)
            case SnapshotFilesystem(name):
                self.hall.spawn(self._snapshot(stage, name))
            case KillSandbox():
                self.hall.spawn(self._kill(stage))
                await asyncio.sleep(0)
            case KillProcess():
                await executing.kill(self.hall, stage, self.client)
            case Stdin(data):
                await executing.stdin(stage, self.client, data)
            case Reconnect(received):
                await executing.reconnect(self.hall, stage, self.client, received)
            case Execute():
                await executing.execute(self.hall, stage, self.client, request)

    def _holds(self, stage: Stage) -> bool:
        return stage.client is self.client and stage.state == "RUNNING"

    async def _checkpoint(self, stage: Stage) -> None:
        failed = f"Failed to checkpoint sandbox ID: {stage.id}."
        if self._holds(stage) and not stage.executing and stage.options.enable_checkpoint:
            stage.state = "CHECKPOINTING"
        await self.client.tell(Status.CHECKPOINTING)
        if stage.executing:
            why = "Cannot checkpoint while an execution is in progress."
            await self.client.refuse(Status.EXECUTION_IN_PROGRESS_ERROR, why)
            return
        if stage.state != "CHECKPOINTING":
            why = "It is not running." if stage.options.enable_checkpoint else "Checkpointing is not enabled for it."
            await self.client.refuse(Status.CHECKPOINT_ERROR, f"{failed} {why}")
            await self.client.close(Close.FATAL)
            return
        try:
            await self.services.pause(None, stage.id)
        except SandkeepError as error:
            stage.state = "RUNNING"
            await self.client.refuse(Status.CHECKPOINT_ERROR, f"{failed} {error.told()}")
            await self.client.close(Close.FATAL)
            return
        self._gone(stage)
        await self.client.tell(Status.DELETING, *stage.unlocking, Status.DELETED, Status.CHECKPOINTED)
        await self.client.close(Close.DONE)

    async def _kill(self, stage: Stage) -> None:
        failed = f"Failed to kill sandbox ID: {stage.id}."
        held = stage.client is self.client and self.hall.stages.get(stage.id, stage) is stage
        before = stage.state
        if held:
            stage.state = "KILLING"
        await self.client.tell(Status.KILLING)
        if not held:
            await self.client.refuse(Status.KILL_ERROR, f"{failed} It was handed over to another client.")
            return
        await stage.stop_delivery()
        try:
            await executing.remove(self.services, stage.id)
        except SandkeepError as error:
            stage.state = before
            await self.client.refuse(Status.KILL_ERROR, f"{failed} {error.told()}")
            return
        self._gone(stage)
        await self.client.tell(Status.DELETING, *stage.unlocking, Status.DELETED, Status.KILLED)
        await self.client.close(Close.DONE)

    def _gone(self, stage: Stage) -> None:
        stage.state = "STOPPED"
        self.hall.drop(stage)

    async def _snapshot(self, stage: Stage, name: object) -> None:
        await self.client.tell(Status.FILESYSTEM_SNAPSHOT_CREATING)
        if not isinstance(name, str):
            await self.client.refuse(Status.ERROR, "Invalid message format. 'name' field is required.")
            await self.client.close(Close.FATAL)
            return
        try:
            if not self._holds(stage):
                raise SandkeepError(f"the sandbox is {stage.state}")
            await self._save(stage, name)
        except SandkeepError as error:
            why = f"Failed to snapshot the filesystem of sandbox ID: {stage.id}. {error.told()}"
            await self.client.refuse(Status.FILESYSTEM_SNAPSHOT_ERROR, why)
            return
        await self.client.tell(Status.FILESYSTEM_SNAPSHOT_CREATED)

    async def _save(self, stage: Stage, name: str) -> None:
        """A checkpoint with a name, in the space of the sandbox's owner: nobody else sees it or can take its name."""
        messages.check_snapshot(name)
        session = await self.services.get(None, stage.id)
        info = await self.services.checkpoint(None, stage.id, comment=f"filesystem snapshot {name}")
        store = await blocking(self.services.spaces.store, session.owner, session.project)
        await blocking(store.name, messages.snapshot_name(name), info.id)
