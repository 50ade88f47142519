"""One connection to a guest, asyncio. Written by hand on both sides."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
from collections.abc import AsyncIterable, Iterable
from pathlib import Path

from sandkeep.runtime.link import protocol

CHUNK = 256 << 10
Body = Iterable[bytes] | AsyncIterable[bytes]


class Socket(socket.socket):
    """A connection that its link forgot ends with it, also where the collector comes to it before whoever holds it."""

    def __del__(self) -> None:
        self.close()


class AsyncWire:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._pid = os.getpid()
        self._sender: asyncio.Task[None] | None = None

    @classmethod
    async def connect(cls, run: Path) -> AsyncWire:
        """To `guest.sock` in a folder whose path may be longer than a socket's address can be."""
        sock = Socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        folder = -1
        try:
            folder = os.open(run, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            await asyncio.get_running_loop().sock_connect(sock, f"/proc/self/fd/{folder}/guest.sock")
        except BaseException:
            sock.close()
            raise
        finally:
            if folder >= 0:
                os.close(folder)
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
