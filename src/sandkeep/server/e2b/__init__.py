"""A home for E2B's programs: its control plane and its sandboxes' own API on this server's services, for its unmodified SDKs.

`install(app)` is all that the application calls.
"""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from sandkeep.server.audit import Audited
from sandkeep.server.e2b import control, sandbox_plane, traffic
from sandkeep.server.e2b.box import Houses
from sandkeep.server.e2b.door import Door
from sandkeep.server.e2b.errors import plain
from sandkeep.server.e2b.life import Life
from sandkeep.server.e2b.metering import Meter
from sandkeep.server.e2b.watching import Watchers
from sandkeep.server.limits import Sized
from sandkeep.server.metrics import Measured
from sandkeep.server.settings import Settings

__all__ = ["install"]


def install(app: FastAPI, settings: Settings) -> None:
    """Call it after all other middleware but CORS. E2B's routes share the application's state."""
    e2b = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    e2b.state = app.state
    for router in (sandbox_plane.router, traffic.router, control.router):
        e2b.include_router(router)
    e2b.add_middleware(Audited)
    e2b.add_exception_handler(HTTPException, _no_such_path)

    async def measured(scope: Scope, receive: Receive, send: Send) -> None:
        await Measured(e2b, app.state.figures)(scope, receive, send)

    small, large = (Sized(measured, most, most) for most in (settings.max_body, settings.max_upload))
    app.add_middleware(Door, e2b=small, large=large, begin=_begin, end=_end)


async def _no_such_path(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return plain(error.status_code, str(error.detail))


async def _begin(scope: Scope) -> None:
    state = scope["app"].state
    life, houses, watchers, meter = Life(state.services), Houses(), Watchers(), Meter(state.services)
    life.on_end += [houses.forget, watchers.forget, meter.forget]
    state.e2b, state.e2b_houses, state.e2b_watchers, state.e2b_meter = life, houses, watchers, meter
    await life.start()


async def _end(scope: Scope) -> None:
    state = scope["app"].state
    await state.e2b_watchers.stop()
    await state.e2b.stop()
