"""One connection to a guest, asyncio. Written by hand on both sides."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import time
from collections.abc import AsyncIterable, Callable, Iterable
from pathlib import Path

from sandkeep.runtime.link import door, protocol
from sandkeep.runtime.link.told import SHORT, Told, decode

CHUNK = 256 << 10
Body = Iterable[bytes] | AsyncIterable[bytes]


class AsyncWire:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._pid = os.getpid()
        self._sender: asyncio.Task[None] | None = None
        self._blocked = True  # it is for the guest to take what is sent
        self._spent = (0.0, 0.0, 0)

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

    async def send(self, data: bytes, seconds: float | None = None) -> None:
        self._blocked = True
        if seconds is None or len(data) <= protocol.ROOM:
            await asyncio.get_running_loop().sock_sendall(self._sock, data)
        else:
            async with asyncio.timeout(seconds):
                await asyncio.get_running_loop().sock_sendall(self._sock, data)
        self._blocked = False
        self._note(0, 0, len(data))

    def say(self, data: bytes) -> None:
        """A last word, if there is room for it."""
        with contextlib.suppress(OSError):
            self._sock.send(data, socket.MSG_DONTWAIT)

    def spent(self) -> tuple[float, float, int]:
        """Since the last call: seconds waited, those in which it was not the guest's turn, bytes that moved."""
        spent, self._spent = self._spent, (0.0, 0.0, 0)
        return spent

    def _note(self, waited: float, lent: float, moved: int) -> None:
        before = self._spent
        self._spent = before[0] + waited, before[1] + lent, before[2] + moved

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

    async def receive(self, timeout: float | None) -> bytes | None:
        """Some bytes; empty at the end, None when nothing comes in time."""
        await turn()  # what is there already is taken without one
        while True:
            try:
                data = self._sock.recv(CHUNK)
                break
            except BlockingIOError:
                if not await self._readable(timeout):
                    return None
            except ConnectionResetError:
                return b""
        if self._sender is not None and self._sender.done() and (error := self._sender.exception()):
            raise error
        self._note(0, 0, len(data))
        return data

    async def _readable(self, seconds: float | None) -> bool:
        """Nothing is read meanwhile: whoever is cancelled here loses no byte."""
        loop, began = asyncio.get_running_loop(), time.monotonic()
        told: asyncio.Future[bool] = loop.create_future()
        loop.add_reader(self._sock, _tell, told, True)
        timer = None if seconds is None else loop.call_later(seconds, _tell, told, False)
        try:
            return await told
        finally:
            loop.remove_reader(self._sock)
            if timer is not None:
                timer.cancel()
            waited = time.monotonic() - began
            self._note(waited, waited if self.sending and not self._blocked else 0, 0)

    def end_sending(self) -> None:
        self._sock.shutdown(socket.SHUT_WR)

    def leave(self) -> socket.socket:
        """The connection to somebody else; this one lets go of it and ends nothing."""
        return socket.socket(fileno=self._sock.detach())

    def close(self) -> None:
        """Also where a child that was forked meanwhile has a copy: the guest learns that nobody waits any more."""
        if self._sender is not None:
            self._sender.cancel()
        if self._pid == os.getpid():
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def _tell(told: asyncio.Future[bool], what: bool) -> None:
    if not told.done():
        told.set_result(what)


async def aside(function: Callable[[], None]) -> None:
    """Something that blocks."""
    await asyncio.to_thread(function)


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


async def turn() -> None:
    """Let others have theirs."""
    await asyncio.sleep(0)


async def decoded(text: bytes) -> Told:
    return decode(text) if len(text) <= SHORT else await asyncio.to_thread(decode, text)
