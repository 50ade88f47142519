"""Two servers on one PostgreSQL, asked in E2B's words about sandboxes that the other one runs."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from websockets.exceptions import InvalidStatus

from e2b_kit import Client, frame, gone, start, stream
from fleet import Fleet
from serving import PATIENCE, Served
from test_server_ports import INSIDE
from waiting import until

pytest_plugins = ["fleet"]


@pytest.fixture
def here(fleet: Fleet) -> Client:
    return Client(fleet.one, fleet.key)


@pytest.fixture
def there(fleet: Fleet) -> Client:
    return Client(fleet.other, fleet.key)


@pytest.fixture
def made(here: Client, there: Client) -> Iterator[dict[str, Any]]:
    """A sandbox on the one server; tests ask the other."""
    found = here.create(timeout=900)
    yield found
    assert there.control.delete(f"/sandboxes/{found['sandboxID']}").status_code in (204, 404)


def host_of(fleet: Fleet, made: dict[str, Any]) -> str:
    return str(fleet.rows("SELECT host FROM sessions WHERE id = %s", made["sandboxID"])[0][0])


def said(box: httpx.Client, command: str) -> str:
    heard = stream(box, "/process.Process/Start", start(command, stdin=False))
    assert heard[-1] == (2, {}), heard
    data = [message["event"]["data"] for _, message in heard if "data" in message.get("event", {})]
    return b"".join(base64.b64decode(one["stdout"]) for one in data if "stdout" in one).decode()


def test_the_sandbox_s_own_api(fleet: Fleet, here: Client, there: Client, made: dict[str, Any]) -> None:
    box = there.box(made)
    assert box.get("/health").status_code == 204
    assert said(box, "echo $((6*7))") == "42\n"
    assert box.post("/process.Process/List", json={}).json() == {"processes": []}
    large = bytes(range(256)) * 30_000
    pieces = (large[at : at + 99_999] for at in range(0, len(large), 99_999))
    kind = {"Content-Type": "application/octet-stream"}
    assert box.post("/files", params={"path": "large"}, content=pieces, headers=kind).status_code == 200
    assert here.box(made).get("/files", params={"path": "large"}).content == large
    assert box.get("/files", params={"path": "large"}).content == large
    made_watch = box.post("/filesystem.Filesystem/CreateWatcher", json={"path": "/home/user"}).json()
    box.post("/filesystem.Filesystem/MakeDir", json={"path": "new"})
    until(lambda: box.post("/filesystem.Filesystem/GetWatcherEvents", json=made_watch).json()["events"], "it is told")
    assert box.post("/filesystem.Filesystem/Stat", json={"path": "none"}).json()["code"] == "not_found"
    assert box.get("/metrics").json()["mem_used"] > 0
    wrong = there.box(made, **{"X-Access-Token": "x" * 48})
    assert wrong.post("/process.Process/List", json={}).status_code == 401
    named = fleet.rows("SELECT action FROM audit WHERE sandbox = %s AND action LIKE '%%envd%%'", made["sandboxID"])
    assert len(named) == 3  # by the server that runs it


def test_the_control_plane(fleet: Fleet, here: Client, there: Client, made: dict[str, Any]) -> None:
    id = made["sandboxID"]
    asked = {"Host": "api.example.test:8700"}
    connected = there.control.post(f"/sandboxes/{id}/connect", json={"timeout": 1000}, headers=asked)
    assert (connected.status_code, connected.json()["domain"]) == (200, "example.test:8700")
    assert there.control.post(f"/sandboxes/{id}/timeout", json={"timeout": 800}).status_code == 204
    assert len(there.control.get(f"/sandboxes/{id}/metrics").json()) == 1
    [child] = there.control.post(f"/sandboxes/{id}/fork", json={"count": 1, "timeout": 900}).json()
    assert host_of(fleet, child["sandbox"]) == fleet.host
    assert there.control.delete(f"/sandboxes/{child['sandbox']['sandboxID']}").status_code == 204
    taken = there.control.post(f"/sandboxes/{id}/snapshots", json={})
    assert taken.status_code == 201, taken.text
    assert there.control.post(f"/e2b/sandboxes/{id}/pause").status_code == 204
    gone(there.box(made).get("/health"), id)
    assert there.control.post(f"/v2/sandboxes/{id}/connect", json={"timeout": 900}).status_code == 201
    assert (
        host_of(fleet, made) != fleet.host
    )  # it woke where it was asked for, and the first server is now the distant one
    assert said(here.box(made), "echo again") == "again\n"
    assert here.control.post(f"/sandboxes/{id}/timeout", json={"timeout": 0}).status_code == 204
    until(lambda: there.control.get(f"/sandboxes/{id}").status_code == 404, "it is ended at its deadline")
    stranger = Client(fleet.other)
    for path in ("connect", "pause", "fork", "snapshots"):
        assert stranger.control.post(f"/sandboxes/{id}/{path}").status_code == 404


def test_a_create_that_is_sent_again_to_another_server_or_after_a_crash(
    fleet: Fleet, here: Client, there: Client
) -> None:
    key = {"Idempotency-Key": uuid.uuid4().hex}

    def create(client: Client) -> str:
        answer = client.control.post("/v2/sandboxes", json={"templateID": "base", "timeout": 900}, headers=key)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["sandboxID"])

    with ThreadPoolExecutor(4) as pool:
        ids = set(pool.map(create, [here, there] * 2))
    (id,) = ids
    count = "SELECT count(*) FROM sessions, requests WHERE sandbox = %s AND sandbox = id"
    assert fleet.rows(count, id) == [(1,)]
    fleet.other.kill()
    fleet.other.start()
    again = Client(fleet.other, fleet.key)
    assert create(again) == id
    fleet.rows("DELETE FROM e2b WHERE sandbox = %s", id)  # as a server leaves it that dies between the two
    assert create(again) == id
    assert fleet.rows("SELECT count(*) FROM e2b WHERE sandbox = %s", id) == [(1,)]
    assert again.control.delete(f"/sandboxes/{id}").status_code == 204
    assert fleet.rows(count, id) == [(0,)]
    other = create(again)
    assert other != id
    assert again.control.delete(f"/sandboxes/{other}").status_code == 204


def test_ports_and_signed_addresses(fleet: Fleet, here: Client, there: Client, made: dict[str, Any]) -> None:
    from sandkeep.server.e2b.files import signature

    id = made["sandboxID"]
    here.box(made).post("/files", params={"path": "server.py"}, content=INSIDE.encode())
    signed = signature("server.py", "read", "", made["envdAccessToken"], None)
    bare = fleet.other.api()
    assert bare.get("/files", params={"path": "server.py", "signature": signed}).text == INSIDE
    stream(here.box(made), "/process.Process/Start", start("setsid python3 server.py >/dev/null 2>&1 &"))
    inside = there.box(made, 8080, Authorization="Bearer theirs")
    until(lambda: inside.get("/").status_code == 200, "the server inside listens")
    seen = inside.post("/a%2Fb?q=1", content=b"body").json()
    assert (seen["method"], seen["path"], seen["body"]) == ("POST", "/a%2Fb?q=1", "body")
    told = {name.lower(): value for name, value in seen["headers"]}
    assert told["authorization"] == "Bearer theirs"
    assert not [name for name in told if "e2b" in name or "sandkeep" in name or "access-token" in name]
    assert (
        httpx.get(
            fleet.other.url + "/by/name", headers={"Host": f"8080-{id}.example.test"}, trust_env=False, timeout=PATIENCE
        ).json()["path"]
        == "/by/name"
    )
    routing = {"E2b-Sandbox-Id": id, "E2b-Sandbox-Port": "8080"}
    with fleet.socket(fleet.other, "/chat", additional_headers=routing) as talk:
        assert json.loads(talk.recv(PATIENCE))["path"] == "/chat"
        talk.send("word")
        assert talk.recv(PATIENCE) == "word"
    with pytest.raises(InvalidStatus) as refused:
        fleet.socket(fleet.other, "/chat", additional_headers={**routing, "X-Sandkeep-Hop": "x"})
    assert refused.value.response.status_code == 421


@pytest.mark.parametrize("verb", ["kill", "pause", "crash"])
def test_a_stream_is_reset_when_its_sandbox_goes(fleet: Fleet, there: Client, made: dict[str, Any], verb: str) -> None:
    id = made["sandboxID"]
    with opened(fleet.other, made, "echo ready; sleep 300") as wire:
        match verb:
            case "kill":
                assert there.control.delete(f"/sandboxes/{id}").status_code == 204
            case "pause":
                assert there.control.post(f"/sandboxes/{id}/pause").status_code == 204
            case "crash":
                fleet.one.kill()
        with pytest.raises(ConnectionResetError):
            while True:
                assert wire.recv(65536), "the stream was ended, not reset"
    if verb == "crash":
        unreachable = there.box(made).get("/health")
        assert (unreachable.status_code, unreachable.json()["code"]) == (503, 503)
        fleet.one.start()


def opened(server: Served, made: dict[str, Any], command: str) -> socket.socket:
    """The connection of a stream that has begun and said `ready`."""
    where, body = urlsplit(server.url), frame(start(command))
    head = (
        "POST /process.Process/Start HTTP/1.1\r\nHost: x\r\nContent-Type: application/connect+json\r\n"
        f"E2b-Sandbox-Id: {made['sandboxID']}\r\nX-Access-Token: {made['envdAccessToken']}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    wire = socket.create_connection((where.hostname or "", where.port or 0), timeout=PATIENCE)
    wire.sendall(head.encode() + body)
    heard = b""
    while base64.b64encode(b"ready\n") not in heard:
        heard += wire.recv(65536)
    return wire


def test_a_client_that_leaves_is_noticed_by_both(fleet: Fleet, made: dict[str, Any]) -> None:
    with opened(fleet.other, made, "echo ready; sleep 300"):
        assert between(fleet) == 1
    until(lambda: between(fleet) == 0, "the connection between the servers is closed")


def between(fleet: Fleet) -> int:
    """Open connections from the one server to the other that runs the sandboxes."""
    assert fleet.other.process is not None
    remote = f":{urlsplit(fleet.one.url).port:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    found = {f"socket:[{row[9]}]" for row in rows if row[2].endswith(remote) and row[3] == "01"}
    held = 0
    for one in Path(f"/proc/{fleet.other.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            held += str(one.readlink()) in found
    return held


def test_what_can_not_be_passed_on_is_said(fleet: Fleet, there: Client, made: dict[str, Any]) -> None:
    box, id = there.box(made), made["sandboxID"]
    hop = {"X-Sandkeep-Hop": "x"}
    for answer in (
        box.get("/health", headers=hop),
        box.post("/process.Process/List", json={}, headers=hop),
        there.control.post(f"/sandboxes/{id}/connect", json={}, headers=hop),
    ):
        assert (answer.status_code, answer.json()["code"]) == (421, 421)
    address = fleet.one.url
    try:
        fleet.rows("UPDATE servers SET address = 'http://127.0.0.1:1' WHERE host = %s", fleet.host)
        assert box.get("/health").status_code == 503
        fleet.rows("UPDATE servers SET address = NULL WHERE host = %s", fleet.host)
        assert box.get("/health").status_code == 421
    finally:
        fleet.rows("UPDATE servers SET address = %s WHERE host = %s", address, fleet.host)
    assert said(box, "echo again") == "again\n"
