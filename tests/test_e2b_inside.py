"""What E2B's programs do inside: files with metadata, watches, a full disk, WebSockets to ports."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from e2b_kit import Client, start, stream
from serving import PATIENCE, Served, serving, until
from test_server_ports import INSIDE

pytest_plugins = ["serving"]
BOOT = "cat /proc/sys/kernel/random/boot_id"
TRAFFIC = "E2B-Traffic-Access-Token"


@pytest.fixture(scope="module")
def client(served: Served) -> Client:
    return Client(served)


@pytest.fixture(scope="module")
def made(client: Client) -> dict[str, Any]:
    return client.create(timeout=900)


@pytest.fixture(scope="module", params=["crun", "runsc"])
def either(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with serving(tmp_path_factory.mktemp("either") / "home", "--runtime", request.param) as found:
        yield Client(found)


def entry(box: httpx.Client, path: str) -> dict[str, Any]:
    return dict(box.post("/filesystem.Filesystem/Stat", json={"path": path}).json()["entry"])


def write(box: httpx.Client, path: str, **labels: str) -> httpx.Response:
    headers = {f"X-Metadata-{name}": value for name, value in labels.items()}
    return box.post("/files", params={"path": path}, content=b"1", headers=headers)


# metadata of files


def test_metadata_of_files(either: Client) -> None:
    client = either
    made = client.create(timeout=900)
    box = client.box(made)
    sent = write(box, "labelled", Kind="draft", step="3 of 4")
    labels = {"kind": "draft", "step": "3 of 4"}
    assert sent.json() == [{"name": "labelled", "path": "/home/user/labelled", "type": "file", "metadata": labels}]
    assert entry(box, "labelled")["metadata"] == labels
    listed = box.post("/filesystem.Filesystem/ListDir", json={"path": "/home/user"}).json()["entries"]
    assert [one.get("metadata") for one in listed if one["name"] == "labelled"] == [labels]
    parts = {"file": ("both/a", b"x")}
    assert box.post("/files", files=parts, headers={"X-Metadata-by": "form"}).json()[0]["metadata"] == {"by": "form"}
    taken = client.control.post(f"/sandboxes/{made['sandboxID']}/snapshots", json={}).json()["snapshotID"]
    write(box, "labelled", later="1")
    twins = [client.create(templateID=taken, timeout=900)]
    for pause in ({}, {"memory": False}):
        assert client.control.post(f"/sandboxes/{made['sandboxID']}/pause", json=pause).status_code == 204
        assert client.control.post(f"/sandboxes/{made['sandboxID']}/connect", json={}).status_code == 201
        assert entry(box, "labelled")["metadata"] == {"later": "1"}
    forked = client.control.post(f"/sandboxes/{made['sandboxID']}/fork", json={"count": 1}).json()
    twins.append(forked[0]["sandbox"])
    assert [entry(client.box(twin), "labelled")["metadata"] for twin in twins] == [labels, {"later": "1"}]
    moved = {"source": "both", "destination": "moved"}  # in the fork a folder of a lower layer
    assert client.box(twins[1]).post("/filesystem.Filesystem/Move", json=moved).status_code == 200
    assert entry(client.box(twins[1]), "moved/a")["metadata"] == {"by": "form"}
    write(client.box(twins[1]), "labelled", twin="1")
    assert entry(box, "labelled")["metadata"] == {"later": "1"}
    for one in (made, *twins):
        assert client.control.delete(f"/sandboxes/{one['sandboxID']}").status_code == 204


def test_metadata_follows_its_file(either: Client) -> None:
    made = either.create(timeout=900)
    box = either.box(made)

    def change(verb: str, **fields: str) -> None:
        assert box.post(f"/filesystem.Filesystem/{verb}", json=fields).status_code == 200

    def found(path: str) -> dict[str, str] | None:
        return entry(box, path).get("metadata")

    write(box, "d/a", is_="a")
    write(box, "d/b", is_="b")
    change("Move", source="d/a", destination="d/c")
    change("Move", source="d", destination="e")
    assert (found("e/c"), found("e/b")) == ({"is_": "a"}, {"is_": "b"})
    output(box, "ln -s e /home/user/link; echo more >> e/c; chmod 600 e/c")
    assert found("link/c") == {"is_": "a"}, "also changed in place, and by another name"
    write(box, "link/b", other="1")
    assert found("e/b") == {"other": "1"}
    change("Move", source="e/b", destination="e/c")
    assert found("e/c") == {"other": "1"}
    write(box, "e/c")
    assert found("e/c") is None
    write(box, "e/c", again="1")
    change("Remove", path="e")
    write(box, "e/c")
    assert found("e/c") is None
    assert write(box, "e/c", **{"k" * 300: "1"}).status_code == 400
    assert either.control.delete(f"/sandboxes/{made['sandboxID']}").status_code == 204


def test_a_pause_of_files_only_is_a_boot(client: Client) -> None:
    made = client.create(timeout=900)
    box, path = client.box(made), f"/sandboxes/{made['sandboxID']}"
    first = output(box, BOOT)
    assert client.control.post(f"{path}/snapshots", json={}).status_code == 201
    assert client.control.post(f"{path}/connect", json={}).status_code == 200
    assert output(box, BOOT) == first, "it went on"
    assert client.control.post(f"{path}/pause", json={"memory": False}).status_code == 204
    assert client.control.post(f"{path}/connect", json={}).status_code == 201
    second = output(box, BOOT)
    twin = client.create(templateID=client.control.post(f"{path}/snapshots", json={}).json()["snapshotID"], timeout=900)
    assert len({first, second, output(client.box(twin), BOOT), Path(BOOT.split()[1]).read_text()}) == 4
    assert output(box, BOOT) == second
    for one in (made, twin):
        assert client.control.delete(f"/sandboxes/{one['sandboxID']}").status_code == 204


def test_no_space_left(client: Client, made: dict[str, Any]) -> None:
    box = client.box(made)
    free = int(output(box, "df -B1 --output=avail /dev/shm | tail -1"))
    assert free <= 256 << 20, "/dev/shm inside should be small"
    full = box.post("/files", params={"path": "/dev/shm/large"}, content=b"x" * (free + (1 << 20)))
    assert (full.status_code, full.json()["code"]) == (507, 507)
    assert output(box, "ls -A /dev/shm") == ""


def output(box: httpx.Client, command: str) -> str:
    said = [
        message.get("event", {}).get("data", {}) for _, message in stream(box, "/process.Process/Start", start(command))
    ]
    return b"".join(base64.b64decode(one["stdout"]) for one in said if "stdout" in one).decode()


# watches


def test_a_change_of_mode_is_no_write(client: Client, made: dict[str, Any]) -> None:
    box = client.box(made)
    box.post("/filesystem.Filesystem/MakeDir", json={"path": "w/inner"})
    watcher = box.post("/filesystem.Filesystem/CreateWatcher", json={"path": "w", "recursive": True}).json()
    seen: list[tuple[str, str]] = []

    def events() -> list[tuple[str, str]]:
        found = box.post("/filesystem.Filesystem/GetWatcherEvents", json=watcher).json()["events"]
        seen.extend((one["name"], one["type"].removeprefix("EVENT_TYPE_")) for one in found)
        return seen

    write(box, "w/f")
    until(lambda: ("f", "WRITE") in events(), "the file is told")
    output(box, "chmod 600 w/f; chmod 700 w/inner; echo more >> w/f; rm w/f")
    until(lambda: ("f", "REMOVE") in events(), "the end is told")
    new = [("f", "CREATE"), ("f", "CHMOD"), ("f", "WRITE")]
    assert seen == [*new, ("f", "CHMOD"), ("inner", "CHMOD"), ("f", "WRITE"), ("f", "REMOVE")]


def test_what_was_written_is_among_the_events_that_are_asked_for_next(either: Client) -> None:
    """A hundred times, and each time its three words together, with what they are about."""
    box = either.box(either.create(timeout=900))
    box.post("/filesystem.Filesystem/MakeDir", json={"path": "w"})
    asked = {"path": "w", "recursive": False, "includeEntry": True}
    watcher = box.post("/filesystem.Filesystem/CreateWatcher", json=asked).json()
    for number in range(100):
        assert write(box, f"w/{number}").status_code == 200
        found = box.post("/filesystem.Filesystem/GetWatcherEvents", json=watcher).json()["events"]
        told = [(one["name"], one["type"].removeprefix("EVENT_TYPE_"), one["entry"]["size"]) for one in found]
        assert told == [(str(number), word, "1") for word in ("CREATE", "CHMOD", "WRITE")]
    stream(box, "/process.Process/Start", start("rm w/*"))
    found = box.post("/filesystem.Filesystem/GetWatcherEvents", json=watcher).json()["events"]
    assert [one["type"] for one in found] == ["EVENT_TYPE_REMOVE"] * 100
    assert box.post("/filesystem.Filesystem/GetWatcherEvents", json=watcher).json().get("events", []) == []


# ports


def dial(served: Served, id: str, port: int = 8080, path: str = "/chat", **headers: str) -> ClientConnection:
    """By host name, or with `E2b-Sandbox-Id` by header."""
    where = urlsplit(served.url)
    wire = socket.create_connection((where.hostname or "", where.port or 0), timeout=PATIENCE)
    name = "any.name" if "E2b-Sandbox-Id" in headers else f"{port}-{id}.localhost"
    try:
        return connect(
            f"ws://{name}:{where.port}{path}", sock=wire, additional_headers=headers, proxy=None, compression=None,
            open_timeout=PATIENCE, subprotocols=["soup"],  # type: ignore[list-item]
        )  # fmt: skip
    except BaseException:
        wire.close()
        raise


def refused(served: Served, id: str, **options: Any) -> httpx.Response:
    with pytest.raises(InvalidStatus) as found:
        dial(served, id, **options)
    answer = found.value.response
    return httpx.Response(answer.status_code, content=bytes(answer.body or b""))


def begin(client: Client, **fields: Any) -> dict[str, Any]:
    """A sandbox with a server inside."""
    made = client.create(timeout=900, **fields)
    box = client.box(made)
    box.post("/files", params={"path": "server.py"}, content=INSIDE.encode())
    stream(box, "/process.Process/Start", start("setsid python3 server.py >/dev/null 2>&1 &"))
    headers = {TRAFFIC: made.get("trafficAccessToken", "")}
    until(lambda: client.box(made, 8080, **headers).get("/").status_code == 200, "the server inside answers")
    return made


@pytest.fixture(scope="module")
def public(client: Client) -> Iterator[dict[str, Any]]:
    made = begin(client)
    yield made
    client.control.delete(f"/sandboxes/{made['sandboxID']}")


def test_websockets_by_host_name_and_by_header(served: Served, public: dict[str, Any]) -> None:
    id = public["sandboxID"]
    by_header = {"E2b-Sandbox-Id": id, "E2b-Sandbox-Port": "8080"}
    for headers in ({}, by_header):
        with dial(served, id, path="/chat?api_key=theirs", **headers, Authorization="Bearer theirs") as found:
            assert found.subprotocol == "soup"
            seen = json.loads(found.recv(PATIENCE))
            assert seen["path"] == "/chat?api_key=theirs"
            told = {name.lower(): value for name, value in seen["headers"]}
            assert told["authorization"] == "Bearer theirs"
            assert not [name for name in told if name.startswith("e2b-")]
            for message in ("text é", b"\x00binary", "x" * 10_000):
                found.send(message)
                assert found.recv(PATIENCE) == message
    assert refused(served, id, path="/refused").status_code == 403
    closed = refused(served, id, port=9)
    assert (closed.status_code, closed.json()["message"]) == (502, "The sandbox is running but port is not open")
    gone = refused(served, "sb-000000000000", **{**by_header, "E2b-Sandbox-Id": "sb-000000000000"})
    assert (gone.status_code, gone.json()["message"]) == (502, "The sandbox was not found")


def test_a_private_websocket_wakes_and_ends_with_its_sandbox(client: Client, served: Served) -> None:
    made = begin(client, network={"allowPublicTraffic": False}, autoPause=True, autoResume={"enabled": True})
    id, token = made["sandboxID"], {TRAFFIC: made["trafficAccessToken"]}
    assert client.control.post(f"/sandboxes/{id}/pause").status_code == 204
    assert refused(served, id).status_code == 403
    assert client.info(made)["state"] == "paused"
    with pytest.raises(InvalidStatus):  # awake, but without memory: its server is not
        dial(served, id, 9, **token)
    assert client.info(made)["state"] == "running"
    stream(client.box(made), "/process.Process/Start", start("setsid python3 server.py >/dev/null 2>&1 &"))
    until(lambda: client.box(made, 8080, **token).get("/").status_code == 200, "the server inside answers")
    with dial(served, id, **token) as found:
        found.recv(PATIENCE)
        assert client.control.delete(f"/sandboxes/{id}").status_code == 204
        with pytest.raises(ConnectionClosed):
            found.recv(PATIENCE)
    assert refused(served, id, **token, **{"E2b-Sandbox-Id": id, "E2b-Sandbox-Port": "8080"}).status_code == 502
