"""Ports: HTTP and WebSocket to a server inside a sandbox without a network; keys stay out, hops stay apart, sleepers wake."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import httpx
import pytest
from websockets.exceptions import InvalidStatus

from serving import Served, connect, made, ran, served, told  # noqa: F401
from waiting import PATIENCE, until

INSIDE = r"""
import base64, hashlib, json, struct
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self):
        if self.headers.get("Upgrade") == "websocket":
            return self.websocket()
        length = self.headers.get("Content-Length")
        if length is not None:
            body = self.rfile.read(int(length))
        elif self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = b""
        if self.path == "/large":
            told = bytes(range(256)) * 40_000
        else:
            told = json.dumps({"method": self.command, "path": self.path, "headers": list(self.headers.items()), "body": body.decode()}).encode()
        self.send_response(418 if self.path == "/teapot" else 200)
        self.send_header("Set-Cookie", "a=1")
        self.send_header("Set-Cookie", "b=2")
        self.send_header("Keep-Alive", "timeout=9")
        self.send_header("X-Hop", "secret of the hop")
        self.send_header("Connection", "keep-alive, X-Hop")
        self.send_header("Content-Length", str(len(told)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(told)

    def websocket(self):
        if self.path == "/refused":
            self.send_error(403)
            return
        accept = base64.b64encode(hashlib.sha1((self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()).digest())
        self.send_response(101)
        for name, value in (("Upgrade", "websocket"), ("Connection", "Upgrade"), ("Sec-WebSocket-Accept", accept.decode())):
            self.send_header(name, value)
        if self.headers.get("Sec-WebSocket-Protocol"):
            self.send_header("Sec-WebSocket-Protocol", self.headers["Sec-WebSocket-Protocol"].split(",")[0])
        self.end_headers()
        self.send(1, json.dumps({"path": self.path, "headers": list(self.headers.items())}).encode())
        while True:
            first, second = self.rfile.read(2)
            size = second & 127
            if size == 126:
                size = struct.unpack(">H", self.rfile.read(2))[0]
            mask, data = self.rfile.read(4), self.rfile.read(size)
            data = bytes(one ^ mask[at % 4] for at, one in enumerate(data))
            self.send(first & 15, data)
            if first & 15 == 8:
                self.close_connection = True
                return

    def send(self, kind, data):
        head = bytes([128 | kind]) + (bytes([len(data)]) if len(data) < 126 else b"\x7e" + struct.pack(">H", len(data)))
        self.wfile.write(head + data)
        self.wfile.flush()

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do_PATCH = do_OPTIONS = answer

    def log_message(self, *_):
        pass

ThreadingHTTPServer(("127.0.0.1", 8080), Handler).serve_forever()
"""


class Inside:
    def __init__(self, served: Served) -> None:  # noqa: F811
        self.served = served
        self.api = served.api()
        self.key = self.api.headers["Authorization"].split()[1]
        self.id = made(self.api)
        self.base = f"/sandboxes/{self.id}/ports/8080"
        self.api.put(
            f"/sandboxes/{self.id}/files", params={"path": "server.py"}, content=INSIDE.encode()
        ).raise_for_status()
        self.api.post(
            f"/sandboxes/{self.id}/commands", json={"command": "python3 server.py", "background": True}
        ).raise_for_status()
        self.ready()

    def ready(self) -> None:
        until(lambda: 8080 in self.api.get(f"/sandboxes/{self.id}/ports").json()["ports"], "the server inside listens")


@pytest.fixture(scope="module")
def inside(served: Served) -> Iterator[Inside]:  # noqa: F811
    found = Inside(served)
    yield found
    found.api.delete(f"/sandboxes/{found.id}")


def test_requests_arrive_as_they_were_sent(inside: Inside) -> None:
    for method in ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
        body = "" if method == "GET" else "body é"
        seen = inside.api.request(
            method, f"{inside.base}/a%2Fb//c/../d;x?q=1&q=%20&api_key=theirs", content=body.encode() or None
        ).json()
        assert (seen["method"], seen["body"]) == (method, body)
        assert seen["path"].startswith("/a%2Fb//")
        assert seen["path"].endswith("?q=1&q=%20&api_key=theirs")
    assert inside.api.get(inside.base).json()["path"] == "/"
    assert inside.api.head(f"{inside.base}/x").status_code == 200
    assert inside.api.get(f"{inside.base}/teapot").status_code == 418
    assert inside.api.get(f"{inside.base}/large").content == bytes(range(256)) * 40_000

    def pieces() -> Iterator[bytes]:
        yield from (b"one ", b"two ", b"three")

    assert inside.api.post(f"{inside.base}/chunked", content=pieces()).json()["body"] == "one two three"


def test_our_key_and_the_hops_headers_do_not_go_inside(inside: Inside) -> None:
    more = {
        "X-Own": "kept",
        "Connection": "close, X-Drop",
        "X-Drop": "x",
        "TE": "trailers",
        "Proxy-Authorization": "x",
        "Cookie": "c=1",
    }
    seen = inside.api.get(f"{inside.base}/", headers=more).json()
    headers = {name.lower(): value for name, value in seen["headers"]}
    assert inside.key not in json.dumps(seen)
    assert headers["x-own"] == "kept"
    assert headers["cookie"] == "c=1"
    assert headers["host"] == "localhost:8080"
    assert not {"authorization", "x-api-key", "x-drop", "te", "proxy-authorization", "upgrade"} & headers.keys()
    by_key = {"X-API-Key": inside.key, "Authorization": "Bearer of-the-app"}
    seen = httpx.get(inside.served.url + inside.base + "/", headers=by_key, trust_env=False, timeout=PATIENCE).json()
    assert dict(seen["headers"])["authorization"] == "Bearer of-the-app"
    assert inside.key not in json.dumps(seen)


def test_answers_come_back_without_the_inner_hop(inside: Inside) -> None:
    answer = inside.api.get(f"{inside.base}/")
    assert answer.headers.get_list("set-cookie") == ["a=1", "b=2"]
    assert "x-hop" not in answer.headers
    assert "keep-alive" not in answer.headers


def test_a_port_by_host_name(inside: Inside) -> None:
    seen = inside.api.get("/path?x=1", headers={"Host": f"8080-{inside.id}.sandboxes.example:99"}).json()
    assert seen["path"] == "/path?x=1"
    told(inside.api.get("/", headers={"Host": "8080-sb-000000000000.example"}), 404, "SANDBOX_NOT_FOUND")
    assert inside.api.get("/sandboxes", headers={"Host": "8080-nonsense.example"}).status_code == 200


def test_smuggled_requests_reach_nobody(inside: Inside) -> None:
    """Two lengths, a length and chunks, a header with a line break: each is one refused request, and no second one is heard."""
    host, port = inside.served.url.removeprefix("http://").split(":")
    smuggled = f"GET {inside.base}/smuggled HTTP/1.1\r\nHost: x\r\nX-API-Key: {inside.key}\r\n\r\n"
    for framing in (
        "Content-Length: 5\r\nContent-Length: 0",
        f"Content-Length: {len(smuggled)}\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked, identity",
        "Transfer-Encoding : chunked",
        "X-Bad: a\r\n\tContent-Length: 3",
    ):
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as raw:
            head = f"POST {inside.base}/outer HTTP/1.1\r\nHost: x\r\nX-API-Key: {inside.key}\r\nConnection: close\r\n{framing}\r\n\r\n"
            raw.sendall(head.encode() + b"0\r\n\r\n" + smuggled.encode())
            answer = b""
            while piece := raw.recv(65536):
                answer += piece
        assert answer.count(b"HTTP/1.1 ") == 1, framing
        assert b'"/smuggled"' not in answer, framing


def test_websockets_pass_through_both_ways(inside: Inside) -> None:
    url = inside.served.url.replace("http", "ws") + inside.base
    with connect(f"{url}/chat?x=1&api_key={inside.key}", subprotocols=["soup", "salad"], compression=None) as found:  # type: ignore[list-item]
        assert found.subprotocol == "soup"
        seen = json.loads(found.recv(PATIENCE))
        assert seen["path"] == "/chat?x=1"
        assert inside.key not in json.dumps(seen)
        for message in ("text é", b"\x00binary", "x" * 10_000):
            found.send(message)
            assert found.recv(PATIENCE) == message
    with pytest.raises(InvalidStatus) as refused:
        connect(f"{url}/refused?api_key={inside.key}")
    assert refused.value.response.status_code == 403


def test_what_does_not_listen_or_is_no_port_is_said(inside: Inside) -> None:
    told(inside.api.get(f"/sandboxes/{inside.id}/ports/9/"), 502, "CONNECT_FAILED")
    for port in ("0", "65536", "x", "-1", "99999999999999999999"):
        told(inside.api.get(f"/sandboxes/{inside.id}/ports/{port}/"), 400, "BAD_ARGUMENT")
    with pytest.raises(InvalidStatus) as refused:
        connect(f"{inside.served.url.replace('http', 'ws')}/sandboxes/{inside.id}/ports/9/?api_key={inside.key}")
    assert refused.value.response.status_code == 502


def test_a_request_wakes_a_sleeper_whose_server_comes_back(inside: Inside) -> None:
    ran(inside.api, inside.id, "echo kept > kept")
    assert inside.api.post(f"/sandboxes/{inside.id}/pause").json()["state"] == "PAUSED"
    seen = until(
        lambda: (a := inside.api.get(f"{inside.base}/again")).status_code == 200 and a.json(), "it answers again"
    )
    assert seen["path"] == "/again"
    assert ran(inside.api, inside.id, "cat kept")["stdout"] == "kept\n"
