"""Sandboxes of a Sandkeep server, with the same API as those of this machine.

    server = sandkeep.connect("http://…", api_key="sk_…")
    with server.Sandbox() as sb:
        sb.commands.run("make")

`server.Sandbox` and `server.AsyncSandbox` have the names and results of the embedded ones; commands, files, terminals, env and
history are the very same classes over another link.
"""

from __future__ import annotations

import os
from typing import Self

from sandkeep.client._async.sandbox import AsyncRemoteSandbox
from sandkeep.client._async.server import AsyncServer
from sandkeep.client._sync.sandbox import RemoteSandbox
from sandkeep.client._sync.server import Server
from sandkeep.errors import BadArgument

__all__ = ["AsyncRemoteSandbox", "Remote", "RemoteSandbox", "connect"]


class Remote:
    """A server and a key. `Sandbox` and `AsyncSandbox` are classes bound to it."""

    Sandbox: type[RemoteSandbox]
    AsyncSandbox: type[AsyncRemoteSandbox]

    def __init__(self, url: str, api_key: str) -> None:
        self.url = url.rstrip("/")
        self._server, self._async = Server(self.url, api_key), AsyncServer(self.url, api_key)
        self.Sandbox = type("Sandbox", (RemoteSandbox,), {"_server": self._server})
        self.AsyncSandbox = type("AsyncSandbox", (AsyncRemoteSandbox,), {"_server": self._async})

    def close(self) -> None:
        """Let go of the connections that the sync API uses."""
        self._server.close()

    async def aclose(self) -> None:
        self._server.close()
        await self._async.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def connect(url: str | None = None, *, api_key: str | None = None) -> Remote:
    """A server; by default the one that SANDKEEP_API_URL and SANDKEEP_API_KEY name. Contacts nothing yet."""
    url, api_key = url or os.environ.get("SANDKEEP_API_URL"), api_key or os.environ.get("SANDKEEP_API_KEY")
    if not url:
        raise BadArgument("the server's address is missing", "give http://… or set SANDKEEP_API_URL")
    if not isinstance(url, str) or not url.startswith(("http://", "https://")) or not url.isprintable():
        raise BadArgument(f"{url!r} is not a server's address", "it begins with http:// or https://")
    if not api_key:
        raise BadArgument("the API key is missing", "give api_key= or set SANDKEEP_API_KEY")
    if not isinstance(api_key, str) or not api_key.isascii() or not api_key.isprintable():
        raise BadArgument("the API key is not one", "it is the line that begins with sk_, without what is around it")
    return Remote(url, api_key)
