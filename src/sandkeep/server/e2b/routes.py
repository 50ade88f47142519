"""E2B's routes: errors in its words, and requests for sandboxes that another living host runs passed on to that host's server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from fastapi import Request, Response, WebSocket
from fastapi.routing import APIRoute

from sandkeep.errors import ConnectFailed, SandboxElsewhere, SandkeepError, ServerUnreachable
from sandkeep.server import relay
from sandkeep.server.e2b.errors import known, plain_error
from sandkeep.server.e2b.rpc import reset


class E2BRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        inner = super().get_route_handler()

        async def handler(request: Request) -> Response:
            try:
                return await inner(request)
            except SandboxElsewhere as error:
                return await pass_on(request, error)
            except Exception as error:
                return plain_error(known(error))

        return handler


async def pass_on(request: Request, error: SandboxElsewhere) -> Response:
    """The other server's answer; one that breaks off there breaks off here."""
    try:
        answer = await relay.pass_on(request, error.details.get("host"))
    except ConnectFailed as failed:  # its 502 would say that the sandbox is gone
        return plain_error(ServerUnreachable(failed.message, "try again"))
    except SandkeepError as failed:
        return plain_error(failed)
    if answer is None:
        return plain_error(error)
    answer.body_iterator = _or_reset(answer.body_iterator, request)
    return answer


async def _or_reset(pieces: Any, request: Request) -> AsyncIterator[bytes]:
    try:
        async for piece in pieces:
            yield piece
    except ConnectFailed:
        reset(request.scope)
        await asyncio.sleep(
            0.01
        )  # until the end of the connection is known to the server, which else would end the answer


async def pass_on_socket(client: WebSocket, error: SandboxElsewhere) -> None:
    address = await relay.address_for(client, error.details.get("host"))
    if address is None:
        await client.send_denial_response(plain_error(error))
    else:
        await relay.websocket(client, address)
