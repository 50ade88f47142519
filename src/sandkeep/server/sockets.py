"""What our WebSockets have in common: the caller is known before one is accepted, errors are told in one way, and messages are
read as they come so that a client that leaves is noticed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from sandkeep.errors import BadArgument, SandboxElsewhere, SandkeepError
from sandkeep.server.auth import identify
from sandkeep.server.problems import refuse, unexpected
from sandkeep.server.services import Services
from sandkeep.sessions import Key

_AHEAD = 16


class Left(Exception):
    """The client has closed its side."""


class Refused(Exception):
    """A client that was told why it can't come in."""


class Elsewhere(Exception):
    """The sandbox runs on another living host, whose server is at `address`."""

    def __init__(self, id: str, host: str | None, address: str) -> None:
        self.address = address
        self.refusal = SandboxElsewhere(f"{id} runs on host {host}", "ask that host's server", host=host)


class Inbox:
    """A client's messages in order; never more than a few are held."""

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket
        self._queue: asyncio.Queue[str | bytes | None] = asyncio.Queue(_AHEAD)
        self._reader = asyncio.create_task(self._read())
        self.left = asyncio.Event()

    async def _read(self) -> None:
        try:
            while True:
                message = await self._socket.receive()
                if message["type"] == "websocket.disconnect":
                    break
                text = message.get("text")
                await self._queue.put(message.get("bytes") or b"" if text is None else text)
        finally:
            self.left.set()
        await self._queue.put(None)

    async def next(self) -> str | bytes:
        message = await self._queue.get()
        if message is None:
            raise Left
        return message

    async def during(self, work: Coroutine[Any, Any, None]) -> None:
        """Do the work, but no longer than the client stays."""
        task, gone = asyncio.ensure_future(work), asyncio.ensure_future(self.left.wait())
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Left
            await task
        finally:
            for one in (task, gone):
                one.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)


@contextlib.asynccontextmanager
async def caller(socket: WebSocket, id: str) -> AsyncIterator[tuple[Services, Key]]:
    """The caller, who sees this sandbox. Errors inside the block are told to the client and end the WebSocket.

    Before it, `Elsewhere` is raised, for `relay`, and `Refused` when all is said.
    """
    services: Services = socket.app.state.services
    entered = False
    try:
        key = await identify(socket)
        session = await services.get(key.scope, id)
        if (address := await services.address(session)) is not None:
            raise Elsewhere(id, session.host, address)
        entered = True
        yield services, key
    except (Left, WebSocketDisconnect):
        return
    except Elsewhere:
        raise
    except Exception as error:
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):
            await refuse(socket, error if isinstance(error, SandkeepError) else unexpected(error))
        if not entered:
            raise Refused from error


@contextlib.asynccontextmanager
async def accepted(socket: WebSocket, subprotocol: str | None = None) -> AsyncIterator[Inbox]:
    await socket.accept(subprotocol)
    inbox = Inbox(socket)
    try:
        yield inbox
    finally:
        await inbox.close()


def parsed(message: str | bytes) -> dict[str, Any]:
    """A JSON object in a text message."""
    if isinstance(message, str):
        try:
            found = json.loads(message)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict):
            return found
    raise BadArgument("a JSON object in a text message was expected")
