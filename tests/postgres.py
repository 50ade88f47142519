"""A real PostgreSQL for the tests: one server per test process, a fresh database per test, stopped at the end.

    pytest_plugins = ["postgres"]  # in the test module, for the fixture `postgres`

(PYTEST_DONT_REWRITE: test modules import this before pytest learns that it is a plugin.)
"""

from __future__ import annotations

import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

INSTALL = "install it: apt-get install postgresql-15"


class Postgres:
    """One PostgreSQL server in a temporary folder, on a Unix socket and a loopback port."""

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="sk-pg-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0
        self._as: list[str] = []
        if os.geteuid() == 0:
            user = pwd.getpwnam("postgres")
            os.chown(self.home, user.pw_uid, user.pw_gid)
            self._as = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
        self._as = [*(self._as or ["setpriv"]), "--pdeathsig=INT"]
        made = subprocess.run(
            [
                *self._as,
                _program("initdb"),
                "--no-sync",
                "-A",
                "trust",
                "-U",
                "sandkeep",
                "-E",
                "UTF8",
                "--locale=C",
                "-D",
                self._data,
            ],
            cwd=self.home,
            capture_output=True,
        )
        assert made.returncode == 0, made.stderr.decode()

    @property
    def _data(self) -> str:
        return str(self.home / "data")

    def start(self) -> None:
        """Start it, on the same port as before if it ran before."""
        for _ in range(20):
            port = self._port or _free_port()
            settings = {
                "port": port,
                "listen_addresses": "127.0.0.1",
                "unix_socket_directories": self.home,
                "max_connections": 100,
                "shared_buffers": "16MB",
                "fsync": "off",
            }
            command = [
                *self._as,
                _program("postgres"),
                "-D",
                self._data,
                *(f"--{name}={value}" for name, value in settings.items()),
            ]
            with (self.home / "log").open("ab") as log:
                self._process = subprocess.Popen(command, cwd=self.home, stdout=log, stderr=log)
            if self._answers(port):
                self._port = port
                return
            self.stop()
        raise AssertionError(f"PostgreSQL does not start: {(self.home / 'log').read_text()[-2000:]}")

    def _answers(self, port: int) -> bool:
        assert self._process is not None
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                psycopg.connect(host=str(self.home), port=port, user="sandkeep", dbname="postgres").close()
                return True
            except psycopg.OperationalError:
                time.sleep(0.05)
        return False

    def stop(self) -> None:
        """At once, as when the machine is switched off."""
        if self._process is not None:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGQUIT)
            self._process.wait(60)
            self._process = None

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.home, ignore_errors=True)

    def url(self, database: str, *, tcp: bool = False) -> str:
        where = f"127.0.0.1:{self._port}/{database}" if tcp else f"/{database}?host={self.home}&port={self._port}"
        return f"postgresql://sandkeep@{where}"

    def create(self, template: str = "template0") -> str:
        """A new database, a copy of another if named; its name."""
        name = f"t{uuid.uuid4().hex}"
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
        return name


def _program(name: str) -> str:
    folder = Path("/usr/lib/postgresql/15/bin")
    found = str(folder / name) if (folder / name).exists() else shutil.which(name)
    assert found, f"{name} is missing; {INSTALL}"
    return found


def _free_port() -> int:
    """A port below those that the kernel hands out, so that it is still ours after a restart."""
    while True:
        port = random.randint(20000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    server = Postgres()
    try:
        server.start()
        yield server
    finally:
        server.remove()
