"""For the tests of the WebSocket protocol: real servers as processes, and a small client written from the protocol's facts.

The original clients can't be had here; this one says and hears exactly what is on the wire, and no more.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as open_socket
from websockets.exceptions import ConnectionClosed

from waiting import PATIENCE

P = "SANDBOX_"


def S(*names: str) -> list[Any]:
    """Statuses as the wire has them."""
    return [{"event": "status_update", "status": P + name} for name in names]


def error(message: str) -> dict[str, Any]:
    return {"event": "error", "message": message}


_open: list[ClientConnection] = []


async def connect(url: str, **options: Any) -> ClientConnection:
    """A socket that `run` closes if the test does not."""
    socket = await open_socket(url, max_size=None, open_timeout=PATIENCE, ping_timeout=PATIENCE, **options)
    _open.append(socket)
    return socket


def run(work: Any) -> Any:
    async def whole() -> Any:
        try:
            return await work
        finally:
            while _open:
                await _open.pop().close()

    return asyncio.run(whole())


class Server:
    """`sandkeep serve` in a process of its own."""

    def __init__(self, folder: Path, *options: str, home: Path | None = None) -> None:
        self.home = home or folder / "home"
        self.log = folder / f"server-{time.monotonic_ns()}.log"
        self._options = options
        self.start()

    def start(self) -> None:
        words = [sys.executable, "-m", "sandkeep", "serve", "--port", "0", "--sweep-interval", "0.2", *self._options]
        environment = {**os.environ, "SANDKEEP_HOME": str(self.home), "PYTHONUNBUFFERED": "1"}
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(words, env=environment, stdout=out, stderr=out)
        deadline = time.monotonic() + PATIENCE
        started = len(self.log.read_text())
        while "serves on" not in (text := self.log.read_text()[started:]):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)
        self.http = text.split("serves on ")[1].split()[0]
        self.ws = self.http.replace("http", "ws", 1)
        keys = [line.split(": ")[1] for line in self.log.read_text().splitlines() if "shown once" in line]
        self.key = keys[0] if keys else ""

    def stop(self, how: int = signal.SIGTERM) -> None:
        if self.process.poll() is None:
            self.process.send_signal(how)
        self.process.wait(PATIENCE)

    def call(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(self.http + path, body, named, method=method)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()


@contextmanager
def serving(folder: Path, *options: str, home: Path | None = None) -> Iterator[Server]:
    server = Server(folder, *options, home=home)
    try:
        yield server
    finally:
        server.stop(signal.SIGKILL)


class Client:
    """What goes over one socket. `id` and `token` are remembered from `sandbox_id`."""

    def __init__(self, socket: ClientConnection, id: str = "", token: str = "") -> None:
        self.socket, self.id, self.token = socket, id, token

    async def say(self, **message: Any) -> None:
        await self.socket.send(json.dumps(message))

    async def hear(self) -> dict[str, Any]:
        async with asyncio.timeout(PATIENCE):
            event: dict[str, Any] = json.loads(await self.socket.recv())
        if event["event"] == "sandbox_id":
            self.id, self.token = event["sandbox_id"], event["sandbox_token"]
        return event

    async def until(self, status: str) -> list[dict[str, Any]]:
        """All events up to and with this status."""
        heard = []
        while True:
            heard.append(await self.hear())
            if heard[-1] == S(status)[0]:
                return heard

    async def rest(self) -> tuple[list[dict[str, Any]], int]:
        """All events until the server closes, and its close code."""
        heard = []
        try:
            while True:
                heard.append(await self.hear())
        except ConnectionClosed:
            return heard, self.socket.close_code or 1006

    async def execute(self, language: str, code: str) -> None:
        await self.say(language=language, code=code)
        assert await self.hear() == S("EXECUTION_RUNNING")[0]

    async def run(self, code: str, language: str = "bash") -> str:
        """All that it writes."""
        await self.execute(language, code)
        return text(await self.until("EXECUTION_DONE"))

    async def close(self) -> None:
        await self.socket.close()

    def vanish(self) -> None:
        """Without a close frame."""
        self.socket.transport.abort()


def text(heard: list[dict[str, Any]], *streams: str) -> str:
    return "".join(one["data"] for one in heard if one["event"] in (streams or ("stdout", "stderr")))


async def create(server: Server, **options: Any) -> Client:
    client = Client(await connect(f"{server.ws}/create"))
    await client.say(**options)
    heard = await client.until("RUNNING")
    assert [one["event"] for one in heard].count("sandbox_id") == 1
    return client


async def dial(server: Server, id: str, token: str, **options: Any) -> Client:
    """Attached, and nothing heard yet."""
    url = f"{server.ws}/attach/{id}?sandbox_token={token}"
    return Client(await connect(url, **options), id, token)


async def attach(server: Server, id: str, token: str) -> Client:
    client = await dial(server, id, token)
    await client.until("RUNNING")
    return client


async def eventually(true: Callable[[], Any]) -> Any:
    async with asyncio.timeout(PATIENCE):
        while not (found := await true() if asyncio.iscoroutinefunction(true) else true()):
            await asyncio.sleep(0.05)
        return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for the tests of a module, on runc; each test has sandboxes of its own."""
    with clean(tmp_path_factory.mktemp("protocol"), "--runtime", "runc") as found:
        yield found


@contextmanager
def clean(folder: Path, *options: str) -> Iterator[Server]:
    """A server whose sandboxes are gone when it is."""
    from sandkeep import Sandbox
    from sandkeep.sandbox.home import Home
    from sandkeep.sandbox.sweeping import gc

    with serving(folder, *options) as server:
        yield server
    sweep_home(server.home, Sandbox, Home, gc)


def sweep_home(path: Path, sandbox: Any, home: Any, gc: Any) -> None:
    found = home(path)
    for id in found.ids():
        sandbox.attach(id, home=path).kill()
    gc(found, cache=True)
    assert found.ids() == []
