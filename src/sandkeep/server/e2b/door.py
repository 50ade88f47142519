"""Which of the server's doors a request of E2B's means: the control plane, a sandbox's envd, or a port of a sandbox.

The SDKs share one address with REST. Theirs are: what names a sandbox in a header or in the host's name, signed file addresses,
and whatever an SDK of theirs says it has sent. Other clients write `/e2b` before the control plane's paths.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sandkeep.server.e2b.errors import known, plain_error
from sandkeep.server.e2b.files import signed_with
from sandkeep.server.e2b.life import Gone, Life
from sandkeep.server.e2b.rpc import transport_of
from sandkeep.server.e2b.sandbox_plane import ENVD_PORT
from sandkeep.server.passing import ASKED
from sandkeep.server.problems import Unauthorized

PREFIX = "/e2b"
_HOST = re.compile(r"(\d{1,5})-(sb-[0-9a-f]{12})\.[^/]+")
_ID = re.compile(r"sb-[0-9a-f]{12}")
_PORT = re.compile(r"[0-9]{1,5}")
_LARGE = re.compile(r"/envd/[^/]+/files|/sandboxes/[^/]+/ports/")
_SDKS = ("e2b-python-sdk/", "e2b-js-sdk/")
Hook = Callable[[Scope], Awaitable[None]]


class Door:
    """The outermost middleware but CORS: E2B's requests go to `e2b`, with large bodies to `large`, all others to the application.

    `begin` runs when the server has started, `end` before it stops.
    """

    def __init__(self, app: ASGIApp, e2b: ASGIApp, large: ASGIApp, begin: Hook, end: Hook) -> None:
        self._app = app
        self._e2b, self._large = e2b, large
        self._begin, self._end = begin, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
            return
        try:
            way = await self._way(scope)
        except Exception as error:
            await plain_error(known(error))(scope, receive, send)
            return
        if way is None:
            await self._app(scope, receive, send)
            return
        inner = self._large if _LARGE.match(way["path"]) else self._e2b
        await inner({**way, "e2b.transport": transport_of(receive)}, receive, send)

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def hear() -> Message:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                await self._end(scope)
            return message

        async def tell(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                await self._begin(scope)
            await send(message)

        await self._app(scope, hear, tell)

    async def _way(self, scope: Scope) -> Scope | None:
        """The request as it goes on; None if it is not E2B's."""
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        life: Life = scope["app"].state.e2b
        id, port = headers.get(b"e2b-sandbox-id"), headers.get(b"e2b-sandbox-port", str(ENVD_PORT))
        if id is None and (match := _HOST.fullmatch(headers.get(b"host", ""))) and await life.row(match[2]):
            port, id = match[1], match[2]
            told = [(b"e2b-sandbox-id", id.encode()), (b"e2b-sandbox-port", port.encode())]
            scope = {**scope, "headers": [*scope["headers"], *told]}  # another server is asked under another host name
        if id is not None:
            if not _ID.fullmatch(id) or not _PORT.fullmatch(port):
                raise Gone(id)
            return moved(scope, f"/envd/{id}" if int(port) == ENVD_PORT else f"/sandboxes/{id}/ports/{int(port)}")
        if scope["type"] != "http":
            return None
        if scope["path"].startswith(PREFIX + "/"):
            return moved(scope, "", len(PREFIX))
        if scope["path"] == "/files" and "signature" in parse_qs(scope["query_string"].decode("latin-1")):
            return moved(scope, f"/envd/{await _signer(life, Request(scope))}")
        if headers.get(b"publisher") == "e2b" or headers.get(b"user-agent", "").startswith(_SDKS):
            return moved(scope, "")
        return None


async def _signer(life: Life, request: Request) -> str:
    """The sandbox whose token made this signature: such an address names no other."""
    for id, token in (await life.call(life.rows.tokens)).items():
        if signed_with(request, token):
            return id
    raise Unauthorized("this signature is of no sandbox", "make the address anew")


def moved(scope: Scope, above: str, cut: int = 0) -> Scope:
    """The same request below another path."""
    raw = scope.get("raw_path") or scope["path"].encode()
    return {**scope, "path": above + scope["path"][cut:], "raw_path": above.encode() + raw[cut:], ASKED: raw}
