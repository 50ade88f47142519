"""Issue 5's figures: a command through the WebSocket beside `runsc exec`, save and restore beside runsc by hand, and load."""

from __future__ import annotations

import asyncio
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
from bench.pausing import by_hand
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
        plain.close()
        await talk.send(action="kill_sandbox")
        await talk.until("KILLED")
    report.add(
        f"exec echo over WebSocket, runtime {runtime}",
        statistics.median(ours),
        statistics.median(theirs),
        "runsc exec echo",
        bound,
    )


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
            hand.append(await asyncio.to_thread(by_hand, server.home, _library_id(server.home)))
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
    save, load_ = (statistics.median(one[at] for one in hand) for at in (0, 1))
    report.add("checkpoint over WebSocket", statistics.median(saves), save, "runsc checkpoint + delete", 2)
    report.add("attach over WebSocket", statistics.median(loads), load_, "runsc restore", 1.5)


def _library_id(home: Path) -> str:
    return Home(home).ids()[-1]


async def load(report: Report, server: Serving, sizes: tuple[int, ...]) -> None:
    headers = {"Authorization": f"Bearer {server.key}"}
    async with httpx.AsyncClient(
        base_url=f"http://{server.address}", headers=headers, timeout=120, limits=httpx.Limits(max_connections=600)
    ) as client:
        made = [(await client.post("/sandboxes", json={})).json()["id"] for _ in range(4)]

        async def rest(number: int) -> None:
            answer = await client.post(f"/sandboxes/{made[number % 4]}/commands", json={"command": "true"})
            answer.raise_for_status()

        for clients in sizes:
            report.note(f"REST, {clients} clients: {await pressed(clients, rest)}")
        for id in made:
            await client.delete(f"/sandboxes/{id}")


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
