"""HTTP and WebSockets, asyncio. Written by hand on both sides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from typing import Any, BinaryIO

import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.protocol import State

from sandkeep.client import answers
from sandkeep.errors import ServerUnreachable

Body = Iterable[bytes] | AsyncIterable[bytes]
_PIECE = 256 << 10
_MAX_MESSAGE = 34 << 20


def gone(error: BaseException) -> ServerUnreachable:
    return ServerUnreachable(
        f"the server does not answer: {error or type(error).__name__}", "see that it runs, then look again"
    )


class AsyncHttp:
    """One pool of connections for each event loop that is used."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        self._url, self._headers = url, headers
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def _pool(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            timeout = httpx.Timeout(30.0, read=None)
            self._client = httpx.AsyncClient(
                base_url=self._url, headers=self._headers, timeout=timeout, trust_env=False
            )
            self._loop = loop
        return self._client

    async def request(self, method: str, path: str, *, content: Any = None, **options: Any) -> Any:
        if content is not None and hasattr(content, "read"):
            content = _pieces(content)
        try:
            answer = await self._pool().request(method, path, content=content, **options)
        except httpx.TransportError as error:
            raise gone(error) from error
        return answers.checked(answer.status_code, answer.content)

    async def fetch(self, path: str, to: BinaryIO) -> None:
        """An answer of any size into a file."""
        try:
            async with self._pool().stream("GET", path) as answer:
                if answer.status_code >= 400:
                    answers.checked(answer.status_code, await answer.aread())
                async for piece in answer.aiter_bytes():
                    to.write(piece)
        except httpx.TransportError as error:
            raise gone(error) from error

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()


async def _pieces(file: BinaryIO) -> AsyncIterator[bytes]:
    while piece := file.read(_PIECE):
        yield piece


class AsyncSocket:
    """A WebSocket to a sandbox's link."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._sender: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, url: str, headers: dict[str, str]) -> AsyncSocket:
        try:
            return cls(
                await connect(
                    url, additional_headers=headers, compression=None, proxy=None, max_size=_MAX_MESSAGE, open_timeout=60,
                    user_agent_header=None, ping_timeout=60,
                )
            )  # fmt: skip
        except InvalidStatus as error:
            answers.checked(error.response.status_code, bytes(error.response.body or b""))
            raise gone(error) from error
        except (InvalidHandshake, OSError, EOFError, TimeoutError) as error:
            raise gone(error) from error

    @property
    def stale(self) -> bool:
        return self._connection.state is not State.OPEN or self._loop is not asyncio.get_running_loop()

    async def send(self, message: str | bytes) -> None:
        try:
            await self._connection.send(message)
        except (ConnectionClosed, OSError) as error:
            raise gone(error) from error

    def feed(self, body: Body) -> None:
        """Send this as data while answers are received."""
        self._sender = asyncio.create_task(self._send_all(body))

    async def _send_all(self, body: Body) -> None:
        if isinstance(body, AsyncIterable):
            async for piece in body:
                await self._send_piece(piece)
        else:
            for piece in body:
                await self._send_piece(piece)
        await self.send(answers.END)

    async def _send_piece(self, piece: bytes) -> None:
        for at in range(0, len(piece), _PIECE):
            await self.send(answers.END + piece[at : at + _PIECE])

    @property
    def sending(self) -> bool:
        return self._sender is not None and (not self._sender.done() or self._sender.exception() is not None)

    async def receive(self, timeout: float | None) -> str | bytes:
        """The next message. TimeoutError when none comes in time; a body that can't be had ends the wait."""
        receiving = asyncio.ensure_future(self._connection.recv())
        waited = {receiving} | ({self._sender} if self._sender is not None and not self._sender.done() else set())
        try:
            await asyncio.wait(waited, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if not receiving.done() and self._sender is not None and self._sender.done():
                self._raise_sender()
                await asyncio.wait({receiving}, timeout=timeout)
            if not receiving.done():
                raise TimeoutError
            return await receiving
        except (ConnectionClosed, OSError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise gone(error) from error
        finally:
            if not receiving.done():
                receiving.cancel()
                await asyncio.gather(receiving, return_exceptions=True)

    def _raise_sender(self) -> None:
        if self._sender is not None and (error := self._sender.exception()) is not None:
            raise error

    async def close(self) -> None:
        if self._loop is asyncio.get_running_loop():
            await self._connection.close()
        else:
            self._connection.transport.abort()

    async def drop(self) -> None:
        """Leave a request that is under way, without waiting for what the other side still wants to say."""
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.gather(self._sender, return_exceptions=True)
        self._connection.transport.abort()
        await self._connection.wait_closed()
