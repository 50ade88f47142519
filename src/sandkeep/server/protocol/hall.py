"""What this server knows of the protocol's sandboxes beside their rows: who is attached, what executes, what is under way.

A stage is one sandbox here. It has one seat. Nothing in it must be needed to find the sandbox again: after a restart stages
are made anew from the rows.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from sandkeep.server.protocol.client import Client
from sandkeep.server.protocol.execution import Execution
from sandkeep.server.protocol.messages import Options, Status
from sandkeep.server.services import Services

_log = logging.getLogger(__name__)

SEAT_SECONDS = 1.0
"""How long a new client waits for the last one's socket to be torn down before it is told that the seat is taken."""

PASSING = frozenset({"CHECKPOINTING", "KILLING", "STOPPING"})
"""States of a stage that end by themselves."""


@dataclass
class Stage:
    id: str
    options: Options
    state: str = "RUNNING"
    """RUNNING, or what is being done, or STOPPED; in words that error texts show."""
    client: Client | None = None
    execution: Execution | None = None
    delivery: asyncio.Task[None] | None = None
    cpu: float = -1.0

    @property
    def executing(self) -> bool:
        return self.execution is not None and self.execution.running

    async def tell(self, *statuses: Status) -> None:
        if self.client is not None:
            await self.client.tell(*statuses)

    @property
    def unlocking(self) -> tuple[Status, ...]:
        """What is said of the lock as the sandbox goes."""
        return (Status.LOCK_RELEASING, Status.LOCK_RELEASED) if self.options.enable_sandbox_handoff else ()

    async def stop_delivery(self) -> None:
        if self.delivery is not None:
            self.delivery.cancel()
            await asyncio.gather(self.delivery, return_exceptions=True)
            self.delivery = None


class Hall:
    def __init__(self, services: Services) -> None:
        self.services = services
        self.stages: dict[str, Stage] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def stage(self, id: str, options: Options) -> Stage:
        return self.stages.setdefault(id, Stage(id, options))

    async def seat(self, id: str, options: Options, client: Client) -> Stage | None:
        """Take the seat; wait a moment for one who is leaving, and for whatever is being done to the sandbox."""
        patience = SEAT_SECONDS / 4 if options.enable_sandbox_handoff else SEAT_SECONDS
        deadline = time.monotonic() + patience
        while (stage := self.stage(id, options)).state in PASSING or stage.client is not None:
            if stage.state in PASSING:
                deadline = time.monotonic() + patience
            elif time.monotonic() > deadline:
                return None
            await asyncio.sleep(0.01)
        stage.client = client
        return stage

    async def leave(self, stage: Stage, client: Client) -> None:
        if stage.client is client:
            await stage.stop_delivery()
            stage.client = None

    def drop(self, stage: Stage) -> None:
        """Forget a sandbox that is not here any more."""
        if self.stages.get(stage.id) is stage:
            del self.stages[stage.id]

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Work that its client's going does not stop."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("unexpected error", exc_info=error)

    async def close(self) -> None:
        """Finish what is under way; executions go on without us."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))
        for stage in list(self.stages.values()):
            await stage.stop_delivery()
            if stage.execution is not None:
                await stage.execution.close()
