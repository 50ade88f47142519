"""For the tests of the server: the real `sandkeep serve` in a process of its own, on a port that the kernel picks.

(PYTEST_DONT_REWRITE: test modules import this before pytest learns that it is a plugin.)
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import ClientConnection
from websockets.sync.client import connect as open_socket

from sandkeep.client import Remote
from sandkeep.sandbox import Sandbox
from sandkeep.sessions import Database, Keys
from waiting import PATIENCE as PATIENCE
from waiting import until as until


class Served:
    """A server's home and, while it runs, its process. `key` makes keys; `api` and `remote` speak to it with one."""

    def __init__(self, home: Path, *options: str, database: str | None = None, port: int = 0) -> None:
        self.home = home
        self.database = database or f"sqlite:///{home}/sessions.db"
        self.options = [*options, "--database", self.database, "--host-id", uuid.uuid4().hex, "--port", str(port)]
        self.url = ""
        self.process: subprocess.Popen[str] | None = None
        self._closing: list[Any] = []

    def start(self) -> Served:
        argv = [sys.executable, "-m", "sandkeep", "serve", "--home", str(self.home), *self.options]
        self.home.mkdir(exist_ok=True)
        log = open(self.home / "server.log", "a")  # noqa: SIM115
        source = str(Path(__file__).parents[1] / "src")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])}
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        log.close()
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if match := re.search(r"serves on (http://\S+)", line):
                self.url = match[1]
                return self
        raise AssertionError(f"the server did not start: {(self.home / 'server.log').read_text()}")

    def kill(self) -> None:
        """As by `kill -9`."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        return self._end(signal.SIGTERM)

    def _end(self, number: int) -> int:
        process, self.process = self.process, None
        if process is None:
            return 0
        process.send_signal(number)
        code = process.wait(PATIENCE)
        assert process.stdout is not None
        process.stdout.close()
        return code

    def key(self, user: str | None = None, project: str | None = None) -> str:
        database = Database(self.database)
        try:
            return Keys(database).create(user or uuid.uuid4().hex, project)[1]
        finally:
            database.close()

    def api(self, key: str | None = None, **options: Any) -> httpx.Client:
        headers = {"Authorization": f"Bearer {key or self.key()}"}
        client = httpx.Client(base_url=self.url, headers=headers, timeout=PATIENCE, trust_env=False, **options)
        self._closing.append(client)
        return client

    def remote(self, key: str | None = None) -> Remote:
        remote = Remote(self.url, key or self.key())
        self._closing.append(remote)
        return remote

    def log(self) -> str:
        return (self.home / "server.log").read_text()

    def end(self) -> None:
        """Stop it and remove everything that it kept."""
        for one in self._closing:
            one.close()
        self.kill()
        for info in Sandbox.list(home=self.home):
            Sandbox.attach(info.id, home=self.home).kill()
        shutil.rmtree(self.home, ignore_errors=True)


@contextlib.contextmanager
def serving(home: Path, *options: str, **more: Any) -> Iterator[Served]:
    served = Served(home, *options, **more)
    try:
        yield served.start()
    finally:
        served.end()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for a whole module; tests differ by their users."""
    with serving(tmp_path_factory.mktemp("served") / "home", "--runtime", "runc") as found:
        yield found


def connect(url: str, **options: Any) -> ClientConnection:
    """A WebSocket whose opening and pings wait as long as everything else does."""
    return open_socket(url, proxy=None, open_timeout=PATIENCE, ping_timeout=PATIENCE, **options)


def fixed_port() -> int:
    """A free port that nobody is given meanwhile: below those that the kernel hands out. For servers that come back."""
    while True:
        port = random.randint(20000, 32000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def made(api: httpx.Client, **fields: Any) -> str:
    """The id of a new sandbox."""
    answer = api.post("/sandboxes", json=fields)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def ran(api: httpx.Client, id: str, command: str, **fields: Any) -> dict[str, Any]:
    answer = api.post(f"/sandboxes/{id}/commands", json={"command": command, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def told(answer: httpx.Response, status: int, code: str) -> None:
    """An answer is this error, in the one shape that errors have."""
    assert answer.status_code == status, answer.text
    said = answer.json()
    assert said["code"] == code
    assert said["message"]


def events_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Server-sent events."""
    found = []
    for block in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if lines:
            found.append((lines["event"], json.loads(lines["data"])))
    return found
