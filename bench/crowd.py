"""Many at once against one server: sandboxes that answer, streams that are followed, readers that are slow, clients that vanish.

Each part raises if anything is lost; what it returns are figures. The tests run the same at a small size.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import websockets

from bench.measure import Report
from bench.server import Serving

T = TypeVar("T")
LINES = 20
PATIENCE = 300.0
WAITING = f"while test ! -e go; do sleep 0.1; done; for i in $(seq {LINES}); do echo line $i; done"


@dataclass(frozen=True)
class Load:
    """What a process holds."""

    megabytes: float
    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Load:
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
        return cls(int(fields["VmRSS"].split()[0]) / 1024, descriptors, int(fields["Threads"]))

    def __str__(self) -> str:
        return f"{self.megabytes:.0f} MB, {self.descriptors} descriptors, {self.threads} threads"


class Crowd:
    """The clients of one user. `address` is host:port."""

    def __init__(self, address: str, key: str, pid: int) -> None:
        self._host, _, port = address.rpartition(":")
        self._port, self._key, self._pid = int(port), key, pid
        self._api = httpx.AsyncClient(
            base_url=f"http://{address}", headers={"Authorization": f"Bearer {key}"}, timeout=PATIENCE, trust_env=False,
            limits=httpx.Limits(max_connections=1200, max_keepalive_connections=64),
        )  # fmt: skip

    async def __aenter__(self) -> Crowd:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._api.aclose()

    def load(self) -> Load:
        return Load.of(self._pid)

    async def make(self, count: int) -> list[str]:
        return await at_most(8, (self._ask("POST", "/sandboxes", auto_pause_timeout=0) for _ in range(count)), "id")

    async def end(self, ids: list[str]) -> None:
        await at_most(8, (self._ask("DELETE", f"/sandboxes/{id}") for id in ids))

    async def answer(self, ids: list[str]) -> list[float]:
        """Every sandbox asked at the same moment; the seconds that each took, sorted."""

        async def one(number: int, id: str) -> float:
            begun = time.perf_counter()
            said = await self.run(id, f"echo {number}")
            assert said["stdout"] == f"{number}\n", said
            return time.perf_counter() - begun

        return sorted(await asyncio.gather(*(one(number, id) for number, id in enumerate(ids))))

    async def run(self, id: str, command: str, **more: Any) -> dict[str, Any]:
        return await self._ask("POST", f"/sandboxes/{id}/commands", command=command, **more)

    async def follow(self, ids: list[str], count: int) -> Load:
        """So many followers of one process in each sandbox, by turns as events and over a WebSocket: each gets every line and the end.
        What the server holds while all are there."""
        pids = [await self._begin(id, WAITING) for id in ids]
        begun = asyncio.Semaphore(0)
        kinds = (self._follow_events, self._follow_socket)
        tasks = [
            asyncio.create_task(kinds[number % 2](ids[number // 2 % len(ids)], pids[number // 2 % len(ids)], begun))
            for number in range(count)
        ]
        try:
            async with asyncio.timeout(PATIENCE):
                for _ in range(count):
                    await self._or_failed(begun.acquire(), tasks)
                load = self.load()
                await asyncio.gather(*(self.run(id, "touch go") for id in ids))
                lines = await asyncio.gather(*tasks)
        finally:
            await _cancelled(tasks)
        assert lines == [LINES] * count, f"{sum(got != LINES for got in lines)} of {count} streams lost lines"
        return load

    async def slow(self, id: str, count: int, megabytes: int) -> tuple[Load, Load]:
        """Followers and downloads that read nothing while there is much to read. What the server held before, and then; after that
        one of each kind reads all of it."""
        size = megabytes << 20
        await self.run(id, f"head -c {size} /dev/zero | tr '\\0' x > big")
        before = self.load()
        async with contextlib.AsyncExitStack() as stack:
            readers = []
            for _ in range(count):
                readers.append(
                    await stack.enter_async_context(self._opened(id, "commands?stream=sse", command="cat big"))
                )
                readers.append(await stack.enter_async_context(self._opened(id, "files?path=big")))
            assert (await self.run(id, "echo still here"))["stdout"] == "still here\n"
            held = await self._settled()
            for reader in readers[:2]:
                async with asyncio.timeout(PATIENCE):
                    body = await reader.read()
                assert body.count(b"x") >= size - 1, f"{body.count(b'x')} of {size} bytes came"
        return before, held

    async def vanish(self, id: str, count: int) -> None:
        """Clients that break off, in a stream, a command, an upload: what runs in the background goes on, what they waited for ends, the
        old file stays, and the next one gets all."""
        pid = await self._begin(id, "until test -e gone; do sleep 0.1; done; " + WAITING)
        await self.run(id, "rm -f go gone; echo old > kept")
        for number in range(count):
            async with contextlib.AsyncExitStack() as stack:
                await stack.enter_async_context(self._opened(id, f"commands/{pid}/output"))
                _, writer = await asyncio.open_connection(self._host, self._port)
                writer.write(self._request("PUT", f"/sandboxes/{id}/files?path=kept", b"new", 1000))
                await writer.drain()
                await stack.enter_async_context(
                    self._opened(
                        id, "commands?stream=sse", command=f"echo {number} >> begun; sleep 1000; echo {number} >> done"
                    )
                )
                async with asyncio.timeout(PATIENCE):
                    while f"{number}\n" not in (await self.run(id, "cat begun"))["stdout"]:
                        await asyncio.sleep(0.05)
                writer.transport.abort()
        begun = asyncio.Semaphore(0)
        following = asyncio.create_task(self._follow_events(id, pid, begun))
        await self._or_failed(begun.acquire(), [following])
        await self.run(id, "touch gone go")
        assert await following == LINES
        assert (await self.run(id, "cat kept"))["stdout"] == "old\n"
        async with asyncio.timeout(PATIENCE):
            while (await self.run(id, "pgrep -x sleep"))["stdout"]:
                await asyncio.sleep(0.1)
        assert (await self.run(id, "cat done"))["exit_code"] == 1

    async def _settled(self) -> Load:
        """Once it has stopped to grow."""
        load, since = self.load(), time.monotonic()
        while time.monotonic() - since < 2:
            await asyncio.sleep(0.2)
            if (now := self.load()).megabytes > load.megabytes + 0.5:
                load, since = now, time.monotonic()
        return load

    async def _ask(self, method: str, path: str, **fields: Any) -> dict[str, Any]:
        answer = await self._api.request(method, path, json=fields if method == "POST" else None)
        assert answer.status_code < 400, f"{method} {path}: {answer.status_code} {answer.text}"
        return dict(answer.json()) if answer.content else {}

    async def _begin(self, id: str, command: str) -> int:
        return int((await self.run(id, command, background=True))["pid"])

    async def _follow_events(self, id: str, pid: int, begun: asyncio.Semaphore) -> int:
        async with self._opened(id, f"commands/{pid}/output") as reader:
            begun.release()
            text = (await reader.read()).decode()
        assert "event: exit" in text, text[-500:]
        return text.count("line ")

    async def _follow_socket(self, id: str, pid: int, begun: asyncio.Semaphore) -> int:
        url = f"ws://{self._host}:{self._port}/sandboxes/{id}/link?api_key={self._key}"
        async with websockets.connect(url, open_timeout=PATIENCE, proxy=None, ping_interval=None) as connection:
            await connection.send(json.dumps({"op": "attach", "pid": pid}))
            begun.release()
            said = b""
            while isinstance(message := await connection.recv(), bytes) or "ok" not in json.loads(message):
                said += message[1:] if isinstance(message, bytes) else b""
            assert json.loads(message)["ok"], message
        return said.count(b"line ")

    @contextlib.asynccontextmanager
    async def _opened(self, id: str, path: str, **body: Any) -> AsyncIterator[asyncio.StreamReader]:
        """A request whose answer has begun, read as slowly as one likes: hardly more is taken than asked for."""
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        raw.setblocking(False)
        await asyncio.get_running_loop().sock_connect(raw, (self._host, self._port))
        reader, writer = await asyncio.open_connection(sock=raw, limit=64 << 10)
        writer.write(self._request("POST" if body else "GET", f"/sandboxes/{id}/{path}", json.dumps(body).encode()))
        try:
            async with asyncio.timeout(PATIENCE):
                status = await reader.readline()
                assert b" 200 " in status, status
                while await reader.readline() != b"\r\n":
                    pass
                await reader.readexactly(1)
            yield reader
        finally:
            writer.transport.abort()

    def _request(self, verb: str, path: str, body: bytes, length: int | None = None) -> bytes:
        length = len(body) if length is None else length
        headers = f"Authorization: Bearer {self._key}\r\nContent-Type: application/json\r\nContent-Length: {length}"
        return f"{verb} {path} HTTP/1.1\r\nHost: here\r\nConnection: close\r\n{headers}\r\n\r\n".encode() + body

    @staticmethod
    async def _or_failed(work: Awaitable[T], tasks: list[asyncio.Task[int]]) -> T:
        """Wait for it, but not if one of the others has failed."""
        waiting = asyncio.ensure_future(work)
        try:
            while not waiting.done():
                await asyncio.wait({waiting}, timeout=1)
                for task in tasks:
                    if task.done():
                        task.result()
            return waiting.result()
        finally:
            await _cancelled([waiting])


async def _cancelled(tasks: list[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def at_most(width: int, work: Iterable[Awaitable[dict[str, Any]]], field: str | None = None) -> list[Any]:
    slots = asyncio.Semaphore(width)

    async def one(act: Awaitable[dict[str, Any]]) -> Any:
        async with slots:
            found = await act
            return found[field] if field else found

    return list(await asyncio.gather(*map(one, work)))


def run(report: Report, quick: bool = False) -> None:
    with tempfile.TemporaryDirectory(prefix="sandkeep-bench-") as folder:
        with Serving(Path(folder) / "home", "runc") as server:
            asyncio.run(_all(report, server, *((10, 5, 50, 5) if quick else (200, 50, 1000, 50))))


async def _all(report: Report, server: Serving, sandboxes: int, followed: int, streams: int, slow: int) -> None:
    async with Crowd(server.address, server.key, server.pid) as crowd:
        empty = crowd.load()
        ids = await crowd.make(sandboxes)
        times = [time * 1000 for time in await crowd.answer(ids)]
        report.note(
            f"{len(times)} of {sandboxes} sandboxes asked at once answer: p50 {statistics.median(times):.0f} ms, "
            f"p99 {times[int(len(times) * 0.99)]:.0f} ms; server: {empty}; then {crowd.load()}"
        )
        held = await crowd.follow(ids[:followed], streams)
        report.note(
            f"{streams} streams of {followed} sandboxes get every line; server: {held}; after them {crowd.load()}"
        )
        before, held = await crowd.slow(ids[-1], slow, 16)
        report.note(
            f"{slow * 2} readers that do not read, {slow * 2 * 16} MB waiting: server {before.megabytes:.0f} MB, then {held.megabytes:.0f} MB"
        )
        await crowd.vanish(ids[-2], slow)
        report.note(f"{slow * 3} clients break off in streams, commands and uploads: nothing lost")
        await crowd.end(ids)
        report.note(f"all killed; server: {crowd.load()}")
