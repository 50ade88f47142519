"""A way out by rules, from real sandboxes to servers on this machine's loopback: programs, rules, sleep, forks, restarts, E2B."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

import e2b_kit
from sandkeep.sessions import Database, Log
from serving import Served, fixed_port, made, ran, serving, told, until

PRIVATE = "127.0.0.0/8"
ALL = "0.0.0.0/0"
FETCH = "import sys, urllib.request as r; sys.stdout.buffer.write(r.urlopen(sys.argv[1], timeout=60).read())"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/drip":
            self.drip()
        else:
            self.answer(b"x" * 3_000_000 if self.path == "/large" else f"got {self.path}".encode())

    def do_POST(self) -> None:
        if length := self.headers.get("Content-Length"):
            self.answer(self.rfile.read(int(length)))
            return
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        self.answer(body)

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def drip(self) -> None:
        """Bytes without end, until told or left."""
        stop: threading.Event = self.server.stop  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):
            while not stop.wait(0.1):
                self.wfile.write(b"drip\n")
        self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass


class Far(ThreadingHTTPServer):
    """A server that sandboxes want to reach."""

    daemon_threads = True

    def __init__(self, host: str) -> None:
        super().__init__((host, 0), Handler)
        self.stop = threading.Event()
        self.port = int(self.server_address[1])
        self.url = f"http://{host}:{self.port}"


@contextlib.contextmanager
def listening(host: str) -> Iterator[Far]:
    far = Far(host)
    thread = threading.Thread(target=far.serve_forever, daemon=True)
    thread.start()
    try:
        yield far
    finally:
        far.stop.set()
        far.shutdown()
        far.server_close()
        thread.join()


@pytest.fixture(scope="module")
def far() -> Iterator[Far]:
    with listening("127.0.0.2") as found:
        yield found


@pytest.fixture(scope="module", params=["runc", "runsc"])
def way(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    options = ("--runtime", request.param, "--egress-private", PRIVATE, "--sweep-interval", "0.5")
    with serving(tmp_path_factory.mktemp("egress") / "home", *options, port=fixed_port()) as found:
        yield found


@pytest.fixture(scope="module")
def api(way: Served) -> httpx.Client:
    return way.api()


def curl(api: httpx.Client, id: str, words: str) -> str:
    return str(ran(api, id, f"curl -sS --max-time 60 {words} 2>&1")["stdout"])


def reaches(api: httpx.Client, id: str, url: str) -> bool:
    said = curl(api, id, url)
    assert said.startswith("got /") or "EGRESS_DENIED" in said or "connect" in said, said
    return said.startswith("got /")


def rule(api: httpx.Client, id: str, **rules: Any) -> None:
    answer = api.put(f"/sandboxes/{id}/egress", json=rules)
    assert answer.status_code == 200, answer.text
    assert answer.json()["egress"] == {"allow": [], "deny": [], **rules}


def in_background(api: httpx.Client, id: str, command: str) -> int:
    answer = api.post(f"/sandboxes/{id}/commands", json={"command": command, "background": True})
    assert answer.status_code == 201, answer.text
    return int(answer.json()["pid"])


def size(api: httpx.Client, id: str, path: str) -> int:
    return int(ran(api, id, f"stat -c %s {path} 2>/dev/null || echo 0")["stdout"])


def test_programs_reach_what_is_outside(api: httpx.Client, far: Far) -> None:
    id = made(api, egress={})
    assert api.get(f"/sandboxes/{id}").json()["egress"] == {"allow": [], "deny": []}
    assert curl(api, id, f"'{far.url}/a?b=c'") == "got /a?b=c"
    assert curl(api, id, f"-p {far.url}/tunnel") == "got /tunnel"
    assert ran(api, id, f"python3 -c '{FETCH}' {far.url}/urllib")["stdout"] == "got /urllib"
    for more in ("", "-p"):
        assert ran(api, id, f"curl -sS {more} {far.url}/large | wc -c")["stdout"].strip() == "3000000"
    upload = "head -c 2000000 /dev/zero | curl -sS --data-binary @-"
    for more in ("", "-p", "-H 'Transfer-Encoding: chunked'"):
        assert ran(api, id, f"{upload} {more} {far.url}/ | wc -c")["stdout"].strip() == "2000000"
    many = f"for i in $(seq 20); do curl -sS -p {far.url}/$i >> all & done; wait; grep -o got all | wc -l"
    assert ran(api, id, many)["stdout"].strip() == "20"
    assert api.get(f"/sandboxes/{id}/ports").json()["ports"] == []
    server = "python3 -m http.server 8000 --bind 127.0.0.1 >/dev/null 2>&1"
    in_background(api, id, server)
    until(lambda: "Directory" in curl(api, id, "http://localhost:8000/"), "what is inside is reached without the proxy")
    api.delete(f"/sandboxes/{id}")


def test_rules_hold_and_are_told(way: Served, api: httpx.Client, far: Far) -> None:
    id = made(api, egress={"allow": ["127.0.0.2"]})
    with listening("127.0.0.1") as near, listening("127.0.0.3") as other:
        local = f"--noproxy '' http://localhost:{near.port}/"
        assert [reaches(api, id, url) for url in (f"{far.url}/", f"{other.url}/", local)] == [True, False, False]
        rule(api, id, allow=["localhost"], deny=[ALL])
        assert [reaches(api, id, url) for url in (f"{far.url}/", f"{other.url}/", local)] == [False, False, True]
        rule(api, id, deny=["127.0.0.3/32", "*.localhost"])
        assert [reaches(api, id, url) for url in (f"{far.url}/", f"{other.url}/", local)] == [True, False, True]
    refused = curl(api, id, "-i 'http://169.254.169.254/latest/meta-data?token=secret'")
    assert refused.startswith("HTTP/1.1 403 EGRESS_DENIED")
    assert json.loads(refused.splitlines()[-1])["code"] == "EGRESS_DENIED"
    assert "403" in curl(api, id, "https://169.254.169.254/")
    assert "403" in curl(api, id, "-p http://2852039166/")  # the same address, written as a number
    assert curl(api, id, "-i http://nowhere.invalid/").startswith("HTTP/1.1 502 CONNECT_FAILED")
    figures = api.get("/metrics").text
    assert 'sandkeep_egress_total{verdict="EGRESS_DENIED"}' in figures
    assert 'sandkeep_egress_total{verdict="allowed"}' in figures
    database = Database(way.database)
    try:
        rows = [one for one in Log(database).audited(sandbox=id) if one.action == "egress"]
    finally:
        database.close()
    seen = {(one.outcome, one.detail["host"], one.detail["port"]) for one in rows}
    assert {("allowed", "127.0.0.2", far.port), ("EGRESS_DENIED", "169.254.169.254", 80)} <= seen
    assert "secret" not in str(rows)
    assert len(rows) == len(seen)
    api.delete(f"/sandboxes/{id}")


def test_without_a_way_out_there_is_none(api: httpx.Client, far: Far) -> None:
    id = made(api)
    assert api.get(f"/sandboxes/{id}").json()["egress"] is None
    assert ran(api, id, "env | grep -ci proxy")["stdout"] == "0\n"
    assert not reaches(api, id, f"-x http://127.0.0.1:3128 {far.url}/")
    rule(api, id)
    assert reaches(api, id, f"{far.url}/")
    checkpoint = api.post(f"/sandboxes/{id}/checkpoints").json()["id"]
    assert api.delete(f"/sandboxes/{id}/egress").json()["egress"] is None
    assert ran(api, id, "env | grep -ci proxy")["stdout"] == "0\n"
    assert not reaches(api, id, f"-x http://127.0.0.1:3128 {far.url}/")
    for egress, proxied in ((None, "0\n"), ({}, "7\n")):
        other = made(api, from_checkpoint=checkpoint, egress=egress)
        assert ran(api, other, "env | grep -ci proxy")["stdout"] == proxied
        assert reaches(api, other, f"{far.url}/") is (egress is not None)
        api.delete(f"/sandboxes/{other}")
    api.delete(f"/sandboxes/{id}")


def test_what_is_open_is_cut_when_the_rules_refuse_it_and_bytes_are_activity(api: httpx.Client, far: Far) -> None:
    id = made(api, egress={})

    def last_activity() -> float:
        return float(api.get(f"/sandboxes/{id}").json()["last_activity"])

    pid = in_background(api, id, f"curl -sSN -p -o dripped {far.url}/drip")
    until(lambda: size(api, id, "dripped"), "bytes flow")
    before = last_activity()
    until(lambda: last_activity() > before, "that is activity")
    rule(api, id, deny=["127.0.0.2"])
    ended = api.get(f"/sandboxes/{id}/commands/{pid}/wait").json()
    assert ended["exit_code"] != 0
    api.delete(f"/sandboxes/{id}")


def test_the_way_out_is_there_after_sleep_fork_restore_and_restart(way: Served, api: httpx.Client, far: Far) -> None:
    runsc = "runsc" in way.options
    id = made(api, egress={"deny": ["127.0.0.3"]})
    snapshot = api.post(f"/sandboxes/{id}/snapshot").json()["id"]
    in_background(api, id, f"curl -sSN -p -o dripped {far.url}/drip")
    until(lambda: size(api, id, "dripped"), "bytes flow")
    loop = f"while sleep 0.2; do curl -sS {far.url}/again >> seen; echo >> seen; done 2>/dev/null"
    in_background(api, id, loop)
    until(lambda: size(api, id, "seen"), "a process inside goes out")
    assert api.post(f"/sandboxes/{id}/pause").json()["state"] == "PAUSED"
    assert reaches(api, id, f"{far.url}/")
    report = api.get(f"/sandboxes/{id}").json()["restore_report"]
    assert report["level"] == ("memory" if runsc else "relaunched")
    ran(api, id, "> seen")
    until(lambda: size(api, id, "seen"), "it goes out after it woke")

    forked = api.post(f"/sandboxes/{id}/fork", json={"memory": runsc}).json()["sandboxes"][0]["id"]
    assert api.get(f"/sandboxes/{forked}").json()["egress"] == {"allow": [], "deny": ["127.0.0.3"]}
    assert reaches(api, forked, f"{far.url}/")
    assert reaches(api, id, f"--retry 9 --retry-connrefused --retry-delay 1 {far.url}/")
    assert api.post(f"/sandboxes/{id}/restore", json={"to": snapshot}).status_code == 200
    assert reaches(api, id, f"{far.url}/")

    way.kill()
    way.start()
    until(lambda: reaches(api, id, f"{far.url}/"), "it goes out through the next server")
    for one in (id, forked):
        api.delete(f"/sandboxes/{one}")


def test_what_can_not_be_is_refused(api: httpx.Client) -> None:
    for rules in ({"allow": ["http://x/"]}, {"deny": ["1.2.3.4/99"]}, {"allow": "x"}, {"other": []}):
        told(api.post("/sandboxes", json={"egress": rules}), 400, "BAD_ARGUMENT")
    told(api.put("/sandboxes/sb-000000000000/egress", json={}), 404, "SANDBOX_NOT_FOUND")


def test_a_server_without_egress(tmp_path_factory: pytest.TempPathFactory) -> None:
    with serving(tmp_path_factory.mktemp("without") / "home", "--runtime", "runc", "--no-egress") as server:
        api = server.api()
        told(api.post("/sandboxes", json={"egress": {}}), 403, "DENIED")
        id = made(api)
        told(api.put(f"/sandboxes/{id}/egress", json={}), 403, "DENIED")
        assert ran(api, id, "env | grep -ci proxy")["stdout"] == "0\n"


def test_e2b(way: Served, far: Far) -> None:
    e2b_kit.run(way, "new" if "runsc" in way.options else "old", "network.py", far.url)
