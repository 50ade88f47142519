"""Issue 5's figures: a command through the WebSocket beside `runsc exec`, save and restore beside runsc by hand, and load."""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import websockets

from bench.measure import Report
from bench.pausing import QUICKEST, by_hand
from bench.server import Serving
from sandkeep.runtime.driver import DRIVERS
from sandkeep.sandbox.home import Home
from sandkeep.sandbox.machine import Machine


def run(report: Report, quick: bool = False) -> None:
    rounds = 5 if quick else 21
    with tempfile.TemporaryDirectory(prefix="sandkeep-bench-") as folder:
        for runtime, bound in (("auto", 0.2), ("runsc", 0.5)):
            home = Path(folder) / runtime
            with Serving(home, runtime) as server:
                asyncio.run(echo(report, server, runtime, bound, rounds))
                if runtime == "runsc":
                    asyncio.run(sleeping(report, server, 3 if quick else 9))
                else:
                    asyncio.run(load(report, server, (1, 5) if quick else (1, 50, 500)))


class Talk:
    """One client of the WebSocket protocol."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket

    async def until(self, status: str) -> dict[str, Any]:
        told: dict[str, Any] = {}
        while True:
            event = json.loads(await self._socket.recv())
            told.update({key: value for key, value in event.items() if key in ("sandbox_id", "sandbox_token")})
            if event.get("status") == f"SANDBOX_{status}":
                return told
            if str(event.get("status", "")).endswith("ERROR"):
                raise RuntimeError(event)

    async def send(self, **message: Any) -> None:
        await self._socket.send(json.dumps(message))

    async def echo(self) -> None:
        await self.send(language="bash", code="echo hello")
        await self.until("EXECUTION_DONE")


async def echo(report: Report, server: Serving, runtime: str, bound: float, rounds: int) -> None:
    async with websockets.connect(f"ws://{server.address}/create") as socket:
        talk = Talk(socket)
        await talk.send(idle_timeout=0)
        await talk.until("RUNNING")
        plain = peer(server.home)
        ours, theirs = [], []
        for _ in range(rounds):
            ours.append(await timed(talk.echo))
            theirs.append(
                await timed(
                    lambda: asyncio.to_thread(subprocess.run, plain.argv, check=True, stdout=subprocess.DEVNULL)
                )
            )
        loop = [await timed(talk.echo) for _ in range(rounds)]
        plain.close()
        await talk.send(action="kill_sandbox")
        await talk.until("KILLED")
    what, peers = f"exec echo over WebSocket, runtime {runtime}", statistics.median(theirs)
    report.add(what, statistics.median(ours), peers, "runsc exec echo", bound)
    report.add(f"{what}, back to back", statistics.median(loop), peers, "runsc exec echo")


class peer:
    """A runsc sandbox to run `runsc exec` in."""

    def __init__(self, home: Path) -> None:
        from sandkeep import Sandbox

        self._sandbox = Sandbox(home=home.parent / "peer", runtime="runsc")
        machine = Machine(Home(home.parent / "peer"), self._sandbox.id)
        self.argv = [*DRIVERS["runsc"].base_command(machine.folder, "none"), "exec", machine.id, "/bin/echo", "hello"]

    def close(self) -> None:
        self._sandbox.kill()


async def timed(act: Callable[[], Awaitable[object]]) -> float:
    begun = time.perf_counter()
    await act()
    return (time.perf_counter() - begun) * 1000


async def sleeping(report: Report, server: Serving, rounds: int) -> None:
    saves, loads, hand = [], [], []
    for _ in range(rounds):
        async with websockets.connect(f"ws://{server.address}/create") as socket:
            talk = Talk(socket)
            await talk.send(idle_timeout=0, enable_checkpoint=True)
            known = await talk.until("RUNNING")
            hand.append(await asyncio.to_thread(by_hand, server.home.parent / "peer", 0, QUICKEST))
            begun = time.perf_counter()
            await talk.send(action="checkpoint")
            await talk.until("CHECKPOINTED")
            saves.append((time.perf_counter() - begun) * 1000)
        begun = time.perf_counter()
        async with websockets.connect(
            f"ws://{server.address}/attach/{known['sandbox_id']}?sandbox_token={known['sandbox_token']}"
        ) as socket:
            talk = Talk(socket)
            await talk.until("RUNNING")
            loads.append((time.perf_counter() - begun) * 1000)
            await talk.send(action="kill_sandbox")
            await talk.until("KILLED")
    save, load_ = statistics.median(one.save + one.delete for one in hand), statistics.median(one.load for one in hand)
    report.add("checkpoint over WebSocket", statistics.median(saves), save, "runsc checkpoint + delete", 2)
    report.add("attach over WebSocket", statistics.median(loads), load_, "runsc restore", 1.5)


async def load(report: Report, server: Serving, sizes: tuple[int, ...]) -> None:
    """Commands in four sandboxes, by REST and by our clients' WebSocket, each client with a connection of its own."""
    headers = {"Authorization": f"Bearer {server.key}"}
    async with httpx.AsyncClient(base_url=f"http://{server.address}", headers=headers, timeout=120) as client:
        made = [(await client.post("/sandboxes", json={})).json()["id"] for _ in range(4)]
        for name, kind in (("REST", Rest), ("WebSocket", Link)):
            for clients in sizes:
                async with contextlib.AsyncExitStack() as stack:
                    open_ = [kind(server, made[number % 4]) for number in range(clients)]
                    for at in range(0, clients, 50):
                        await asyncio.gather(*(stack.enter_async_context(one) for one in open_[at : at + 50]))
                    said = await pressed(clients, lambda number, open_=open_: open_[number].run("true"))
                report.note(f"{name}, {clients} clients: {said}")
        for id in made:
            await client.delete(f"/sandboxes/{id}")


class Rest:
    """A client that costs little itself: httpx would be what is measured."""

    def __init__(self, server: Serving, id: str) -> None:
        self._address = server.address.split(":")
        self._head = f"POST /sandboxes/{id}/commands HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer {server.key}\r\n"

    async def __aenter__(self) -> Rest:
        self._reader, self._writer = await asyncio.open_connection(*self._address)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def run(self, command: str) -> None:
        body = json.dumps({"command": command})
        self._writer.write(
            f"{self._head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        said = await self._reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
        if b" 200 " not in head.splitlines()[0]:
            raise RuntimeError(said)


class Link:
    """A connection of our own clients to one sandbox."""

    def __init__(self, server: Serving, id: str) -> None:
        url = f"ws://{server.address}/sandboxes/{id}/link?api_key={server.key}"
        self._connecting = websockets.connect(url, open_timeout=120, ping_interval=None, proxy=None)

    async def __aenter__(self) -> Link:
        self._socket = await self._connecting
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._socket.close()

    async def run(self, command: str) -> None:
        await self._socket.send(json.dumps({"op": "run", "code": command}))
        while isinstance(message := await self._socket.recv(), bytes) or "ok" not in (said := json.loads(message)):
            pass
        if not said["ok"]:
            raise RuntimeError(said)


async def pressed(clients: int, act: Callable[[int], Awaitable[None]], seconds: float = 5.0) -> str:
    """Commands per second and p99 with that many clients at once, each with one command under way."""
    times: list[float] = []
    end = time.perf_counter() + seconds

    async def one(number: int) -> None:
        while time.perf_counter() < end:
            times.append(await timed(lambda: act(number)))

    begun = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(clients)))
    took = time.perf_counter() - begun
    times.sort()
    return f"{len(times) / took:.0f} commands a second, p50 {times[len(times) // 2]:.0f} ms, p99 {times[int(len(times) * 0.99)]:.0f} ms"
