"""Answers that go on for a while: the first piece is had before the status is sent, and the source is closed whatever becomes
of the client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

Piece = TypeVar("Piece", str, bytes)
KEEP_ALIVE = 15.0


class Streamed(StreamingResponse):
    source: AsyncGenerator[str, None] | AsyncGenerator[bytes, None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.source.aclose()


async def streamed(
    source: AsyncGenerator[Piece, None],
    media_type: str = "application/octet-stream",
    headers: dict[str, str] | None = None,
    wrapped: Callable[[AsyncIterator[Piece]], AsyncIterator[Piece]] = lambda pieces: pieces,
) -> Streamed:
    """What the source raises before its first piece is raised here."""
    first = [piece async for piece in _first(source)]

    async def all() -> AsyncIterator[Piece]:
        for piece in first:
            yield piece
        async for piece in wrapped(source):
            yield piece

    answer = Streamed(all(), media_type=media_type, headers=headers)
    answer.source = source
    return answer


async def _first(source: AsyncGenerator[Piece, None]) -> AsyncIterator[Piece]:
    try:
        yield await anext(source)
    except StopAsyncIteration:
        return


class Upload:
    """A request's body on its way inside. If it breaks off, so does what waits for its end."""

    def __init__(self, source: AsyncIterator[bytes]) -> None:
        self._source = source
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for piece in self._source:
                yield piece
        except Exception as error:
            if not self._broken.done():
                self._broken.set_exception(error)
            raise

    async def during(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._broken}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self._broken.result()
            await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if not self._broken.cancel():
                self._broken.exception()


async def alive(stream: AsyncIterator[str]) -> AsyncIterator[str]:
    """Server-sent events, with a comment whenever nothing has come for a while."""
    pending: asyncio.Future[str] | None = None
    try:
        while True:
            pending = pending or asyncio.ensure_future(anext(stream))
            done, _ = await asyncio.wait({pending}, timeout=KEEP_ALIVE)
            if not done:
                yield ": keep-alive\n\n"
                continue
            try:
                found = pending.result()
            except StopAsyncIteration:
                return
            pending = None
            yield found
    finally:
        if pending is not None and not pending.done():
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
