"""An audit row for every call that changes something, before its answer goes out: who, what, on which sandbox, how it ended.

Rows of many calls share one transaction: whoever comes while one is being written goes with the next. No body, no query, no
header is ever part of a row.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from sqlalchemy import insert
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sandkeep.errors import DatabaseFailed
from sandkeep.sessions import Database, Key
from sandkeep.sessions.tables import audit, now

_log = logging.getLogger(__name__)
CHANGING = frozenset({"POST", "PUT", "PATCH", "DELETE"})


class Auditor:
    def __init__(self, database: Database) -> None:
        self._db = database
        self._waiting: list[tuple[dict[str, Any], asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def write(self, key: Key, action: str, outcome: str, sandbox: str | None = None) -> None:
        """Returns when the row is durable. A database that refuses is logged: the call itself has been done."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        row: dict[str, Any] = {
            "who": f"{key.user} {key.id}"[:200],
            "action": action[:100],
            "outcome": outcome[:100],
            "sandbox": sandbox,
            "detail": {},
        }
        self._waiting.append((row, done))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_all())
        await done

    async def _write_all(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                await self._db.call(self._insert, [row for row, _ in batch])
            except DatabaseFailed as error:
                _log.error("%d audit rows were not written: %s", len(batch), error)
            finally:
                for _, done in batch:
                    if not done.done():
                        done.set_result(None)

    def _insert(self, batch: list[dict[str, Any]]) -> None:
        with self._db.write() as connection:
            for row in batch:
                connection.execute(insert(audit).values(at=now(), **row))


class Audited:
    """The middleware: a row when the answer to a changing call begins."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or (scope["type"] == "http" and scope["method"] not in CHANGING):
            await self._app(scope, receive, send)
            return
        state: dict[str, Any] = scope.setdefault("state", {})

        async def noted(message: Message) -> None:
            if (
                message["type"] in ("http.response.start", "websocket.accept", "websocket.http.response.start")
                and "key" in state
            ):
                route = getattr(scope.get("route"), "path", "unknown")
                verb = scope.get("method", "WS")
                outcome = str(message.get("status", "accepted"))
                auditor: Auditor = scope["app"].state.auditor
                await auditor.write(state["key"], f"{verb} {route}", outcome, scope.get("path_params", {}).get("id"))
            await send(message)

        await self._app(scope, receive, noted)
