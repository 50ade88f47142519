"""Figures for Prometheus: requests, their times, sandboxes by state. Counts only: no ids, no users."""

from __future__ import annotations

import time
from collections import Counter as Tally

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from sqlalchemy import func, select
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sandkeep.server.services import Services
from sandkeep.sessions import SessionState
from sandkeep.sessions.tables import sessions


class Figures:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        what = ("method", "route", "status")
        self.requests = Counter("sandkeep_requests_total", "Requests answered.", what, registry=self.registry)
        self.seconds = Histogram(
            "sandkeep_request_seconds",
            "Time to the first byte of the answer.",
            ("method", "route"),
            registry=self.registry,
        )
        self.egress = Counter(
            "sandkeep_egress_total", "Connections that sandboxes asked for.", ("verdict",), registry=self.registry
        )
        self.sandboxes = Gauge("sandkeep_sandboxes", "Sandboxes by state.", ("state",), registry=self.registry)
        self.troubles = Gauge(
            "sandkeep_sweeper_troubles", "What the sweeper could not do in its last round.", registry=self.registry
        )

    def connected(self, verdict: str) -> None:
        self.egress.labels(verdict).inc()

    async def text(self, services: Services) -> bytes:
        counts: Tally[str] = await services.db.call(_count, services)
        for state in SessionState:
            self.sandboxes.labels(state).set(counts[state])
        self.troubles.set(len(services.sweeper.troubles))
        return generate_latest(self.registry)


def _count(services: Services) -> Tally[str]:
    with services.db.read() as connection:
        found = connection.execute(select(sessions.c.state, func.count()).group_by(sessions.c.state))
        return Tally({str(state): count for state, count in found})


class Measured:
    """The middleware: counts and times every HTTP answer."""

    def __init__(self, app: ASGIApp, figures: Figures) -> None:
        self._app = app
        self._figures = figures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "unknown")
                self._figures.requests.labels(scope["method"], route, message["status"]).inc()
                self._figures.seconds.labels(scope["method"], route).observe(time.perf_counter() - began)
            await send(message)

        await self._app(scope, receive, noted)
