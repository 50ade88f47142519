"""How large a request may be: refused by its declared length at once, else when it has sent too much."""

from __future__ import annotations

import re

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sandkeep.errors import TooLarge
from sandkeep.server.problems import answer

LARGE = re.compile(r"/storage/.*|/sandboxes/[^/]+/(files|state|ports/.*)")


class Sized:
    def __init__(self, app: ASGIApp, max_body: int, max_upload: int) -> None:
        self._app = app
        self._body, self._upload = max_body, max_upload

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        most = self._upload if LARGE.fullmatch(scope["path"]) else self._body
        error = TooLarge(f"this request may have at most {most} bytes", "send less, or in parts")
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if declared.isdigit() and int(declared) > most:
            await answer(error)(scope, receive, send)
            return
        taken = 0

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > most:
                raise HTTPException(413, detail=error.as_dict())  # type: ignore[arg-type]
            return message

        await self._app(scope, counted, send)
