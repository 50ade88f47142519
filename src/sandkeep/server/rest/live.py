"""Commands and terminals over a WebSocket each: output as it comes, input and signals at any time.

/commands/ws: the first message is the command (JSON as in POST /commands). Then from the server: `{"type": "start", "pid"}`,
binary messages whose first byte is 1 (stdout) or 2 (stderr), `{"type": "exit", …}`; from the client: binary is input,
`{"type": "signal", "signal"}`, `{"type": "eof"}`.

/terminal: binary both ways is the terminal's own bytes; `{"type": "resize", "cols", "rows"}`; the last message is
`{"type": "exit", "exit_code"}`. A client that leaves leaves the terminal running: `?pid=` comes back to it.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query, WebSocket
from pydantic import ValidationError

from sandkeep.errors import BadArgument
from sandkeep.sandbox._async.commands import AsyncProcess, error_class, run_fields
from sandkeep.sandbox._async.pty import AsyncTerminal
from sandkeep.server.answers import tell
from sandkeep.server.problems import said
from sandkeep.server.rest.link import KINDS
from sandkeep.server.shapes import CommandBody
from sandkeep.server.sockets import Inbox, accepted, caller, parsed

router = APIRouter()
Cells = Annotated[int, Query(ge=1, le=10_000)]


@router.websocket("/sandboxes/{id}/commands/ws")
async def command(socket: WebSocket, id: str) -> None:
    async with caller(socket, id) as (services, key), accepted(socket) as inbox:
        body = command_of(parsed(await inbox.next()))
        fields = run_fields(body.command, **body.model_dump(exclude={"command", "background", "stdin", "max_output"}))
        async with services.use(key.scope, id) as sandbox:
            process = AsyncProcess(sandbox._link, (await sandbox._link.call("run", **fields, background=True))["pid"])
            await tell(socket, {"type": "start", "pid": process.pid})
            if body.stdin is not None:
                await process.send_stdin(body.stdin)
            await inbox.during(both(socket, inbox, process, tagged=True))


@router.websocket("/sandboxes/{id}/terminal")
async def terminal(
    socket: WebSocket, id: str, cols: Cells = 80, rows: Cells = 24, command: str | None = None, pid: int | None = None
) -> None:
    async with caller(socket, id) as (services, key), services.use(key.scope, id) as sandbox:
        found = await (sandbox.pty.connect(pid) if pid else sandbox.pty.start(command, cols=cols, rows=rows))
        async with accepted(socket) as inbox:
            await tell(socket, {"type": "start", "pid": found.pid})
            await inbox.during(both(socket, inbox, found, tagged=False))


def command_of(fields: dict[str, Any]) -> CommandBody:
    try:
        body = CommandBody(**fields)
    except ValidationError as error:
        raise BadArgument(f"the command is not valid: {said(error.errors())}", "see POST /commands") from None
    if body.background:
        raise BadArgument("a command on a WebSocket is not in the background", "use POST /commands")
    return body


async def both(socket: WebSocket, inbox: Inbox, process: AsyncProcess, *, tagged: bool) -> None:
    """Output until the process ends, and meanwhile what the client sends."""
    feeding = asyncio.ensure_future(_feed(inbox, process))
    try:
        async with process._link.stream("attach", {"pid": process.pid}, timeout=None) as events:
            reading = asyncio.ensure_future(_show(socket, events, tagged))
            await asyncio.wait({reading, feeding}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                await feeding
            await reading
            final = events.result
    finally:
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)
    told = {name: final.get(name) for name in ("exit_code", "duration_ms", "dropped")}
    await tell(socket, {"type": "exit", **told, "error_class": error_class(final)})
    await socket.close()


async def _show(socket: WebSocket, events: Any, tagged: bool) -> None:
    async for kind, data in events:
        if kind in ("stdout", "stderr"):
            await socket.send_bytes(KINDS[kind] + data if tagged else data)


async def _feed(inbox: Inbox, process: AsyncProcess) -> None:
    while True:
        message = await inbox.next()
        if isinstance(message, bytes):
            await process.send_stdin(message)
            continue
        match parsed(message):
            case {"type": "signal", "signal": signal}:
                await process._link.call("signal", pid=process.pid, signal=signal, tree=True)
            case {"type": "eof"}:
                await process.close_stdin()
            case {"type": "resize", "cols": cols, "rows": rows} if isinstance(process, AsyncTerminal):
                await process.resize(cols, rows)
            case other:
                raise BadArgument(f"there is no message of type {other.get('type')!r}", "signal, eof or resize")
