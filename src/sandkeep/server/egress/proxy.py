"""An HTTP proxy for one connection of a sandbox: CONNECT, and requests that name their host. One request, then it ends: nothing of one
can be taken for a part of another, or go to another's host.

Names are looked up here, once; what is connected to is an address that was checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor
from functools import partial
from ipaddress import ip_address
from typing import Any, Protocol
from urllib.parse import urlsplit

import h11

from sandkeep.errors import BadArgument, ConnectFailed, SandkeepError
from sandkeep.server.egress.rules import Address, address_of, name_of
from sandkeep.server.problems import status_of

HEAD_SECONDS = 30.0
CONNECT_SECONDS = 15.0
LINGER_SECONDS = 2.0
FINISH_SECONDS = 600.0
MOST_TRIED = 4
CHUNK = 64 << 10
_HEAD = 64 << 10
_ONE_HOP = {
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te", b"trailer",
    b"transfer-encoding", b"upgrade", b"expect", b"host",
}  # fmt: skip
Wire = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Sink(Protocol):
    """As much of a `StreamWriter` as is used of the end inside."""

    def write(self, data: bytes) -> None: ...
    def write_eof(self) -> None: ...
    async def drain(self) -> None: ...
    @property
    def transport(self) -> asyncio.WriteTransport: ...


Judge = Callable[[str, int], Awaitable[list[Address]]]


class Conversation:
    """`judge` gives the addresses that may be connected to, or raises; `moved` is told of bytes, either way."""

    def __init__(self, inside: tuple[asyncio.StreamReader, Sink], judge: Judge, moved: Callable[[int], None]) -> None:
        self._reader, self._writer = inside
        self._judge = judge
        self._moved = moved
        self._wire = h11.Connection(h11.SERVER, max_incomplete_event_size=_HEAD)

    async def serve(self) -> None:
        try:
            async with asyncio.timeout(HEAD_SECONDS):
                request = await self._event()
            if not isinstance(request, h11.Request):
                return
            host, port, target = destination(request)
            if target is None and not isinstance(self._wire.next_event(), h11.EndOfMessage):
                raise BadArgument("CONNECT has no body", "send it after the answer")
            async with connected(await self._judge(host, port), host, port) as outside:
                if target is None:
                    await self._tunnel(outside)
                else:
                    await self._exchange(request, host, port, target, outside)
        except SandkeepError as error:
            await self._refuse(error)
        except h11.RemoteProtocolError as error:
            await self._refuse(BadArgument(f"this is not HTTP: {error}", "speak to the proxy in HTTP/1.1"))
        except (TimeoutError, OSError):
            return

    async def _event(self) -> Any:
        while (event := self._wire.next_event()) is h11.NEED_DATA:
            if self._wire.they_are_waiting_for_100_continue:
                go_on = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
                await self._send(self._wire.send(go_on))
            self._wire.receive_data(await self._reader.read(CHUNK))
        return event

    async def _send(self, data: bytes | None) -> None:
        if data:
            self._writer.write(data)
            await self._writer.drain()

    async def _refuse(self, error: SandkeepError) -> None:
        """If nothing has been answered yet. The reason carries the code: it is what most programs show."""
        if self._wire.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        body = json.dumps(error.as_dict()).encode() + b"\n"
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close")]
        answer = h11.Response(status_code=status_of(error), reason=error.code.encode(), headers=headers)
        with contextlib.suppress(OSError, TimeoutError, h11.LocalProtocolError):
            data = self._wire.send(answer) or b""
            data += self._wire.send(h11.Data(body)) or b""
            await self._send(data + (self._wire.send(h11.EndOfMessage()) or b""))
            await self._finish(LINGER_SECONDS)

    async def _finish(self, seconds: float) -> None:
        """Until the client has read all and hangs up: what is closed before that is reset inside."""
        self._writer.write_eof()
        async with asyncio.timeout(seconds):
            while await self._reader.read(CHUNK):
                pass

    async def _tunnel(self, outside: Wire) -> None:
        await self._send(self._wire.send(h11.Response(status_code=200, headers=[], reason=b"Connection established")))
        early = self._wire.trailing_data[0]
        async with asyncio.TaskGroup() as both:
            both.create_task(self._pipe(self._reader, outside[1], early))
            both.create_task(self._pipe(outside[0], self._writer))

    async def _pipe(self, source: asyncio.StreamReader, sink: Sink, early: bytes = b"") -> None:
        """Until its end, which is passed on; the other way may go on."""
        with contextlib.suppress(OSError):
            data = early or await source.read(CHUNK)
            while data:
                self._moved(len(data))
                sink.write(data)
                await sink.drain()
                data = await source.read(CHUNK)
            sink.write_eof()
            return
        sink.transport.abort()

    async def _exchange(self, request: h11.Request, host: str, port: int, target: bytes, outside: Wire) -> None:
        wire, (reader, writer) = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD), outside
        name = f"[{host}]" if ":" in host else host
        headers = [(b"Host", (name if port == 80 else f"{name}:{port}").encode()), *passed_on(request.headers)]
        if any(
            n == b"transfer-encoding" for n, _ in request.headers
        ):  # it outdoes a length, and only one of them goes out
            headers = [(n, v) for n, v in headers if n != b"content-length"]
            headers.append((b"Transfer-Encoding", b"chunked"))
        ask = h11.Request(method=request.method, target=target, headers=[*headers, (b"Connection", b"close")])
        try:
            writer.write(wire.send(ask) or b"")
            sending = asyncio.create_task(self._upload(wire, writer))
            sending.add_done_callback(partial(_broke_off, writer))
            try:
                await self._download(wire, reader)
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
            await self._finish(FINISH_SECONDS)
        except (h11.RemoteProtocolError, OSError) as error:
            raise ConnectFailed(f"{host} did not answer in HTTP: {error}", "see what it is") from error

    async def _upload(self, wire: h11.Connection, writer: asyncio.StreamWriter) -> None:
        """A body that breaks off is not ended: the other side must not take it for whole."""
        while isinstance(event := await self._event(), h11.Data):
            self._moved(len(event.data))
            writer.write(wire.send(event) or b"")
            await writer.drain()
        if isinstance(event, h11.EndOfMessage):
            writer.write(wire.send(h11.EndOfMessage()) or b"")
            await writer.drain()

    async def _download(self, wire: h11.Connection, reader: asyncio.StreamReader) -> None:
        while True:
            while (event := wire.next_event()) is h11.NEED_DATA:
                wire.receive_data(await reader.read(CHUNK))
            if isinstance(event, h11.Response):
                headers = [*passed_on(event.headers), (b"Connection", b"close")]
                await self._send(
                    self._wire.send(h11.Response(status_code=event.status_code, reason=event.reason, headers=headers))
                )
            elif isinstance(event, h11.Data):
                self._moved(len(event.data))
                await self._send(self._wire.send(event))
            elif isinstance(event, h11.EndOfMessage):
                await self._send(self._wire.send(h11.EndOfMessage()))
                return
            elif isinstance(event, h11.ConnectionClosed):
                return


def destination(request: h11.Request) -> tuple[str, int, bytes | None]:
    """Host, port, and what to ask there; None for a tunnel. A request's query is never said again in an error."""
    text = request.target.decode("latin-1")
    tunnel = request.method == b"CONNECT"
    try:
        parts = urlsplit(f"//{text}" if tunnel else text)
        host, port = parts.hostname or "", parts.port or (0 if tunnel else 80)
    except ValueError:
        host, port, parts = "", 0, urlsplit("")
    if (tunnel and parts.path) or (not tunnel and parts.scheme.lower() != "http") or not host or not port:
        raise BadArgument(
            "this proxy takes CONNECT host:port and requests for http://host/…", "use it as a proxy, for HTTP and HTTPS"
        )
    literal = address_of(host)
    host = str(literal) if literal is not None else name_of(host)
    if tunnel:
        return host, port, None
    query = f"?{parts.query}" if parts.query else ""
    return host, port, f"{parts.path or '/'}{query}".encode("latin-1")


def passed_on(headers: Any) -> list[tuple[bytes, bytes]]:
    """Without what belongs to one connection."""
    named = {word.strip().lower() for name, value in headers if name == b"connection" for word in value.split(b",")}
    return [(name, value) for name, value in headers if name not in _ONE_HOP | named]


async def look_up(host: str, threads: Executor) -> list[Address]:
    """Once, on threads of its own: a slow answer must not hold up anything else."""
    literal = address_of(host)
    if literal is not None:
        return [literal]
    ask = partial(socket.getaddrinfo, host, None, type=socket.SOCK_STREAM)
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            found = await asyncio.get_running_loop().run_in_executor(threads, ask)
    except (OSError, UnicodeError, TimeoutError):
        raise ConnectFailed(f"{host} was not found", "see that the name is right") from None
    return list(dict.fromkeys(ip_address(one[4][0]) for one in found))


def _broke_off(writer: asyncio.StreamWriter, upload: asyncio.Task[None]) -> None:
    if not upload.cancelled() and upload.exception() is not None:
        writer.transport.abort()


@contextlib.asynccontextmanager
async def connected(addresses: list[Address], host: str, port: int) -> AsyncIterator[Wire]:
    """To the first of these addresses that answers."""
    for address in addresses[:MOST_TRIED]:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                reader, writer = await asyncio.open_connection(str(address), port)
            break
        except (OSError, TimeoutError):
            continue
    else:
        raise ConnectFailed(f"{host}:{port} does not answer", "see that it is up, and that this is its port")
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
