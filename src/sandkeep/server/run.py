"""Run the application in this process until a signal says stop, then drain and return."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace

import uvicorn
from fastapi import FastAPI

from sandkeep.errors import BadArgument
from sandkeep.server.app import create_app
from sandkeep.server.settings import Settings


class Server(uvicorn.Server):
    """Stops at SIGTERM and SIGINT without dying of them: a drain that went well ends with 0."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, started: Callable[[int], None]) -> None:
        super().__init__(config)
        self._app = app
        self._told = started

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._told(self.servers[0].sockets[0].getsockname()[1])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.state.services.hands.let_go()
        await super().shutdown(sockets)


def serve(settings: Settings, started: Callable[[int], None] = lambda port: None) -> bool:
    """True when it ran and stopped in good order. `started` is told the port once requests are taken."""
    with _bound(settings) as listener:
        return _serve(replace(settings, port=listener.getsockname()[1]), listener, started)


def _bound(settings: Settings) -> socket.socket:
    """The port is ours, and known, before anybody is told of it; nobody is let in yet."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # without the protocol's number asyncio would not turn Nagle's algorithm off, and answers would wait 40 ms
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise BadArgument(
            f"can't listen on {settings.shown_host}:{settings.port}: {error.strerror}",
            "choose another --host or --port",
        ) from error
    return listener


def _serve(settings: Settings, listener: socket.socket, started: Callable[[int], None]) -> bool:
    app = create_app(settings)
    config = uvicorn.Config(
        app, log_config=None, access_log=False, server_header=False,
        proxy_headers=False, ws="websockets-sansio", ws_max_size=16 << 20, ws_per_message_deflate=False,
        timeout_graceful_shutdown=int(settings.grace_seconds), timeout_keep_alive=30, h11_max_incomplete_event_size=64 << 10,
    )  # fmt: skip
    server = Server(config, app, started)
    server.run([listener])
    return server.started
