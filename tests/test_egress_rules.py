"""Egress without sandboxes: what the rules say, which addresses are outside, and a proxy that connects to what was checked."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from typing import Any

import pytest

from sandkeep.errors import BadArgument, EgressDenied
from sandkeep.server.egress.proxy import Conversation, look_up
from sandkeep.server.egress.rules import Address, Outside, Rules, decide

ALL = "0.0.0.0/0"
PUBLIC = "93.184.215.14"


def allowed(rules: dict[str, Any], host: str, *addresses: str, private: tuple[str, ...] = ()) -> list[str]:
    found = map(ip_address, addresses or (host,))
    try:
        return [str(one) for one in decide(Rules.of(rules), Outside.of(private), host, found)]
    except EgressDenied:
        return []


@pytest.mark.parametrize(
    ("rules", "host", "address", "verdict"),
    [
        ({}, "example.com", PUBLIC, True),
        ({}, PUBLIC, PUBLIC, True),
        ({"deny": [ALL]}, "example.com", PUBLIC, False),
        ({"deny": [ALL]}, "2606:4700::1111", "2606:4700::1111", False),
        ({"deny": [ALL], "allow": ["example.com"]}, "example.com", PUBLIC, True),
        ({"deny": [ALL], "allow": ["Example.COM."]}, "example.com", PUBLIC, True),
        ({"deny": [ALL], "allow": ["example.com"]}, "www.example.com", PUBLIC, False),
        ({"deny": [ALL], "allow": ["example.com"]}, PUBLIC, PUBLIC, False),
        ({"deny": [ALL], "allow": ["*.example.com"]}, "a.b.example.com", PUBLIC, True),
        ({"deny": [ALL], "allow": ["*.example.com"]}, "example.com", PUBLIC, False),
        ({"deny": [ALL], "allow": ["*.example.com"]}, "badexample.com", PUBLIC, False),
        ({"deny": [ALL], "allow": ["bücher.example"]}, "xn--bcher-kva.example", PUBLIC, True),
        ({"deny": [ALL], "allow": [PUBLIC]}, PUBLIC, PUBLIC, True),
        ({"deny": [ALL], "allow": [PUBLIC]}, "example.com", PUBLIC, False),  # by its address only: it is not looked up
        ({"deny": [ALL], "allow": [ALL]}, "example.com", PUBLIC, True),
        ({"allow": ["example.com"]}, "example.org", PUBLIC, False),
        ({"allow": ["93.184.0.0/16"]}, PUBLIC, PUBLIC, True),
        ({"allow": ["93.184.0.0/16"]}, "8.8.8.8", "8.8.8.8", False),
        ({"deny": ["93.184.0.0/16"]}, "example.com", PUBLIC, False),
        ({"deny": ["93.184.0.0/16"]}, f"::ffff:{PUBLIC}", f"::ffff:{PUBLIC}", False),
        ({"deny": ["93.184.0.0/16"]}, "64:ff9b::5db8:d70e", "64:ff9b::5db8:d70e", False),
        ({"deny": ["93.184.0.0/16"], "allow": [PUBLIC]}, "example.com", PUBLIC, True),
        ({"deny": ["93.184.0.0/16"]}, "example.org", "8.8.8.8", True),
        ({"deny": ["example.com"]}, "example.com", PUBLIC, False),
        ({"deny": ["*.example.com"]}, "www.example.com", PUBLIC, False),
    ],
)
def test_rules(rules: dict[str, Any], host: str, address: str, verdict: bool) -> None:
    assert allowed(rules, host, address) == ([address] if verdict else [])


def test_a_refused_name_is_refused_before_it_is_looked_up() -> None:
    assert Rules.of({"deny": [ALL], "allow": [PUBLIC]}).by_name("secret.example.org") is False
    assert Rules.of({"allow": ["example.com"]}).by_name("secret.example.org") is False
    assert Rules.of({"deny": [PUBLIC]}).by_name("example.org") is None


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "100.64.0.1", "100.100.100.200",
        "169.254.169.254", "168.63.129.16", "192.0.0.192", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "::", "::1",
        "fe80::1", "fec0::1", "fd00:ec2::254", "ff02::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1",
        "2002:7f00:1::", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "2001:db8::1",
    ],
)  # fmt: skip
def test_what_is_not_the_internet_is_refused_whatever_the_rules_say(address: str) -> None:
    for rules in ({}, {"allow": [ALL]}, {"allow": [address]}, {"allow": ["example.com"]}):
        assert allowed(rules, "example.com", address) == []
        assert allowed(rules, address) == []


def test_an_operator_may_open_private_networks() -> None:
    assert allowed({}, "10.1.2.3", private=("10.1.0.0/16",)) == ["10.1.2.3"]
    assert allowed({}, "10.2.2.3", private=("10.1.0.0/16",)) == []
    assert allowed({"deny": ["10.1.2.3"]}, "10.1.2.3", private=("10.1.0.0/16",)) == []
    with pytest.raises(BadArgument):
        Outside.of(["10.1.2.3/16"])


def test_of_many_addresses_only_the_allowed_are_connected_to() -> None:
    assert allowed({"deny": ["8.8.8.0/24"]}, "example.com", "8.8.8.8", PUBLIC, "127.0.0.1") == [PUBLIC]


@pytest.mark.parametrize(
    "told",
    [
        {"allow": "example.com"}, {"allow": [1]}, {"allow": ["*"]}, {"allow": ["a b"]}, {"allow": ["http://example.com"]}, {"allow": [""]},
        {"deny": ["1.2.3.4/33"]}, {"deny": ["example.com/8"]}, {"deny": ["*.*.com"]}, {"deny": ["x" * 300]}, {"deny": ["a..b"]},
        {"other": []}, {"allow": ["example.com"] * 1001},
    ],
)  # fmt: skip
def test_what_is_no_rule_is_refused(told: dict[str, Any]) -> None:
    with pytest.raises(BadArgument):
        Rules.of(told)


# the proxy

Judge = Callable[[str, int], Awaitable[list[Address]]]


async def asked(request: bytes, judge: Judge) -> bytes:
    """All that the proxy answers."""
    ours, theirs = socket.socketpair()
    inside = await asyncio.open_connection(sock=theirs)
    reader, writer = await asyncio.open_connection(sock=ours)
    try:
        writer.write(request)
        writer.write_eof()
        await Conversation(inside, judge, lambda count: None).serve()
        inside[1].close()
        return await reader.read()
    finally:
        for one in (writer, inside[1]):
            one.transport.abort()


@contextlib.asynccontextmanager
async def answering(host: str, answer: bytes, port: int = 0) -> AsyncIterator[tuple[int, list[bytes]]]:
    """A server that says the same to everybody and does not hang up; its port, and what it was asked."""
    heard: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer)
        with contextlib.suppress(OSError):
            while piece := await reader.read(65536):
                heard.append(piece)
        writer.close()

    server = await asyncio.start_server(serve, host, port)
    try:
        yield server.sockets[0].getsockname()[1], heard
    finally:
        server.close()


def found(address: str) -> Judge:
    async def judge(host: str, port: int) -> list[Address]:
        return [ip_address(address)]

    return judge


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nKeep-Alive: timeout=99\r\nX-Own: 1\r\n\r\nok"


def test_one_request_on_a_connection_and_no_header_of_the_hop() -> None:
    async def story() -> None:
        async with answering("127.0.0.1", OK) as (port, heard):
            head = (
                f"GET http://user:word@LOCALHOST:{port}/a?b=c HTTP/1.1\r\nHost: other\r\nProxy-Authorization: x\r\n"
                "Proxy-Connection: keep-alive\r\nConnection: X-Hop\r\nX-Hop: 1\r\nX-Own: 2\r\n\r\n"
            )
            second = b"GET http://elsewhere/secret HTTP/1.1\r\nHost: elsewhere\r\n\r\n"
            answer = await asked(head.encode() + second, found("127.0.0.1"))
            assert answer.count(b"HTTP/1.1 ") == 1
            assert answer.endswith(b"\r\n\r\nok")
            assert b"connection: close" in answer.lower()
            assert b"keep-alive" not in answer.lower()
            (request,) = heard
            assert request.startswith(f"GET /a?b=c HTTP/1.1\r\nHost: localhost:{port}\r\n".encode())
            assert b"x-own: 2" in request.lower()
            for gone in (b"proxy", b"x-hop", b"user", b"elsewhere"):
                assert gone not in request.lower()

    asyncio.run(story())


def test_what_is_no_request_to_a_proxy_is_said_in_http() -> None:
    async def story() -> None:
        for line in (
            "GET / HTTP/1.1", "GET https://h/ HTTP/1.1", "GET ftp://h/ HTTP/1.1", "CONNECT h HTTP/1.1", "CONNECT h:0 HTTP/1.1",
            "CONNECT h:99999 HTTP/1.1", "CONNECT h:443/x HTTP/1.1", "CONNECT [::1%25lo]:443 HTTP/1.1", "GET http:/// HTTP/1.1",
            "CONNECT a_%00.b:443 HTTP/1.1", "nonsense", "CONNECT h:443 HTTP/1.1\r\nContent-Length: 5",
        ):  # fmt: skip
            answer = await asked(f"{line}\r\nHost: h\r\n\r\n".encode(), found("127.0.0.1"))
            assert answer.startswith(b"HTTP/1.1 400 BAD_ARGUMENT\r\n"), (line, answer)
        assert await asked(b"", found("127.0.0.1")) == b""

    asyncio.run(story())


def test_a_name_is_looked_up_once_and_that_address_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name whose second answer is another address (rebinding) is never asked for a second answer."""
    times = 0
    real = socket.getaddrinfo

    def rebinding(host: Any, *rest: Any, **more: Any) -> Any:
        nonlocal times
        if host != "rebind.example":
            return real(host, *rest, **more)
        times += 1
        address = "127.0.0.1" if times == 1 else "127.0.0.2"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]

    async def story() -> None:
        with ThreadPoolExecutor(1) as threads:

            async def judge(host: str, port: int) -> list[Address]:
                outside = Outside.of(["127.0.0.1/32"])
                return decide(Rules.of({}), outside, host, await look_up(host, threads))

            async with answering("127.0.0.1", OK) as (port, _):
                monkeypatch.setattr(socket, "getaddrinfo", rebinding)
                request = f"GET http://rebind.example:{port}/ HTTP/1.1\r\nHost: rebind.example\r\n\r\n".encode()
                assert (await asked(request, judge)).endswith(b"ok")
                assert times == 1
                assert b"403 EGRESS_DENIED" in await asked(request, judge)

    asyncio.run(story())


def test_a_tunnel_carries_both_halves_to_their_ends() -> None:
    async def story() -> None:
        async with answering("127.0.0.1", b"greeting ") as (port, heard):
            head = f"CONNECT localhost:{port} HTTP/1.1\r\nHost: h\r\n\r\n".encode()
            answer = await asked(head + b"early\r\n\r\n" + b"x" * 300_000, found("127.0.0.1"))
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert answer.endswith(b"\r\n\r\ngreeting ")
            assert b"".join(heard) == b"early\r\n\r\n" + b"x" * 300_000

    asyncio.run(story())
