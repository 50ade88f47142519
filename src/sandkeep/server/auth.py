"""Who calls: an API key in `Authorization: Bearer` or `X-API-Key`; for WebSockets, since browsers can't set headers there, also
`?api_key=`. Each key has a bucket of requests that fills at a steady rate.
"""

from __future__ import annotations

import math
import time
from typing import Annotated

from fastapi import Depends
from starlette.requests import HTTPConnection

from sandkeep.errors import Denied, RateLimited
from sandkeep.server.problems import Unauthorized
from sandkeep.server.services import Services
from sandkeep.sessions import Key, Scope

_REMEDY = "send `Authorization: Bearer sk_…`; make a key with: sandkeep key create --user NAME"


class Buckets:
    """Tokens of each key; a full bucket is forgotten."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._left: dict[str, tuple[float, float]] = {}

    def take(self, key: str, now: float | None = None) -> None:
        if not self._rate:
            return
        now = time.monotonic() if now is None else now
        if len(self._left) > 10_000:
            self._left = {k: (n, at) for k, (n, at) in self._left.items() if n + (now - at) * self._rate < self._burst}
        left, at = self._left.get(key, (self._burst, now))
        left = min(self._burst, left + (now - at) * self._rate)
        if left < 1:
            self._left[key] = (left, now)
            wait = math.ceil((1 - left) / self._rate)
            raise RateLimited("too many requests with this key", f"wait {wait} s", retry_after=wait)
        self._left[key] = (left - 1, now)


def secret_of(connection: HTTPConnection) -> str:
    given = connection.headers.get("x-api-key")
    if given is None:
        scheme, _, value = connection.headers.get("authorization", "").partition(" ")
        given = value.strip() if scheme.lower() == "bearer" else None
    if given is None and connection.scope["type"] == "websocket":
        given = connection.query_params.get("api_key")
    if not given:
        raise Unauthorized("no API key was given", _REMEDY)
    return given


async def identify(connection: HTTPConnection) -> Key:
    """The caller's key, checked and counted; noted for the audit."""
    services: Services = connection.app.state.services
    try:
        key = await services.db.call(services.keys.check, secret_of(connection))
    except Denied as error:
        raise Unauthorized(error.message, _REMEDY) from None
    connection.app.state.buckets.take(key.id)
    connection.state.key = key
    return key


async def scope_of(connection: HTTPConnection) -> Scope:
    return (await identify(connection)).scope


def services_of(connection: HTTPConnection) -> Services:
    services: Services = connection.app.state.services
    return services


Caller = Annotated[Scope, Depends(scope_of)]
Use = Annotated[Services, Depends(services_of)]
