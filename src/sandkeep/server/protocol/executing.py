"""What clients ask of executions: execute, input, kill, reconnect; and taking a sandbox away."""

from __future__ import annotations

import asyncio
import contextlib

from sandkeep.errors import SandboxNotFound, SandkeepError
from sandkeep.server.protocol import messages
from sandkeep.server.protocol.client import Client
from sandkeep.server.protocol.execution import TAG, Execution
from sandkeep.server.protocol.hall import Hall, Stage
from sandkeep.server.protocol.messages import Execute, Status
from sandkeep.server.services import Services


async def execute(hall: Hall, stage: Stage, client: Client, asked: Execute) -> None:
    if (refused := messages.refusal(asked)) is not None:
        await client.refuse(*refused)
    elif stage.state != "RUNNING" or stage.client is not client:
        state = stage.state if stage.client is client else "STOPPED"
        why = f"Cannot execute code in a sandbox that is not in the RUNNING state (it is {state})."
        await client.refuse(Status.EXECUTION_ERROR, why)
    elif stage.executing:
        await client.refuse(Status.EXECUTION_ERROR, "An execution is already in progress.")
    else:
        before, execution = stage.execution, Execution(hall.services, stage.id)
        stage.execution = execution
        try:
            await execution.start(asked.language, asked.code)
        except SandkeepError as error:
            stage.execution = before
            await client.refuse(Status.EXECUTION_ERROR, error.told())
            return
        if await client.tell(Status.EXECUTION_RUNNING):
            deliver(stage, client, execution)


def deliver(stage: Stage, client: Client, execution: Execution) -> None:
    async def work() -> None:
        async with contextlib.aclosing(execution.pieces()) as pieces:
            async for stream, text in pieces:
                if not await client.send(messages.output(stream, text)):
                    return
        if execution.failure is not None:
            await client.refuse(Status.EXECUTION_ERROR, execution.failure)
        if await client.tell(Status.EXECUTION_DONE):
            execution.delivered = True

    stage.delivery = asyncio.create_task(work())


async def stdin(stage: Stage, client: Client, data: object) -> None:
    if not isinstance(data, str):
        await client.refuse(Status.STDIN_ERROR, "Invalid stdin message format. 'data' field is required.")
    elif stage.execution is None or stage.client is not client:
        await client.refuse(Status.EXECUTION_ERROR, "No process is running in the sandbox.")
    elif not stage.execution.write(data):
        await client.refuse(Status.STDIN_ERROR, "Too much input waits for the process to read it; this was dropped.")


async def kill(hall: Hall, stage: Stage, client: Client) -> None:
    """FORCE_KILLED before the end of the execution is told: clients wait for the end that follows it."""
    execution = stage.execution
    if execution is None or not execution.running or stage.client is not client:
        await client.tell(Status.EXECUTION_FORCE_KILLED)
        return
    try:
        async with execution.killing():
            await client.tell(Status.EXECUTION_FORCE_KILLED)
    except SandkeepError as error:
        await client.refuse(Status.EXECUTION_FORCE_KILL_ERROR, error.told())


async def reconnect(hall: Hall, stage: Stage, client: Client, received: dict[str, int] | None) -> None:
    if stage.client is not client:
        await client.tell(Status.EXECUTION_DONE)
        return
    if stage.execution is None:
        stage.execution = await _find(hall, stage, received)
    execution = stage.execution
    if execution is None:
        await client.tell(Status.EXECUTION_DONE)
        return
    await stage.stop_delivery()
    whole = received is None or execution.output.rewind(received)
    if execution.suspended:
        execution.resume()
    if execution.delivered and not execution.output.unsent:
        await client.tell(Status.EXECUTION_DONE)
        return
    await client.tell(Status.EXECUTION_RUNNING)
    if not whole:
        await client.refuse(Status.EXECUTION_ERROR, "Some of the output that did not arrive is no longer kept.")
    deliver(stage, client, execution)


async def _find(hall: Hall, stage: Stage, received: dict[str, int] | None) -> Execution | None:
    """What a server before this one began and still runs; without the client's word, all of its output that is kept."""
    async with hall.services.use(None, stage.id) as sandbox:
        found = [one for one in await sandbox.commands.list() if one.tag == TAG and one.running]
    if not found:
        return None
    execution = Execution(hall.services, stage.id)
    await execution.adopt(max(found, key=lambda one: one.started).pid, received or {"stdout": 0, "stderr": 0})
    return execution


async def remove(services: Services, id: str) -> None:
    """Kill; one that is gone already is as good as killed."""
    with contextlib.suppress(SandboxNotFound):
        await services.kill(None, id)
