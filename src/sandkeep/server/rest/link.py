"""WS /sandboxes/{id}/link: the guest's own protocol for our clients, one request at a time.

A request is a text message `{"op": …, fields}`; data, both ways, are binary messages whose first byte is the kind (1 stdout, 2
stderr, 3 data; a lone 3 ends a request's data); what the guest says is text, the last one has `ok`. Only what a user may do by
REST is let through.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, WebSocket

from sandkeep.errors import BadArgument, Denied, SandkeepError
from sandkeep.runtime.link.protocol import DATA, OPEN_ENDED, QUICK, STDERR, STDOUT
from sandkeep.server.answers import tell
from sandkeep.server.audit import Auditor
from sandkeep.server.problems import unexpected
from sandkeep.server.services import Services
from sandkeep.server.sockets import Inbox, Left, accepted, caller, parsed
from sandkeep.sessions import Key

router = APIRouter()

KINDS = {"stdout": bytes([STDOUT]), "stderr": bytes([STDERR]), "data": bytes([DATA])}
CHANGES = frozenset(
    [
        "run",
        "start",
        "signal",
        "history_clear",
        "env_set",
        "env_unset",
        "session_set",
        "user_default",
        "file_write",
        "file_mkdir",
        "file_move",
        "file_remove",
        "file_chmod",
        "file_chown",
        "file_symlink",
    ]
)
READS = frozenset(
    [
        "attach",
        "wait",
        "stdin",
        "close_stdin",
        "resize",
        "list",
        "process",
        "history_list",
        "env_get",
        "session_get",
        "file_stat",
        "file_list",
        "file_read",
        "file_watch",
        "ports",
        "usage",
    ]
)


@router.websocket("/sandboxes/{id}/link")
async def link(socket: WebSocket, id: str) -> None:
    async with caller(socket, id) as (services, key), accepted(socket) as inbox:
        while True:
            request = Request(socket, inbox, parsed(await inbox.next()))
            await inbox.during(request.answer(services, key, id))
            await request.rest()


class Request:
    def __init__(self, socket: WebSocket, inbox: Inbox, fields: dict[str, Any]) -> None:
        self._socket, self._inbox = socket, inbox
        self._op = fields.pop("op", None)
        self._fields = fields
        self._open = self._op in ("file_write", "stdin") or (self._op == "run" and fields.pop("stdin", False) is True)

    async def answer(self, services: Services, key: Key, id: str) -> None:
        try:
            check(self._op, self._fields)
            auditor: Auditor = self._socket.app.state.auditor
            noted = auditor.write(key, f"WS {self._op}", "begun", id) if self._op in CHANGES else asyncio.sleep(0)
            async with asyncio.TaskGroup() as group:
                group.create_task(noted)
                await self._relay(services, key, id)
        except BaseExceptionGroup as group_error:
            await self._fail(group_error.exceptions[0])
        except Exception as error:
            await self._fail(error)

    async def _fail(self, error: BaseException) -> None:
        if isinstance(error, Left) or not isinstance(error, Exception):
            raise error
        told = error if isinstance(error, SandkeepError) else unexpected(error)
        await tell(self._socket, {"ok": False, **told.as_dict()})

    async def _relay(self, services: Services, key: Key, id: str) -> None:
        body = self._body() if self._open else None
        async with services.use(key.scope, id) as sandbox:
            timeout = None if self._op in OPEN_ENDED else QUICK
            async with sandbox._link.stream(self._op, self._fields, body=body, timeout=timeout) as events:
                async for kind, value in events:
                    if kind == "json":
                        await tell(self._socket, value)
                    else:
                        await self._socket.send_bytes(KINDS[kind] + value)
                final = events.result
        await tell(self._socket, {"ok": True, **final})

    async def _body(self) -> AsyncIterator[bytes]:
        while self._open:
            message = await self._inbox.next()
            if not isinstance(message, bytes) or message[:1] != KINDS["data"]:
                raise BadArgument("data of the request was expected", "end it with an empty data message")
            self._open = len(message) > 1
            if self._open:
                yield message[1:]

    async def rest(self) -> None:
        """What is left of a body that the guest did not want."""
        async for _ in self._body():
            pass


def check(op: Any, fields: dict[str, Any]) -> None:
    if not isinstance(op, str) or op not in CHANGES | READS:
        raise Denied(f"there is no request {op!r} for clients", "see what the REST API offers")
    if op == "session_set" and set(fields) != {"cwd"}:
        raise Denied("only the working folder can be set by itself", "restore a snapshot for the whole session")
