"""Two servers on one PostgreSQL: each may be asked about any sandbox, whichever of them runs it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from websockets.exceptions import InvalidStatus

import protocol_kit
from fleet import Fleet
from protocol_kit import S
from sandkeep.errors import SandboxNotFound
from serving import PATIENCE, Served, events_of, made, ran, told
from test_server_ports import INSIDE
from waiting import until

pytest_plugins = ["fleet"]


@pytest.fixture
def id(fleet: Fleet) -> Iterator[str]:
    found = made(fleet.here)
    yield found
    assert fleet.there.delete(f"/sandboxes/{found}").status_code in (204, 404)


def test_rest(fleet: Fleet, id: str) -> None:
    there, path = fleet.there, f"/sandboxes/{id}"
    assert ran(there, id, "echo $((6*7)); export WORD=kept")["stdout"] == "42\n"
    assert ran(fleet.here, id, "echo $WORD")["stdout"] == "kept\n"
    shown = there.get(path).json()
    assert (shown["state"], shown["runtime"], shown["env"]["WORD"]) == ("RUNNING", "runc", "kept")
    large = bytes(range(256)) * 30_000
    there.put(
        f"{path}/files",
        params={"path": "large"},
        content=(large[at : at + 99_999] for at in range(0, len(large), 99_999)),
    )
    assert there.get(f"{path}/files", params={"path": "large"}).content == large
    assert there.get(f"{path}/files", params={"path": "none"}).json()["code"] == "FILE_NOT_FOUND"
    snapshot = there.post(f"{path}/snapshot", json={"comment": "one"}).json()["id"]
    assert [one["id"] for one in there.get(f"{path}/snapshots").json()["snapshots"]] == [snapshot]
    assert there.post(f"{path}/resume").json()["host"] == fleet.here.get(path).json()["host"]
    [child] = there.post(f"{path}/fork", json={"count": 1}).json()["sandboxes"]
    assert ran(there, child["id"], "wc -c < large")["stdout"].strip() == str(len(large))
    assert there.delete(f"/sandboxes/{child['id']}").status_code == 204
    assert there.post(f"{path}/pause").json()["state"] == "PAUSED"
    assert there.get(f"{path}/snapshots").status_code == 200
    assert ran(there, id, "echo $WORD")["stdout"] == "kept\n"
    assert ran(fleet.here, id, "echo $WORD")["stdout"] == "kept\n"


def test_streams(fleet: Fleet, id: str) -> None:
    path = f"/sandboxes/{id}/commands?stream=sse"
    with fleet.there.stream(
        "POST", path, json={"command": "echo one; read word; echo $word", "stdin": "two\n"}
    ) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        heard = events_of("".join(answer.iter_text()))
    assert "".join(data["text"] for kind, data in heard if kind == "stdout") == "one\ntwo\n"

    in_use = "SELECT count(*) FROM uses WHERE sandbox = %s"
    with fleet.there.stream("POST", path, json={"command": "echo; sleep 1000"}) as answer:
        said = next(answer.iter_text())
        assert answer.status_code == 200, said
        until(lambda: fleet.rows(in_use, id) == [(1,)], "it is in use")
    until(lambda: fleet.rows(in_use, id) == [(0,)], "both servers have noticed that the client has left")


def test_websockets(fleet: Fleet, id: str) -> None:
    with fleet.socket(fleet.other, f"/sandboxes/{id}/commands/ws") as socket:
        socket.send(json.dumps({"command": "cat; exit 3"}))
        assert json.loads(socket.recv(PATIENCE))["type"] == "start"
        socket.send(b"fed\n")
        assert socket.recv(PATIENCE) == b"\x01fed\n"
        socket.send(json.dumps({"type": "eof"}))
        assert json.loads(socket.recv(PATIENCE))["exit_code"] == 3
    bare: dict[str, str] = {}
    with fleet.socket(fleet.other, f"/sandboxes/{id}/terminal?api_key={fleet.key}", additional_headers=bare) as socket:
        assert json.loads(socket.recv(PATIENCE))["type"] == "start"
        socket.send(b"echo $((6*7)); exit\n")
        heard = b""
        while isinstance(message := socket.recv(PATIENCE), bytes):
            heard += message
        assert b"42" in heard
        assert json.loads(message) == {"type": "exit", **json.loads(message), "exit_code": 0}


def test_ports(fleet: Fleet, id: str) -> None:
    here, there = fleet.here, fleet.there
    here.put(f"/sandboxes/{id}/files", params={"path": "server.py"}, content=INSIDE.encode()).raise_for_status()
    here.post(f"/sandboxes/{id}/commands", json={"command": "python3 server.py", "background": True}).raise_for_status()
    until(lambda: 8080 in there.get(f"/sandboxes/{id}/ports").json()["ports"], "the server inside listens")
    path = f"/sandboxes/{id}/ports/8080"
    seen = there.post(f"{path}/a%2Fb?q=1", content=b"body").json()
    assert (seen["method"], seen["path"], seen["body"]) == ("POST", "/a%2Fb?q=1", "body")
    assert not {"authorization", "x-api-key", "x-sandkeep-hop"} & {name.lower() for name, _ in seen["headers"]}
    assert there.get("/", headers={"Host": f"8080-{id}.example.test"}).json()["path"] == "/"
    assert len(there.get(f"{path}/large").content) == 256 * 40_000
    assert there.get(f"{path}/teapot").headers.get_list("set-cookie") == ["a=1", "b=2"]
    with fleet.socket(fleet.other, f"{path}/chat", subprotocols=["talk"]) as socket:
        assert socket.subprotocol == "talk"
        assert json.loads(socket.recv(PATIENCE))["path"] == "/chat"
        for message in ("word", b"\x00\xff" * 1000):
            socket.send(message)
            assert socket.recv(PATIENCE) == message
    with pytest.raises(InvalidStatus) as refused:
        fleet.socket(fleet.other, f"{path}/refused")
    assert refused.value.response.status_code == 403


def test_the_python_client_goes_on_when_its_sandbox_moves(fleet: Fleet) -> None:
    near, far = fleet.one.remote(fleet.key).Sandbox, fleet.other.remote(fleet.key).Sandbox
    with near() as sandbox:
        distant = far.attach(sandbox.id)
        assert distant.commands.run("echo one", on_stdout=lambda _: None).stdout == "one\n"
        distant.files.write("f", b"x" * 300_000)
        assert len(sandbox.files.read("f")) == 300_000
        terminal = distant.pty.start(cols=90, rows=20)
        terminal.send("exit\n")
        terminal.wait(PATIENCE)
        assert distant.info().runtime == "runc"
        for asked, by in ((distant, sandbox), (sandbox, distant)):  # each has an idle link to where the sandbox was
            by.pause()
            asked.commands.run("true")
            assert by.commands.run("wc -c < f").stdout.strip() == "300000"
            assert asked.commands.run("wc -c < f").stdout.strip() == "300000"


def test_the_websocket_protocol(fleet: Fleet) -> None:
    one, other = (server.url.replace("http", "ws", 1) for server in (fleet.one, fleet.other))

    async def work() -> None:
        first = protocol_kit.Client(await protocol_kit.connect(f"{one}/create"))
        await first.say(enable_checkpoint=True)
        await first.until("RUNNING")
        where = f"{other}/attach/{first.id}?sandbox_token="
        taken = protocol_kit.Client(await protocol_kit.connect(where + first.token))
        assert await taken.rest() == (S("IN_USE"), 1011)
        wrong = protocol_kit.Client(await protocol_kit.connect(where + "wrong"))
        assert (await wrong.rest())[0][0] == S("PERMISSION_DENIAL_ERROR")[0]
        await first.run("echo kept > /root/file")
        await first.close()
        again = protocol_kit.Client(await protocol_kit.connect(where + first.token))
        await again.until("RUNNING")
        assert await again.run("cat /root/file") == "kept\n"
        assert [row[0] for row in fleet.rows("SELECT host FROM sessions WHERE id = %s", first.id)] == [fleet.host]
        await again.say(action="kill_sandbox")
        await again.rest()

    protocol_kit.run(work())


def test_each_server_asks_who_calls_and_writes_it_down(fleet: Fleet, id: str) -> None:
    stranger = fleet.other.api()
    command = {"json": {"command": "id"}}
    for api in (stranger, fleet.one.api()):
        told(api.post(f"/sandboxes/{id}/commands", **command), 404, "SANDBOX_NOT_FOUND")
        told(api.get(f"/sandboxes/{id}/snapshots"), 404, "SANDBOX_NOT_FOUND")
        told(api.post(f"/sandboxes/{id}/pause"), 404, "SANDBOX_NOT_FOUND")
        told(api.get(f"/sandboxes/{id}/ports/8080/"), 404, "SANDBOX_NOT_FOUND")
    told(fleet.there.post(f"/sandboxes/{id}/pause", headers={"Authorization": "Bearer sk_wrong"}), 401, "DENIED")
    with pytest.raises(InvalidStatus) as refused:
        fleet.socket(fleet.other, f"/sandboxes/{id}/link", additional_headers=dict(stranger.headers))
    assert refused.value.response.status_code == 404
    with pytest.raises(SandboxNotFound):
        fleet.other.remote().Sandbox.attach(id)
    assert fleet.rows("SELECT count(*) FROM audit WHERE sandbox = %s AND outcome LIKE '2%%'", id) == [(0,)]
    ran(fleet.there, id, "id")
    assert (
        fleet.rows("SELECT action, outcome FROM audit WHERE sandbox = %s AND outcome LIKE '2%%'", id)
        == [("POST /sandboxes/{id}/commands", "200")] * 2
    )


def test_what_can_not_be_passed_on_is_said(fleet: Fleet, id: str) -> None:
    path, command = f"/sandboxes/{id}/commands", {"json": {"command": "id"}}
    told(fleet.there.post(path, headers={"X-Sandkeep-Hop": "1"}, **command), 421, "SANDBOX_ELSEWHERE")
    with pytest.raises(InvalidStatus) as refused:
        fleet.socket(
            fleet.other,
            f"/sandboxes/{id}/terminal",
            additional_headers={"Authorization": f"Bearer {fleet.key}", "X-Sandkeep-Hop": "1"},
        )
    assert refused.value.response.status_code == 421
    address = fleet.one.url
    try:
        for wrong in (fleet.other.url, None):  # a loop, and nowhere
            fleet.rows("UPDATE servers SET address = %s WHERE host = %s", wrong, fleet.host)
            told(fleet.there.post(path, **command), 421, "SANDBOX_ELSEWHERE")
            assert fleet.there.get(f"/sandboxes/{id}").json()["state"] == "RUNNING"
        fleet.rows("UPDATE servers SET address = 'http://127.0.0.1:1' WHERE host = %s", fleet.host)
        told(fleet.there.post(path, **command), 503, "SERVER_UNREACHABLE")
        assert fleet.there.get(f"/sandboxes/{id}").json()["state"] == "RUNNING"
        with pytest.raises(InvalidStatus) as refused:
            fleet.socket(fleet.other, f"/sandboxes/{id}/link")
        assert refused.value.response.status_code == 503
    finally:
        fleet.rows("UPDATE servers SET address = %s WHERE host = %s", address, fleet.host)
    assert ran(fleet.there, id, "echo again")["stdout"] == "again\n"


def test_a_slow_reader_grows_neither_server(fleet: Fleet, id: str) -> None:
    ran(fleet.here, id, "truncate -s 2G large")
    before = [resident(server) for server in (fleet.one, fleet.other)]
    with httpx.Client(base_url=fleet.other.url, headers=fleet.there.headers, timeout=PATIENCE, trust_env=False) as slow:
        with slow.stream("GET", f"/sandboxes/{id}/files", params={"path": "large"}) as answer:
            next(answer.iter_raw())
            for _ in range(20):
                ran(fleet.there, id, "sleep 0.1")
                for server, at_first in zip((fleet.one, fleet.other), before, strict=True):
                    assert resident(server) < at_first + (200 << 20)


def resident(server: Served) -> int:
    assert server.process is not None
    return int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]) * 4096
