"""The WebSocket protocol of seed 000: /create, /attach/{id} and the few HTTP calls beside them, over the same services as REST.

docs/protocol.md is what is said on the wire; `messages` has its words, `conversation` its flows.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

from sandkeep.server.protocol import http, sockets
from sandkeep.server.protocol.door import redact_logs
from sandkeep.server.protocol.hall import Hall
from sandkeep.server.protocol.watch import Watch


def mount(app: FastAPI) -> None:
    """Add the protocol to the application; its life is inside the application's."""
    redact_logs()
    app.include_router(sockets.router)
    app.include_router(http.router)
    around = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
        async with around(app) as state:
            hall = app.state.hall = Hall(app.state.services)
            watch = Watch(hall)
            await watch.start()
            try:
                yield state
            finally:
                await watch.stop()
                await hall.close()

    app.router.lifespan_context = lifespan
