"""The server's disk is full: every call says so in its own words, nothing is lost or half made, and it goes on when there is room."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from disks import full, mounted
from sandkeep.sandbox.home import Home
from serving import Served, made, ran
from waiting import until


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "small", "96m") as path:
        yield path


@contextlib.contextmanager
def serving_on(small: Path, runtime: str, database: Path) -> Iterator[Served]:
    server = Served(small / "home", "--runtime", runtime, "--sweep-interval", "0.3", database=f"sqlite:///{database}")
    try:
        yield server.start()
    finally:
        server.end()


def refusals(api: httpx.Client, id: str) -> dict[str, tuple[int, str]]:
    """What needs room, tried without any: each answer's status and code."""
    data = b"data" * 10_000
    digest = {"Content-SHA256": hashlib.sha256(data).hexdigest()}
    answers = {
        "upload": api.put(f"/sandboxes/{id}/files", params={"path": "precious"}, content=data),
        "create": api.post("/sandboxes", json={}),
        "checkpoint": api.post(f"/sandboxes/{id}/checkpoints", json={}),
        "snapshot": api.post(f"/sandboxes/{id}/snapshot", json={}),
        "fork": api.post(f"/sandboxes/{id}/fork", json={}),
        "pause": api.post(f"/sandboxes/{id}/pause"),
        "storage": api.put("/storage/a", content=data, headers=digest),
    }
    return {name: (answer.status_code, code_of(answer.json())) for name, answer in answers.items()}


def code_of(said: dict[str, Any]) -> str:
    """A fork's answer has an entry for each one, made or not."""
    return str(said["sandboxes"][0]["error"]["code"] if "sandboxes" in said else said["code"])


def goes_on(api: httpx.Client, server: Served, id: str) -> None:
    """Nothing is lost, nothing half made is left, and all that was refused works."""
    assert ran(api, id, "cat precious; echo $WORD")["stdout"] == "precious\nkept\n"
    home = Home(server.home)
    until(lambda: home.ids() == [id], "what was not made is gone")
    assert api.get("/storage").json()["objects"] == []
    assert api.post(f"/sandboxes/{id}/checkpoints", json={}).status_code == 201
    assert api.post(f"/sandboxes/{id}/pause").json()["state"] == "PAUSED"
    assert ran(api, id, "cat precious; echo $WORD")["stdout"] == "precious\nkept\n"
    other = made(api)
    assert ran(api, other, "echo new")["stdout"] == "new\n"


@pytest.mark.parametrize("runtime", ["runc", "runsc"])
def test_a_full_disk_is_said_and_nothing_is_lost(small: Path, tmp_path: Path, runtime: str) -> None:
    with serving_on(small, runtime, tmp_path / "sessions.db") as server:
        api = server.api()
        id, filler = made(api), made(api)
        ran(api, id, "echo precious > precious; export WORD=kept")
        with full(small):
            said = refusals(api, id)
            assert said.pop("upload") == (507, "FILE_ERROR")
            assert said.pop("fork") in ((507, "STORE_FULL"), (201, "STORE_FULL"))  # as a whole, or each by itself
            assert said == dict.fromkeys(said, (507, "STORE_FULL"))
            assert ran(api, id, "cat precious; echo $WORD")["stdout"] == "precious\nkept\n"
            shown = api.get(f"/sandboxes/{id}").json()
            assert (shown["state"], shown["last_error"]["code"]) == ("RUNNING", "STORE_FULL")
            assert api.delete(f"/sandboxes/{filler}").status_code == 204
            until(lambda: filler not in Home(server.home).ids(), "a full disk does not keep what is killed")
        goes_on(api, server, id)


def test_a_database_on_the_full_disk_answers_so_and_goes_on(small: Path) -> None:
    with serving_on(small, "runc", small / "sessions.db") as server:
        api = server.api()
        id = made(api)
        ran(api, id, "echo precious > precious; export WORD=kept")
        with full(small):
            said = refusals(api, id)
            assert {code for _, code in said.values()} <= {"DATABASE_UNREACHABLE", "STORE_FULL", "FILE_ERROR"}, said
            assert {status for status, _ in said.values()} <= {201, 503, 507}, said
            assert api.get(f"/sandboxes/{id}").json()["state"] in ("RUNNING", "PAUSING")  # no room to write which
        goes_on(api, server, id)
