"""JSON on the wire. Names of files and commands are bytes; what is no UTF-8 in them is a lone surrogate here, which only an escape can carry."""

from __future__ import annotations

import json
from typing import Any

from fastapi.responses import JSONResponse
from starlette.websockets import WebSocket


class Answer(JSONResponse):
    def render(self, content: Any) -> bytes:
        return written(content).encode("ascii")


def written(content: Any) -> str:
    return json.dumps(content, allow_nan=False, separators=(",", ":"))


async def tell(socket: WebSocket, content: Any) -> None:
    await socket.send_text(written(content))
