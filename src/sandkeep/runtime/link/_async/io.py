"""One connection to a guest, asyncio. Written by hand on both sides."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
from collections.abc import AsyncIterable, Iterable
from pathlib import Path

from sandkeep.runtime.link import door, protocol

CHUNK = 256 << 10
Body = Iterable[bytes] | AsyncIterable[bytes]


class AsyncWire:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._pid = os.getpid()
        self._sender: asyncio.Task[None] | None = None

    @classmethod
    async def connect(cls, dir: Path, timeout: float | None) -> AsyncWire:
        """To the guest of the sandbox in this folder. TimeoutError when it does not come in time."""
        sock = door.listening(dir)
        if sock is None:
            with door.Call(dir) as call:
                await _answered(call, timeout)
                sock = call.accept()
        sock.setblocking(False)
        return cls(sock)

    @property
    def stale(self) -> bool:
        """An idle connection that has something to say has only its end to tell; one from before a fork is the parent's."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return self._pid != os.getpid() or bool(poll.poll(0))

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._sock, data)

    def feed(self, body: Body) -> None:
        """Send this while answers are received."""
        self._sender = asyncio.create_task(self._send_all(body))

    async def _send_all(self, body: Body) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            if isinstance(body, AsyncIterable):
                async for data in body:
                    for piece in protocol.data_frames(data):
                        await self.send(piece)
                await self.send(protocol.END)
            else:
                for piece in protocol.body_frames(body):
                    await self.send(piece)

    @property
    def sending(self) -> bool:
        return self._sender is not None and not self._sender.done()

    async def receive(self, timeout: float | None) -> bytes:
        """Some bytes; none at the end. TimeoutError when nothing comes in time."""
        async with asyncio.timeout(timeout):
            try:
                data = await asyncio.get_running_loop().sock_recv(self._sock, CHUNK)
            except ConnectionResetError:
                return b""
        if self._sender is not None and self._sender.done() and (error := self._sender.exception()):
            raise error
        return data

    def end_sending(self) -> None:
        self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        if self._sender is not None:
            self._sender.cancel()
        self._sock.close()


async def sleep(seconds: float) -> None:
    await asyncio.sleep(seconds)


async def _answered(call: door.Call, timeout: float | None) -> None:
    loop = asyncio.get_running_loop()
    told: asyncio.Future[bool] = loop.create_future()

    def tell(came: bool) -> None:
        if not told.done():
            told.set_result(came)

    ends = {call.listener.fileno(): True, call.pipe: False}
    for end, comes in ends.items():
        loop.add_reader(end, tell, comes)
    try:
        async with asyncio.timeout(timeout):
            if not await told:
                raise ConnectionRefusedError
    finally:
        for end in ends:
            loop.remove_reader(end)
