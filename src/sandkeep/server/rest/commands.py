"""/sandboxes/{id}/commands: run, follow, feed and signal."""

from __future__ import annotations

import codecs
import json
from collections.abc import AsyncGenerator
from typing import Any, Literal

from fastapi import APIRouter, Request, Response

from sandkeep.errors import BadArgument, SandkeepError
from sandkeep.sandbox._async.commands import error_class, run_fields
from sandkeep.server.answers import Answer
from sandkeep.server.auth import Caller, Use
from sandkeep.server.problems import unexpected
from sandkeep.server.services import Services
from sandkeep.server.shapes import CommandBody, SignalBody, shown, shown_result
from sandkeep.server.streams import alive, streamed
from sandkeep.sessions import Scope

router = APIRouter(prefix="/sandboxes/{id}/commands", tags=["commands"])

DEFAULT_OUTPUT = 1 << 20


@router.post("")
async def run(
    caller: Caller, services: Use, id: str, body: CommandBody, stream: Literal["sse"] | None = None
) -> Response:
    """Run a command line in the shell session: its outcome; with `background` its pid; with `?stream=sse` events as they come."""
    options = body.model_dump(exclude={"command", "background", "stdin", "max_output"})
    if stream is not None:
        if body.background:
            raise BadArgument("a background command is not streamed", "follow it at /commands/{pid}/output")
        fields = run_fields(body.command, **options)
        stdin = None if body.stdin is None else [body.stdin.encode()]
        return await events(services, caller, id, "run", fields, stdin)
    most = min(DEFAULT_OUTPUT if body.max_output is None else body.max_output, services.settings.max_output)
    async with services.use(caller, id) as sandbox:
        found = await sandbox.commands.run(
            body.command, background=body.background, stdin=body.stdin, max_output=most, **options
        )
    return Answer({"pid": found.pid}, 201) if body.background else Answer(shown_result(found))


@router.get("")
async def list_(caller: Caller, services: Use, id: str) -> dict[str, Any]:
    async with services.use(caller, id) as sandbox:
        return {"commands": shown(await sandbox.commands.list())}


@router.get("/{pid}")
async def process(caller: Caller, services: Use, id: str, pid: int) -> dict[str, Any]:
    async with services.use(caller, id) as sandbox:
        return dict(shown(await (await sandbox.commands.connect(pid)).info()))


@router.get("/{pid}/output")
async def output(caller: Caller, services: Use, id: str, pid: int) -> Response:
    """Server-sent events: all of the output that is still kept, then live, then `exit`."""
    return await events(services, caller, id, "attach", {"pid": pid}, None)


@router.get("/{pid}/wait")
async def wait(caller: Caller, services: Use, id: str, pid: int) -> dict[str, Any]:
    """Its outcome with the output that is still kept, when it has ended."""
    async with services.use(caller, id) as sandbox:
        return shown_result(await (await sandbox.commands.connect(pid)).wait())


@router.post("/{pid}/stdin", status_code=204)
async def stdin(caller: Caller, services: Use, id: str, pid: int, request: Request, close: bool = False) -> Response:
    """The body as it is goes to the process's input; with `close` the input ends after it."""
    async with services.use(caller, id) as sandbox:
        process = await sandbox.commands.connect(pid)
        data = await request.body()
        if data:
            await process.send_stdin(data)
        if close:
            await process.close_stdin()
    return Response(status_code=204)


@router.post("/{pid}/signal", status_code=204)
async def signal(caller: Caller, services: Use, id: str, pid: int, body: SignalBody | None = None) -> Response:
    """Signal the process and everything that it started."""
    async with services.use(caller, id) as sandbox:
        await sandbox._link.call("signal", pid=pid, signal=(body or SignalBody()).signal, tree=True)
    return Response(status_code=204)


async def events(services: Services, caller: Scope, id: str, op: str, fields: dict[str, Any], body: Any) -> Response:
    """What a request to the guest streams, as server-sent events. Errors before the first event are ordinary answers."""
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return await streamed(_events(services, caller, id, op, fields, body), "text/event-stream", headers, alive)


async def _events(
    services: Services, caller: Scope, id: str, op: str, fields: dict[str, Any], body: Any
) -> AsyncGenerator[str, None]:
    decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in ("stdout", "stderr")}
    begun = False
    try:
        async with (
            services.use(caller, id) as sandbox,
            sandbox._link.stream(op, fields, body=body, timeout=None) as found,
        ):
            if op == "attach":
                await sandbox._link.call("process", pid=fields["pid"])
                begun = True
                yield event("start", {"pid": fields["pid"]})
            async for kind, data in found:
                if kind in decoders:
                    text = decoders[kind].decode(data)
                    if text:
                        yield event(kind, {"text": text})
                elif kind == "json" and "started" in data and not begun:
                    begun = True
                    yield event("start", {"pid": data["started"]})
            final = found.result
            for kind, decoder in decoders.items():
                if text := decoder.decode(b"", True):
                    yield event(kind, {"text": text})
            told = {name: final.get(name) for name in ("exit_code", "duration_ms", "truncated", "dropped")}
            yield event("exit", {**told, "error_class": error_class(final)})
    except Exception as error:
        if not begun:
            raise
        yield event("error", (error if isinstance(error, SandkeepError) else unexpected(error)).as_dict())


def event(name: str, data: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"
