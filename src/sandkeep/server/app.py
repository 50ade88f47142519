"""The application: its life from opening the database to the drain, its middleware, its routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from sandkeep.server import e2b, problems, protocol, relay
from sandkeep.server.answers import Answer
from sandkeep.server.audit import Audited, Auditor
from sandkeep.server.auth import Buckets
from sandkeep.server.limits import Sized
from sandkeep.server.metrics import Figures, Measured
from sandkeep.server.rest import ROUTERS
from sandkeep.server.rest.ports import ByHostName
from sandkeep.server.services import Services
from sandkeep.server.settings import Settings
from sandkeep.server.strays import Strays
from sandkeep.server.trimming import Trimmer
from sandkeep.sessions import Database

THREADS = 64


def create_app(settings: Settings) -> FastAPI:
    figures = Figures()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        threads = ThreadPoolExecutor(THREADS, thread_name_prefix="sandkeep")
        asyncio.get_running_loop().set_default_executor(threads)
        settings.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        database = Database(settings.database)
        try:
            await database.call(database.open)
            services = Services(settings, database)
            app.state.services, app.state.auditor, app.state.figures = services, Auditor(database), figures
            services.egress.counted = figures.connected
            await services.sweeper.start()
            await services.egress.start()
            tidying = [asyncio.create_task(one.forever()) for one in (Strays(services), services.gateway, Trimmer())]
            try:
                yield
                await services.drain()
            finally:
                for task in tidying:
                    task.cancel()
                await asyncio.gather(*tidying, return_exceptions=True)
                await services.readiness.stop()
                await services.egress.stop()
                await services.sweeper.stop()
                services.spaces.close()
        finally:
            database.close()

    app = FastAPI(
        title="Sandkeep",
        version="1",
        description="Sandboxes that never lose their state.",
        lifespan=lifespan,
        default_response_class=Answer,
    )
    app.state.buckets = Buckets(settings.rate, settings.burst)
    problems.install(app)
    relay.install(app)
    for router in ROUTERS:
        app.include_router(router)
    if settings.websocket_protocol:
        protocol.mount(app)
    app.add_middleware(Audited)
    app.add_middleware(Sized, max_body=settings.max_body, max_upload=settings.max_upload)
    app.add_middleware(Measured, figures=figures)
    app.add_middleware(ByHostName)
    if settings.e2b:
        e2b.install(app, settings)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            max_age=600,
        )
    return app
