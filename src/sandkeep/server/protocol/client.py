"""One client's socket: events out in order, messages in. A client that has gone is not an error: `send` says so."""

from __future__ import annotations

import asyncio
import json

from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from sandkeep.server.protocol import messages
from sandkeep.server.protocol.messages import Event, Malformed, Status


class Client:
    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket
        self._sending = asyncio.Lock()
        self.gone = asyncio.Event()

    async def send(self, *events: Event) -> bool:
        """These events with nothing between them. False if the client has gone."""
        async with self._sending:
            for event in events:
                if self.gone.is_set():
                    return False
                try:
                    await self._socket.send_text(json.dumps(event))
                except (WebSocketDisconnect, RuntimeError, OSError):
                    self.gone.set()
                    return False
        return True

    async def tell(self, *statuses: Status) -> bool:
        return await self.send(*map(messages.status, statuses))

    async def refuse(self, status: Status, message: str) -> bool:
        return await self.send(messages.status(status), messages.error(message))

    async def close(self, code: int) -> None:
        async with self._sending:
            if not self.gone.is_set() and self._socket.application_state is WebSocketState.CONNECTED:
                self.gone.set()
                try:
                    await self._socket.close(code)
                except (WebSocketDisconnect, RuntimeError, OSError):
                    return

    async def receive(self) -> dict[str, object] | None:
        """The next message; None when the client has gone. Raises `Malformed`."""
        message = await self._socket.receive()
        if message["type"] != "websocket.receive":
            self.gone.set()
            return None
        try:
            return messages.parse(message.get("text"))
        except Malformed:
            self.gone.set()
            raise
