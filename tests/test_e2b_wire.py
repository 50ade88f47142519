"""E2B's wire by hand: what its SDKs never say, and what must hold whoever speaks."""

from __future__ import annotations

import base64
import gzip
import socket
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from e2b_kit import SDK, Client, frame, frames, gone, start, stream
from serving import Served, told
from waiting import PATIENCE, until

pytest_plugins = ["serving"]


@pytest.fixture(scope="module")
def client(served: Served) -> Client:
    return Client(served)


@pytest.fixture(scope="module")
def made(client: Client) -> dict[str, Any]:
    """A sandbox for all who change nothing of its life."""
    return client.create(timeout=900, envVars={"A": "1"})


# two APIs at one address


def test_an_e2b_sandbox_is_an_ordinary_one(client: Client, made: dict[str, Any]) -> None:
    shown = client.rest.get(f"/sandboxes/{made['sandboxID']}").json()
    assert (shown["id"], shown["state"]) == (made["sandboxID"], "RUNNING")
    assert client.rest.get("/health").json()["status"] == "ok"
    listed = client.control.get("/v2/sandboxes").json()
    assert made["sandboxID"] in [one["sandboxID"] for one in listed]
    by_prefix = client.rest.get(f"/e2b/sandboxes/{made['sandboxID']}").json()
    assert by_prefix["sandboxID"] == made["sandboxID"]


def test_errors_have_the_status_in_their_body(client: Client, served: Served) -> None:
    missing = client.control.get("/sandboxes/sb-000000000000")
    assert (missing.status_code, missing.json()["code"]) == (404, 404)
    no_key = httpx.get(f"{served.url}/sandboxes/sb-000000000000", headers=SDK, trust_env=False, timeout=PATIENCE)
    assert (no_key.status_code, no_key.json()["code"]) == (401, 401)
    wrong = client.control.post("/sandboxes", json={"templateID": "base", "timeout": -1})
    assert (wrong.status_code, wrong.json()["code"]) == (400, 400)
    no_template = client.control.post("/sandboxes", json={"templateID": "nothing"})
    assert (no_template.status_code, no_template.json()["code"]) == (404, 404)
    nowhere = client.control.get("/v9/nothing")
    assert (nowhere.status_code, nowhere.json()["code"]) == (404, 404)


def test_other_keys_see_nothing(client: Client, made: dict[str, Any], served: Served) -> None:
    other = Client(served)
    id = made["sandboxID"]
    assert other.control.get("/v2/sandboxes").json() == []
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/pause"), ("POST", "/connect"), ("POST", "/fork")):
        assert other.control.request(method, f"/sandboxes/{id}{path}").status_code == 404
    assert client.info(made)["state"] == "running"


def test_pages(served: Served) -> None:
    client = Client(served)
    mark = uuid.uuid4().hex
    ids = [client.create(timeout=900, metadata={"mark": mark})["sandboxID"] for _ in range(3)]
    seen: list[str] = []
    for order, wanted in (("desc", ids[::-1]), ("asc", ids)):
        seen, query = [], {"limit": "2", "order": order, "metadata": f"mark={mark}"}
        while True:
            page = client.control.get("/v2/sandboxes", params=query)
            seen += [one["sandboxID"] for one in page.json()]
            if (token := page.headers.get("x-next-token")) is None:
                break
            query["nextToken"] = token
        assert seen == wanted
    assert client.control.get("/v2/sandboxes", params={"state": "paused"}).json() == []
    since = client.control.get(f"/sandboxes/{ids[1]}").json()["startedAt"]
    for query, count in (({"startedAfter": since}, 2), ({"template": "team/base:default"}, 3), ({"template": "x"}, 0)):
        assert len(client.control.get("/v2/sandboxes", params=query).json()) == count
    assert client.control.get("/v2/sandboxes", params={"nextToken": "junk"}).status_code == 400
    for id in ids:
        assert client.control.delete(f"/sandboxes/{id}").status_code == 204


def test_a_create_that_is_sent_again_makes_one_sandbox(client: Client) -> None:
    key = {"Idempotency-Key": uuid.uuid4().hex}

    def create() -> str:
        answer = client.control.post("/v2/sandboxes", json={"templateID": "base", "timeout": 900}, headers=key)
        return str(answer.json()["sandboxID"])

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: create(), range(2))
    assert first == second == create()
    assert client.control.delete(f"/sandboxes/{first}").status_code == 204
    again = create()
    assert again != first
    assert client.control.delete(f"/sandboxes/{again}").status_code == 204


def test_templates_by_name(client: Client) -> None:
    assert client.control.get("/templates/aliases/base").json()["templateID"] == "base"
    assert client.control.get("/templates/aliases/team%2Fbase%3Adefault").json()["templateID"] == "base"
    assert client.control.get("/templates/aliases/nothing").status_code == 404
    for path in ("/v3/templates", "/volumes", "/secrets"):
        assert client.control.post(path, json={"name": "x"}).status_code == 501


# who is let in


def test_tokens(client: Client, made: dict[str, Any]) -> None:
    assert client.box(made).get("/health").status_code == 204
    wrong = client.box(made, **{"X-Access-Token": "x" * 48})
    assert wrong.post("/process.Process/List", json={}).status_code == 401
    assert wrong.get("/files", params={"path": "/etc/passwd"}).status_code == 401
    unknown = client.box({**made, "sandboxID": "sb-000000000000"})
    gone(unknown.get("/health"), "sb-000000000000")
    gone(unknown.post("/process.Process/List", json={}), "sb-000000000000")
    gone(client.box({**made, "sandboxID": "../../etc"}).get("/health"), "../../etc")


def test_a_sandbox_of_rest_has_no_e2b_door(client: Client, made: dict[str, Any]) -> None:
    id = client.rest.post("/sandboxes", json={}).json()["id"]
    gone(client.box({**made, "sandboxID": id}).post("/process.Process/List", json={}), id)
    assert client.control.get(f"/sandboxes/{id}").status_code == 404
    assert client.rest.delete(f"/sandboxes/{id}").status_code == 204


def test_private_ports(client: Client) -> None:
    made = client.create(timeout=900, network={"allowPublicTraffic": False})
    box = client.box(made, 8000)
    assert box.get("/").status_code == 403
    open_ = box.get("/", headers={"E2B-Traffic-Access-Token": made["trafficAccessToken"]})
    assert open_.status_code == 502
    assert open_.json()["message"] == "The sandbox is running but port is not open"
    assert client.control.delete(f"/sandboxes/{made['sandboxID']}").status_code == 204


def test_headers_of_programs_reach_the_server_inside(client: Client, made: dict[str, Any]) -> None:
    code = (
        "import http.server as h\n"
        "class S(h.BaseHTTPRequestHandler):\n"
        "    def do_POST(self):\n"
        "        body = self.rfile.read(int(self.headers['content-length']))\n"
        "        self.send_response(201); self.end_headers()\n"
        "        self.wfile.write((self.path + str(sorted(self.headers.keys())) + self.headers['authorization']).encode() + body)\n"
        "    def log_message(self, *_): pass\n"
        "h.HTTPServer(('127.0.0.1', 8123), S).serve_forever()\n"
    )
    box = client.box(made)
    box.post("/files", params={"path": "/tmp/s.py"}, content=code.encode())
    stream(box, "/process.Process/Start", start("setsid python3 /tmp/s.py >/dev/null 2>&1 &"))
    inside = client.box(made, 8123, Authorization="Bearer theirs")

    def ask() -> httpx.Response | None:
        answer = inside.post("/a%20b?c=d", content=b"body")
        return answer if answer.status_code != 502 else None

    answer = until(ask, "the server inside answers")
    assert answer.status_code == 201
    assert answer.text.startswith("/a%20b?c=d")
    assert answer.text.endswith("Bearer theirsbody")
    assert "e2b" not in answer.text.lower()
    assert "access-token" not in answer.text.lower()


def test_only_who_may_come_in_wakes_it(client: Client) -> None:
    made = client.create(timeout=900, autoPause=True, autoResume={"enabled": True})
    id = made["sandboxID"]
    assert client.control.post(f"/sandboxes/{id}/pause").status_code == 204
    stranger = client.box(made, **{"X-Access-Token": "x"})
    assert stranger.post("/process.Process/List", json={}).status_code == 401
    assert client.info(made)["state"] == "paused"
    assert client.box(made).post("/process.Process/List", json={}).json() == {"processes": []}
    assert client.info(made)["state"] == "running"
    assert client.control.delete(f"/sandboxes/{id}").status_code == 204
    without = client.control.post("/v2/sandboxes", json={"templateID": "base", "autoResume": {"enabled": True}})
    assert without.status_code == 400


# streams


def test_process_events(client: Client, made: dict[str, Any]) -> None:
    said = stream(client.box(made), "/process.Process/Start", start("echo $A; echo err >&2; exit 4", stdin=False))
    assert "pid" in said[0][1]["event"]["start"]
    data = [message["event"]["data"] for _, message in said if "data" in message.get("event", {})]
    assert base64.b64decode(next(one["stdout"] for one in data if "stdout" in one)) == b"1\n"
    assert said[-2][1]["event"]["end"] == {
        "exitCode": 4,
        "exited": True,
        "status": "exit status 4",
        "error": "exit status 4",
    }
    assert said[-1] == (2, {})


def test_the_end_frame_tells_errors(client: Client, made: dict[str, Any]) -> None:
    box = client.box(made)
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("/process.Process/Start", {}, "invalid_argument"),
        ("/process.Process/Start", {"process": {"cmd": "/bin/bash", "cwd": "/no/such"}}, "invalid_argument"),
        ("/process.Process/Start", {"process": {"cmd": 7}}, "invalid_argument"),
        ("/process.Process/Start", {"process": {"cmd": "/bin/true", "args": "x"}}, "invalid_argument"),
        ("/process.Process/Start", {"process": {"cmd": "/bin/true", "envs": {"A=": "x"}}}, "invalid_argument"),
        ("/process.Process/Connect", {"process": {"pid": 999999}}, "not_found"),
        ("/process.Process/Connect", {"process": {"tag": "none"}}, "not_found"),
        ("/filesystem.Filesystem/WatchDir", {"path": "/no/such"}, "not_found"),
        ("/filesystem.Filesystem/WatchDir", {"path": "/etc/passwd"}, "invalid_argument"),
    ]
    for path, message, code in cases:
        ((flag, end),) = stream(box, path, message)
        assert (flag, end["error"]["code"]) == (2, code), (path, message, end)
    for process, said in (
        ({"cmd": "/no/such", "cwd": "/"}, "/no/such: No such file"),
        ({"cmd": "true", "cwd": "/no"}, "cwd '/no' does"),
    ):
        ((_, end),) = stream(box, "/process.Process/Start", {"process": process})
        assert end["error"]["message"].startswith(said), end
    late = stream(box, "/process.Process/Start", start("sleep 300"), **{"Connect-Timeout-Ms": "300"})
    assert late[-1][1]["error"]["code"] == "deadline_exceeded"


def test_nonsense_is_refused(client: Client, made: dict[str, Any]) -> None:
    box = client.box(made)
    kind = {"Content-Type": "application/connect+json"}
    for body in (b"", b"\x01\0\0\0\2{}", b"\0\xff\xff\xff\xff", frame({}) * 2, b"\0\0\0\0\1x"):
        answer = box.post("/process.Process/Start", content=body, headers=kind)
        assert frames(answer.content)[-1][1]["error"]["code"] == "invalid_argument", body
    unary: list[tuple[str, Any, int]] = [
        ("/process.Process/SendSignal", {"process": {"pid": 1}, "signal": "NO"}, 400),
        ("/process.Process/SendInput", {"process": {"pid": 999999}, "input": {"stdin": "QQ=="}}, 404),
        ("/process.Process/SendInput", {"process": {"pid": 999999}, "input": {"stdin": "???"}}, 400),
        ("/process.Process/SendInput", {"process": 3}, 400),
        ("/process.Process/SendInput", {"process": {"pid": "x"}, "input": {"stdin": "QQ=="}}, 400),
        ("/process.Process/SendSignal", {"process": {"pid": 1}, "signal": []}, 400),
        ("/process.Process/Update", {"process": {"pid": 1}, "pty": {"size": 4}}, 400),
        ("/process.Process/Nothing", {}, 501),
        ("/filesystem.Filesystem/Stat", {"path": "/no/such"}, 404),
        ("/filesystem.Filesystem/Stat", {"path": 5}, 400),
        ("/filesystem.Filesystem/ListDir", {"path": "/etc/passwd"}, 400),
        ("/filesystem.Filesystem/MakeDir", {"path": "/etc"}, 409),
        ("/filesystem.Filesystem/GetWatcherEvents", {"watcherId": "none"}, 404),
        ("/process.Process/List", [], 400),
    ]
    for path, message, status in unary:
        assert box.post(path, json=message).status_code == status, (path, message)


def test_figures(client: Client, made: dict[str, Any]) -> None:
    box = client.box(made)
    before = box.get("/metrics").json()
    stream(box, "/process.Process/Start", start("timeout 1 sh -c 'while :; do :; done'"))
    after = box.get("/metrics").json()
    assert before["cpu_used_pct"] >= 0
    assert 0 < after["cpu_used_pct"] <= 100
    assert 0 < after["mem_used"] < after["mem_total"]
    assert 0 < after["disk_used"] < after["disk_total"]
    assert client.box(made, **{"X-Access-Token": "x"}).get("/metrics").status_code == 401
    kept = client.control.get(f"/sandboxes/{made['sandboxID']}/metrics", params={"end": after["ts"]}).json()
    assert len(kept) >= 2


def test_keep_alive(client: Client, made: dict[str, Any]) -> None:
    said = stream(client.box(made), "/process.Process/Start", start("sleep 2.5"), **{"Keepalive-Ping-Interval": "1"})
    assert {"event": {"keepalive": {}}} in [message for _, message in said]


def test_stream_input(client: Client, made: dict[str, Any]) -> None:
    box = client.box(made)
    kind = {"Content-Type": "application/connect+json"}
    tag = uuid.uuid4().hex
    with box.stream("POST", "/process.Process/Start", content=frame(start("cat", tag=tag)), headers=kind) as output:
        pieces = output.iter_raw()
        heard = next(pieces)
        whom = {"process": {"tag": tag}}
        parts = [{"data": {"input": {"stdin": base64.b64encode(word).decode()}}} for word in (b"one ", b"two")]
        sent = stream(box, "/process.Process/StreamInput", {"start": whom}, *parts, {"keepalive": {}})
        assert sent == [(0, {}), (2, {})]
        assert box.post("/process.Process/CloseStdin", json=whom).status_code == 200
        heard += b"".join(pieces)
    words = [base64.b64decode(m["event"]["data"]["stdout"]) for _, m in frames(heard) if "data" in m.get("event", {})]
    assert b"".join(words) == b"one two"


@pytest.mark.parametrize("verb", ["kill", "pause"])
def test_a_stream_is_reset_when_its_sandbox_goes(client: Client, verb: str) -> None:
    """Not ended: that would be a command that came to its end."""
    made = client.create(timeout=900)
    id, where = made["sandboxID"], urlsplit(client.served.url)
    body = frame(start("echo ready; sleep 300"))
    head = (
        "POST /process.Process/Start HTTP/1.1\r\nHost: x\r\nContent-Type: application/connect+json\r\n"
        f"E2b-Sandbox-Id: {id}\r\nE2b-Sandbox-Port: 49983\r\nX-Access-Token: {made['envdAccessToken']}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((where.hostname or "", where.port or 0), timeout=120) as wire:
        wire.sendall(head.encode() + body)
        heard = b""
        while base64.b64encode(b"ready\n") not in heard:
            heard += wire.recv(65536)
        path = f"/sandboxes/{id}" + ("/pause" if verb == "pause" else "")
        assert client.control.request("DELETE" if verb == "kill" else "POST", path).status_code == 204
        with pytest.raises(ConnectionResetError):
            while True:
                assert wire.recv(65536), "the stream was ended, not reset"
    gone(client.box(made).get("/health"), id)
    client.control.delete(f"/sandboxes/{id}")


# files


def test_compressed_both_ways(client: Client, made: dict[str, Any]) -> None:
    box, data = client.box(made), b"text " * 100_000
    headers = {"Content-Type": "application/octet-stream", "Content-Encoding": "gzip"}
    sent = box.post("/files", params={"path": "z"}, content=gzip.compress(data), headers=headers)
    assert sent.json() == [{"name": "z", "path": "/home/user/z", "type": "file"}]
    zipped = box.get("/files", params={"path": "z"}, headers={"Accept-Encoding": "gzip"})
    assert zipped.headers["content-encoding"] == "gzip"
    assert zipped.content == data
    assert box.get("/files", params={"path": "z"}, headers={"Accept-Encoding": "identity"}).content == data
    for bad in (b"not gzip", gzip.compress(data)[:-20]):
        assert box.post("/files", params={"path": "bad"}, content=bad, headers=headers).status_code == 400
    assert box.get("/files", params={"path": "bad"}).status_code == 404


def test_larger_than_other_requests_may_be(client: Client, made: dict[str, Any]) -> None:
    box, size = client.box(made), 20 << 20
    assert box.post("/files", params={"path": "large"}, content=b"x" * size).status_code == 200
    assert len(box.get("/files", params={"path": "large"}).content) == size


# time to live


def test_its_time_over_it_is_killed(client: Client) -> None:
    made = client.create(timeout=1)
    until(lambda: client.control.get(f"/sandboxes/{made['sandboxID']}").status_code == 404, "its time is over")
    gone(client.box(made).get("/health"), made["sandboxID"])


def test_policy_is_kept_whoever_pauses_and_wakes(client: Client) -> None:
    made = client.create(timeout=600, autoPause=True)
    id = made["sandboxID"]
    assert client.rest.post(f"/sandboxes/{id}/pause").status_code == 200
    assert client.control.post(f"/sandboxes/{id}/pause").status_code == 409
    assert client.control.post(f"/sandboxes/{id}/timeout", json={"timeout": 5}).status_code == 404
    assert client.control.post(f"/sandboxes/{id}/snapshots", json={}).status_code == 409
    assert client.rest.post(f"/sandboxes/{id}/resume").status_code == 200
    shown = client.info(made)
    assert (shown["state"], shown["lifecycle"]) == ("running", {"autoResume": False, "onTimeout": "pause"})
    assert client.control.post(f"/sandboxes/{id}/connect", json={"timeout": 1}).status_code == 200
    assert client.control.post(f"/sandboxes/{id}/timeout", json={"timeout": 0}).status_code == 204
    until(lambda: client.info(made)["state"] == "paused", "it sleeps at its deadline")
    gone(client.box(made).get("/health"), id)
    woken = client.control.post(f"/v2/sandboxes/{id}/connect", json={})
    assert (woken.status_code, woken.json()["envdAccessToken"]) == (201, made["envdAccessToken"])
    assert client.info(made)["lifecycle"]["onTimeout"] == "pause"
    assert client.control.delete(f"/sandboxes/{id}").status_code == 204


def test_forks_and_named_snapshots(client: Client) -> None:
    made = client.create(timeout=900, metadata={"of": "fork"})
    id = made["sandboxID"]
    client.box(made).post("/files", params={"path": "f"}, content=b"shared")
    forks = client.control.post(f"/sandboxes/{id}/fork", json={"count": 2, "timeout": 600}).json()
    twins = [one["sandbox"] for one in forks]
    tokens = {one["envdAccessToken"] for one in (made, *twins)}
    assert len(tokens) == 3
    for twin in twins:
        assert client.box(twin).get("/files", params={"path": "f"}).content == b"shared"
    name = f"named-{uuid.uuid4().hex[:8]}"
    first = client.control.post(f"/sandboxes/{id}/snapshots", json={"name": name}).json()
    assert first == {"snapshotID": f"{name}:default", "names": [name]}
    client.box(made).post("/files", params={"path": "f"}, content=b"newer")
    assert client.control.post(f"/sandboxes/{id}/snapshots", json={"name": name}).status_code == 201
    fresh = client.create(templateID=name, timeout=900)
    assert client.box(fresh).get("/files", params={"path": "f"}).content == b"newer"
    page = client.control.get("/snapshots", params={"sandboxID": id, "limit": 1})
    assert len(page.json()) == 1
    assert page.headers["x-next-token"]
    rest = client.control.get("/snapshots", params={"sandboxID": id, "nextToken": page.headers["x-next-token"]})
    assert len(rest.json()) == 1
    for one in (made, fresh, *twins):
        assert client.control.delete(f"/sandboxes/{one['sandboxID']}").status_code == 204


def test_what_changes_something_is_audited(client: Client, made: dict[str, Any], served: Served) -> None:
    from sandkeep.sessions import Database, Log

    client.box(made).post("/filesystem.Filesystem/MakeDir", json={"path": "audited"})
    database = Database(served.database)
    try:
        rows = Log(database).audited(sandbox=made["sandboxID"])
    finally:
        database.close()
    assert any("envd" in one.action for one in rows)
    assert made["envdAccessToken"] not in str(rows)


def test_rest_errors_are_untouched(client: Client) -> None:
    told(client.rest.get("/sandboxes/sb-000000000000"), 404, "SANDBOX_NOT_FOUND")
