"""The two WebSocket endpoints."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter
from starlette.websockets import WebSocket

from sandkeep.errors import SandkeepError
from sandkeep.server import problems
from sandkeep.server.protocol import opening
from sandkeep.server.protocol.conversation import Conversation
from sandkeep.server.protocol.door import admit

router = APIRouter()


@router.websocket("/create")
async def create(socket: WebSocket) -> None:
    try:
        scope = await admit(socket)
    except SandkeepError as error:
        await problems.refuse(socket, error)
        return
    await socket.accept()
    await Conversation(socket.app.state.hall, socket).run(partial(opening.create, scope=scope))


@router.websocket("/attach/{id}")
async def attach(socket: WebSocket, id: str) -> None:
    """The token is the authority here, whoever brings it; without the parameter there is no handshake."""
    token = socket.query_params.get("sandbox_token")
    if token is None:
        await socket.close()
        return
    await opening.pass_on(socket, id)
    await socket.accept()
    await Conversation(socket.app.state.hall, socket).run(partial(opening.attach, id=id, token=token))
