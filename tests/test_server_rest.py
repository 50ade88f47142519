"""The REST API against a real server with real sandboxes."""

from __future__ import annotations

import io
import json
import socket
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from sqlalchemy import select
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect as open_socket

from sandkeep.server.run import _bound
from sandkeep.server.settings import Settings
from sandkeep.sessions import Database, Tokens
from sandkeep.sessions.tables import tokens
from serving import Served, connect, events_of, made, ran, served, serving, told  # noqa: F401
from waiting import PATIENCE, until


@pytest.fixture
def api(served: Served) -> httpx.Client:  # noqa: F811
    return served.api()


def test_a_sandbox_is_made_listed_used_and_killed(api: httpx.Client) -> None:
    id = made(api, env={"COLOUR": "blue"}, metadata={"for": "test"}, auto_pause_timeout=77)
    assert ran(api, id, "echo $COLOUR; cd /tmp; false")["exit_code"] == 1
    assert ran(api, id, "pwd")["stdout"] == "/tmp\n"
    shown = api.get(f"/sandboxes/{id}").json()
    assert (shown["state"], shown["metadata"], shown["auto_pause_timeout"], shown["cwd"]) == (
        "RUNNING",
        {"for": "test"},
        77,
        "/tmp",
    )
    assert [one["id"] for one in api.get("/sandboxes").json()["sandboxes"]] == [id]
    assert api.patch(f"/sandboxes/{id}", json={"auto_pause_timeout": 0}).json()["auto_pause_timeout"] == 0
    assert api.delete(f"/sandboxes/{id}").status_code == 204
    told(api.get(f"/sandboxes/{id}"), 404, "SANDBOX_NOT_FOUND")
    told(api.delete(f"/sandboxes/{id}"), 404, "SANDBOX_NOT_FOUND")
    assert api.get("/sandboxes").json()["sandboxes"] == []


def test_what_is_killed_leaves_no_token(served: Served) -> None:  # noqa: F811
    api = served.api()
    database = Database(served.database)
    try:
        ids = [made(api), made(api)]
        for id in ids:
            Tokens(database).issue(id)
        api.delete(f"/sandboxes/{ids[0]}")
        with database.read() as connection:
            assert (
                connection.execute(select(tokens.c.sandbox).where(tokens.c.sandbox.in_(ids))).scalars().all() == ids[1:]
            )
    finally:
        database.close()


def test_pages_of_sandboxes_go_on_by_cursor_newest_first(api: httpx.Client) -> None:
    ids = [made(api, project=project) for project in ("p", "q", "p")]
    first = api.get("/sandboxes", params={"limit": 2}).json()
    rest = api.get("/sandboxes", params={"limit": 2, "cursor": first["cursor"]}).json()
    assert [one["id"] for one in first["sandboxes"] + rest["sandboxes"]] == ids[::-1]
    assert rest["cursor"] is None
    assert len(api.get("/sandboxes", params={"project": "p"}).json()["sandboxes"]) == 2
    assert api.get("/sandboxes", params={"state": "PAUSED"}).json()["sandboxes"] == []
    told(api.get("/sandboxes", params={"cursor": "nonsense"}), 400, "BAD_ARGUMENT")


def test_commands_stream_as_events_and_can_be_fed_and_signalled(api: httpx.Client) -> None:
    id = made(api)
    answer = api.post(
        f"/sandboxes/{id}/commands?stream=sse",
        json={"command": "read x; echo got $x; echo é >&2; exit 4", "stdin": "it\n"},
    )
    found = events_of(answer.text)
    assert (found[0][0], found[-1][0], found[-1][1]["exit_code"]) == ("start", "exit", 4)
    assert {name: data["text"] for name, data in found[1:-1]} == {"stdout": "got it\n", "stderr": "é\n"}
    base = f"/sandboxes/{id}/commands"
    pid = api.post(base, json={"command": "cat; echo bye", "background": True, "tag": "feeder"}).json()["pid"]
    assert api.get(f"{base}/{pid}").json()["tag"] == "feeder"
    assert api.post(f"{base}/{pid}/stdin", content=b"one ").status_code == 204
    assert api.post(f"{base}/{pid}/stdin", params={"close": True}, content=b"two\n").status_code == 204
    output = events_of(api.get(f"{base}/{pid}/output").text)
    assert "".join(data["text"] for name, data in output if name == "stdout") == "one two\nbye\n"
    assert api.get(f"{base}/{pid}/wait").json()["stdout"] == "one two\nbye\n"
    slow = api.post(base, json={"command": "sleep 1000", "background": True}).json()["pid"]
    assert api.post(f"{base}/{slow}/signal", json={"signal": "KILL"}).status_code == 204
    assert api.get(f"{base}/{slow}/wait").json()["error_class"] == "KILLED"
    told(api.get(f"{base}/99999"), 404, "PROCESS_NOT_FOUND")
    told(api.get(f"{base}/99999/output"), 404, "PROCESS_NOT_FOUND")
    assert ran(api, id, "sleep 1000", timeout=0.2)["error_class"] == "TIMEOUT"
    cut = ran(api, id, "seq 100000", max_output=100)
    assert cut["truncated"]
    assert len(cut["stdout"]) == 100


def test_files_go_up_and_down_whole(api: httpx.Client) -> None:
    id = made(api)
    files = f"/sandboxes/{id}/files"
    data = bytes(range(256)) * 20_000

    def pieces() -> object:
        for at in range(0, len(data), 100_000):
            yield data[at : at + 100_000]

    put = api.put(files, params={"path": "in/a.bin", "mode": "640"}, content=pieces())  # type: ignore[arg-type]
    assert (put.json()["size"], put.json()["mode"]) == (len(data), 0o640)
    assert api.get(files, params={"path": "in/a.bin"}).content == data
    assert api.get(files, params={"path": "in/a.bin", "offset": 5, "length": 7}).content == data[5:12]
    assert api.put(files, params={"path": "in/empty"}, content=b"").json()["size"] == 0
    assert api.get(files, params={"path": "in/empty"}).content == b""
    assert api.put(files, params={"path": "in/empty", "append": True}, content=b"more").json()["size"] == 4
    api.post(f"{files}/mkdir", json={"path": "new/deep"}).raise_for_status()
    api.post(f"{files}/move", json={"source": "in/a.bin", "target": "new/b.bin"}).raise_for_status()
    assert sorted(one["name"] for one in api.get(f"{files}/list", params={"path": ".", "depth": 2}).json()["files"]) == [
        "b.bin", "deep", "empty", "in", "new",
    ]  # fmt: skip
    assert api.delete(files, params={"path": "new"}).status_code == 204
    told(api.get(f"{files}/stat", params={"path": "new"}), 404, "FILE_NOT_FOUND")
    told(api.get(files, params={"path": "new"}), 404, "FILE_NOT_FOUND")
    told(api.get(files, params={"path": "in"}), 400, "FILE_ERROR")
    told(api.put(files, params={"path": "x", "mode": "rw"}, content=b""), 400, "BAD_ARGUMENT")


def test_an_upload_that_breaks_off_leaves_the_old_file(api: httpx.Client, served: Served) -> None:  # noqa: F811
    id = made(api)
    api.put(f"/sandboxes/{id}/files", params={"path": "f"}, content=b"old").raise_for_status()

    def broken() -> object:
        yield b"new" * 100_000
        raise RuntimeError("the client dies")

    with pytest.raises(RuntimeError):
        api.put(f"/sandboxes/{id}/files", params={"path": "f"}, content=broken())  # type: ignore[arg-type]
    assert api.get(f"/sandboxes/{id}/files", params={"path": "f"}).content == b"old"
    assert ran(api, id, "ls")["stdout"] == "f\n"


def test_env_history_and_workflow(api: httpx.Client) -> None:
    id = made(api)
    base = f"/sandboxes/{id}"
    assert api.put(f"{base}/env", json={"A": "1", "B": "2"}).status_code == 204
    assert api.delete(f"{base}/env/A").status_code == 204
    env = api.get(f"{base}/env").json()["env"]
    assert "A" not in env
    assert env["B"] == "2"
    told(api.put(f"{base}/env", json={"not a name": "x"}), 400, "BAD_ARGUMENT")
    ran(api, id, "echo remembered")
    assert [one["command"] for one in api.get(f"{base}/history").json()["history"]] == ["echo remembered"]
    assert api.delete(f"{base}/history").status_code == 204
    assert api.get(f"{base}/history").json()["history"] == []
    assert api.put(f"{base}/workflow", json={"variables": {"a": [1, None]}}).status_code == 204
    assert api.patch(f"{base}/workflow", json={"variables": {"b": 2}}).status_code == 204
    assert api.get(f"{base}/workflow").json() == {"variables": {"a": [1, None], "b": 2}}
    assert api.delete(f"{base}/workflow/a").json() == {"deleted": True}


def test_snapshots_forks_and_checkpoints(api: httpx.Client) -> None:
    id = made(api)
    base = f"/sandboxes/{id}"
    ran(api, id, "echo one > f")
    snapshot = api.post(f"{base}/snapshot", json={"comment": "first"}).json()["id"]
    first = api.post(f"{base}/checkpoints", json={"comment": "a", "tag": "t"}).json()["id"]
    ran(api, id, "echo two > f; echo new > g")
    second = api.post(f"{base}/checkpoints").json()["id"]
    fork, other = (one["id"] for one in api.post(f"{base}/fork", json={"count": 2}).json()["sandboxes"])
    assert ran(api, fork, "cat f")["stdout"] == ran(api, other, "cat f")["stdout"] == "two\n"
    assert api.get(f"/sandboxes/{fork}").json()["forked_from"] == id
    assert api.post(f"{base}/restore", json={"to": snapshot}).json()["level"] == "files"
    assert ran(api, id, "cat f; ls")["stdout"] == "one\nf\n"
    assert [one["comment"] for one in api.get(f"{base}/snapshots").json()["snapshots"]] == ["first"]
    assert api.delete(f"{base}/snapshots/{snapshot}").status_code == 204
    told(api.post(f"{base}/restore", json={"to": snapshot}), 404, "SNAPSHOT_NOT_FOUND")
    assert [one["id"] for one in api.get("/checkpoints").json()["checkpoints"]] == [second, first]
    assert api.get("/checkpoints", params={"tag": "t"}).json()["checkpoints"][0]["id"] == first
    assert api.get(f"/checkpoints/{first}").json()["comment"] == "a"
    tree = api.get("/checkpoints/tree").json()["checkpoints"]
    assert [(one["id"], one["parent_id"]) for one in tree[:2]] == [(first, None), (second, first)]
    changes = {
        one["path"]: one["change"]
        for one in api.get("/checkpoints/diff", params={"a": first, "b": second, "times": False}).json()["changes"]
    }
    where = "/home/user/workspace"
    assert (changes[f"{where}/f"], changes[f"{where}/g"]) == ("changed", "added")
    assert api.get(f"/checkpoints/{second}/files", params={"path": f"{where}/f"}).content == b"two\n"
    assert {one["name"] for one in api.get(f"/checkpoints/{second}/ls", params={"path": where}).json()["files"]} == {
        "f",
        "g",
    }
    with tarfile.open(fileobj=io.BytesIO(api.get(f"/checkpoints/{first}/extract").content)) as tar:
        inside = tar.extractfile(f".{where}/f")
        assert inside is not None
        assert inside.read() == b"one\n"
    back = api.post("/sandboxes", json={"from_checkpoint": first}).json()
    assert back["restore_report"]["level"] == "files"
    assert ran(api, back["id"], "cat f")["stdout"] == "one\n"
    told(api.post("/sandboxes", json={"from_checkpoint": "ck_" + "0" * 26}), 404, "CHECKPOINT_NOT_FOUND")


def test_pause_frees_and_a_touch_wakes_once_however_many_touch(api: httpx.Client, served: Served) -> None:  # noqa: F811
    id = made(api, auto_pause_timeout=500)
    ran(api, id, "echo kept > f; export WORD=kept")
    paused = api.post(f"/sandboxes/{id}/pause").json()
    assert paused["state"] == "PAUSED"
    assert api.get(f"/sandboxes/{id}").json()["state"] == "PAUSED"  # looking does not wake
    with ThreadPoolExecutor(12) as pool:
        results = list(pool.map(lambda _: ran(api, id, "cat f; echo $WORD")["stdout"], range(12)))
    assert set(results) == {"kept\nkept\n"}
    shown = api.get(f"/sandboxes/{id}").json()
    assert (shown["state"], shown["auto_pause_timeout"]) == ("RUNNING", 500)
    events = [one["kind"] for one in api.get(f"/sandboxes/{id}/events").json()["events"]]
    assert events.count("resumed") == 1


def test_an_idle_sandbox_sleeps_and_a_busy_one_does_not(tmp_path: Path) -> None:
    with serving(tmp_path / "home", "--runtime", "runc", "--sweep-interval", "0.2") as server:
        api = server.api()
        busy, idle = made(api, auto_pause_timeout=1), made(api, auto_pause_timeout=1)
        ran(api, idle, "echo kept > f")
        with api.stream("POST", f"/sandboxes/{busy}/commands?stream=sse", json={"command": "sleep 1000"}) as stream:
            lines = stream.iter_lines()  # an iterator that nobody holds would close the connection
            assert next(lines) == "event: start"
            until(lambda: api.get(f"/sandboxes/{idle}").json()["state"] == "PAUSED", "the idle one sleeps")
            assert api.get(f"/sandboxes/{busy}").json()["state"] == "RUNNING"
            assert ran(api, idle, "cat f")["stdout"] == "kept\n"
            until(lambda: api.get(f"/sandboxes/{idle}").json()["state"] == "PAUSED", "it sleeps again")
            assert api.get(f"/sandboxes/{busy}").json()["state"] == "RUNNING"


def test_secrets_survive_a_pause_and_are_written_nowhere(api: httpx.Client, served: Served) -> None:  # noqa: F811
    secret = "s3cr3t-" + "f" * 20
    id = made(api, secrets={"TOKEN": secret})
    assert ran(api, id, 'test "$TOKEN" = ' + secret + " && echo same")["stdout"] == "same\n"
    api.post(f"/sandboxes/{id}/pause").raise_for_status()
    assert ran(api, id, "printenv TOKEN | tail -c 5")["stdout"] == "ffff\n"
    assert secret not in json.dumps(api.get(f"/sandboxes/{id}").json())
    for kept in (served.home / "sessions.db", served.home / "sessions.db-wal", served.home / "server.log"):
        assert not kept.exists() or secret.encode() not in kept.read_bytes()


def test_a_command_over_a_websocket_takes_input_and_signals(api: httpx.Client, served: Served) -> None:  # noqa: F811
    id = made(api)
    headers = {"Authorization": api.headers["Authorization"]}
    url = served.url.replace("http", "ws") + f"/sandboxes/{id}/commands/ws"
    with connect(url, additional_headers=headers) as socket:
        socket.send(json.dumps({"command": "read x; echo $x; echo err >&2; sleep 1000"}))
        assert json.loads(socket.recv(PATIENCE))["type"] == "start"
        socket.send(b"hello\n")
        assert {socket.recv(PATIENCE), socket.recv(PATIENCE)} == {b"\x01hello\n", b"\x02err\n"}
        socket.send(json.dumps({"type": "signal", "signal": "TERM"}))
        last = json.loads(socket.recv(PATIENCE))
        assert (last["type"], last["error_class"]) == ("exit", "KILLED")
    with connect(url, additional_headers=headers) as socket:
        socket.send(json.dumps({"command": "x", "surprise": 1}))
        assert json.loads(socket.recv(PATIENCE))["error"]["code"] == "BAD_ARGUMENT"


def test_a_terminal_is_resized_left_and_found_again(api: httpx.Client, served: Served) -> None:  # noqa: F811
    id = made(api)
    key = api.headers["Authorization"].split()[1]
    url = served.url.replace("http", "ws") + f"/sandboxes/{id}/terminal?api_key={key}"
    with connect(f"{url}&cols=100&rows=30&command=bash%20--norc") as socket:
        pid = json.loads(socket.recv(PATIENCE))["pid"]
        socket.send(b"stty size; x=kept\n")
        seen = b""
        while b"30 100" not in seen:
            seen += socket.recv(PATIENCE)  # type: ignore[operator]
        socket.send(json.dumps({"type": "resize", "cols": 50, "rows": 20}))
        socket.send(b"stty size\n")
        while b"20 50" not in seen:
            seen += socket.recv(PATIENCE)  # type: ignore[operator]
    with connect(f"{url}&pid={pid}") as socket:
        assert json.loads(socket.recv(PATIENCE))["pid"] == pid
        socket.send(b'echo "<$x>"; exit 3\n')
        messages = list(socket)
        assert b"<kept>" in b"".join(one for one in messages if isinstance(one, bytes))
        assert json.loads(messages[-1])["exit_code"] == 3


def test_names_that_are_no_text_are_told_all_the_same(api: httpx.Client) -> None:
    id = made(api)
    ran(api, id, r"""touch "$(printf 'x\377y')" """)
    (found,) = api.get(f"/sandboxes/{id}/files/list", params={"path": "."}).json()["files"]
    assert found["name"] == "x\udcffy"
    body = json.dumps({"command": ": \udcfd"})
    api.post(f"/sandboxes/{id}/commands", content=body, headers={"content-type": "application/json"})
    assert api.get(f"/sandboxes/{id}/history").json()["history"][-1]["command"] == ": \udcfd"


def test_who_is_refused_a_websocket_is_no_error_of_the_server(api: httpx.Client, served: Served) -> None:  # noqa: F811
    good, before = served.key(), len(served.log())
    for path, key, status in (
        ("sb-000000000000/link", good, 404),
        ("sb-000000000000/terminal", good, 404),
        (f"{made(api)}/link", "sk_wrong", 401),
    ):
        with pytest.raises(InvalidStatus) as refused:
            open_socket(f"ws{served.url.removeprefix('http')}/sandboxes/{path}?api_key={key}", proxy=None).__enter__()
        assert refused.value.response.status_code == status
    assert "Traceback" not in served.log()[before:]


def test_bad_requests_are_refused_in_one_shape_and_change_nothing(api: httpx.Client) -> None:
    for body in (
        {"base": "/etc"},
        {"limits": {"memory": "much"}},
        {"env": {"1": "x"}},
        {"surprise": 1},
        {"cwd": "relative"},
        {"metadata": {"x": 1 << 70}},
    ):
        told(api.post("/sandboxes", json=body), 400, "BAD_ARGUMENT")
    assert api.get("/sandboxes").json()["sandboxes"] == []
    told(api.post("/sandboxes", json={"cwd": "/no/such"}), 404, "FILE_NOT_FOUND")
    told(api.post("/sandboxes", json={"metadata": {"x": "y" * (2 << 20)}}), 400, "BAD_ARGUMENT")
    told(api.post("/sandboxes", json={"network": "host"}), 403, "DENIED")
    told(api.post("/sandboxes", content=b"{nonsense"), 400, "BAD_ARGUMENT")
    told(api.get("/sandboxes/sb-000000000000"), 404, "SANDBOX_NOT_FOUND")
    told(api.get("/sandboxes/..%2f..%2fetc"), 404, "NOT_FOUND")
    told(api.get("/nowhere"), 404, "NOT_FOUND")
    told(api.put("/sandboxes"), 405, "METHOD_NOT_ALLOWED")
    told(api.post("/sandboxes", content=b"x" * (9 << 20)), 413, "TOO_LARGE")

    def endless() -> object:
        for _ in range(20):
            yield b" " * (1 << 20)

    told(api.post("/sandboxes", content=endless()), 413, "TOO_LARGE")  # type: ignore[arg-type]
    alive = [one for one in api.get("/sandboxes").json()["sandboxes"] if one["state"] != "ERROR"]
    assert alive == []


def test_health_metrics_and_docs_are_open_and_name_nobody(api: httpx.Client, served: Served) -> None:  # noqa: F811
    id = made(api)
    assert httpx.get(f"{served.url}/health", trust_env=False, timeout=PATIENCE).json()["status"] == "ok"
    figures = httpx.get(f"{served.url}/metrics", trust_env=False, timeout=PATIENCE).text
    assert 'sandkeep_sandboxes{state="RUNNING"}' in figures
    assert 'route="/sandboxes"' in figures
    assert id not in figures
    assert (
        "/sandboxes/{id}/fork"
        in httpx.get(f"{served.url}/openapi.json", trust_env=False, timeout=PATIENCE).json()["paths"]
    )


def test_every_changing_call_is_audited_without_its_content(api: httpx.Client, served: Served) -> None:  # noqa: F811
    from sandkeep.sessions import Database, Log

    id = made(api)
    ran(api, id, "echo very-private")
    told(api.post(f"/sandboxes/{id}/restore", json={"to": "sn_missing"}), 404, "SNAPSHOT_NOT_FOUND")
    database = Database(served.database)
    try:
        rows = Log(database).audited(sandbox=id)
    finally:
        database.close()
    assert [(row.action, row.outcome) for row in rows] == [
        ("POST /sandboxes/{id}/restore", "404"), ("POST /sandboxes/{id}/commands", "200"),
    ]  # fmt: skip
    assert "very-private" not in str(rows)


def test_a_key_that_asks_too_often_is_told_to_wait(tmp_path: Path) -> None:
    with serving(tmp_path / "home", "--rate", "0.1", "--burst", "5") as server:
        api, other = server.api(), server.api()
        answers = [api.get("/sandboxes") for _ in range(12)]
        refused = [one for one in answers if one.status_code == 429]
        assert refused
        told(refused[0], 429, "RATE_LIMITED")
        assert int(refused[0].headers["Retry-After"]) >= 1
        assert other.get("/sandboxes").status_code == 200


def test_small_answers_do_not_wait_for_an_acknowledgement(tmp_path: Path) -> None:
    """asyncio turns Nagle's algorithm off only on sockets that say their protocol, which accepted ones have of the listener."""
    with _bound(Settings(home=tmp_path, port=0)) as listener:
        assert listener.proto == socket.IPPROTO_TCP
