"""`process.Process`: what E2B starts are the guest's processes, with its process table, its output rings and its signals.

A process is followed from its first byte by the request that starts it: nothing of its output can be lost.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

from sandkeep.errors import FileError, FileMissing, ProcessNotFound, SandboxDead
from sandkeep.server.e2b.box import Box
from sandkeep.server.e2b.errors import RpcError
from sandkeep.server.e2b.rpc import Message, part

_CHUNK = {"stdout": 32 << 10, "stderr": 32 << 10, "pty": 16 << 10}
_SIGNALS = {"SIGNAL_SIGKILL": 9, "SIGNAL_SIGTERM": 15, 9: 9, 15: 15}
KEEP_ALIVE: Message = {"event": {"keepalive": {}}}


async def start(box: Box, asked: Message, timeout: float | None) -> AsyncGenerator[Message, None]:
    config = part(asked, "process")
    args, cwd = config.get("args") or [], config.get("cwd") or ""
    if not config.get("cmd") or not isinstance(args, list) or not isinstance(cwd, str):
        raise RpcError("invalid_argument", "a process has a cmd, a list of args and a text for its cwd")
    fields: dict[str, Any] = {"argv": [config["cmd"], *args], "cwd": box.path(cwd), "user": box.user, "follow": True}
    for name, value in (("env", config.get("envs")), ("tag", asked.get("tag")), ("timeout", timeout)):
        if value:
            fields[name] = value
    pty = asked.get("pty") is not None
    if pty:
        fields |= {"pty": True, **_size(asked)}
    elif asked.get("stdin") is False:
        fields["stdin"] = False
    async with contextlib.aclosing(_follow(box, "start", fields, pty=pty)) as followed:
        async for message in followed:
            yield message


@contextlib.contextmanager
def _refusing(cwd: str) -> Iterator[None]:
    """In E2B's words, why a process can't be started."""
    try:
        yield
    except FileMissing as error:
        said = f"cwd '{cwd}' does not exist" if error.message.startswith(f"{cwd}: ") else error.message
        raise RpcError("invalid_argument", said) from None
    except FileError as error:
        raise RpcError("invalid_argument", error.message) from None


async def connect(box: Box, asked: Message, _: float | None) -> AsyncGenerator[Message, None]:
    """From now on: what it wrote before is not told again."""
    found = await _find(box, asked)
    at = {name: place["end"] for name, place in found["positions"].items()} if found["running"] else {}
    yield {"event": {"start": {"pid": found["pid"]}}}
    fields = {"pid": found["pid"], "positions": at}
    async with contextlib.aclosing(
        _follow(box, "attach", fields, pty=found["pty"], quiet=not found["running"])
    ) as followed:
        async for message in followed:
            yield message


async def _follow(
    box: Box, op: str, fields: dict[str, Any], *, pty: bool, quiet: bool = False
) -> AsyncGenerator[Message, None]:
    """Output and the end. When the guest hangs up, since the sandbox is being saved or forked, it goes on where it was."""
    at: dict[str, int] = fields.get("positions", {})
    while True:
        try:
            async with box.link.stream(op, fields, timeout=None) as events:
                if op == "start":
                    with _refusing(fields["cwd"]):
                        pid = (await events.first_json())["started"]
                    op, fields = "attach", {"pid": pid}
                    yield {"event": {"start": {"pid": pid}}}
                async for kind, data in events:
                    if kind not in ("stdout", "stderr"):
                        continue
                    name = "pty" if pty else kind
                    at = {**at, kind: at.get(kind, 0) + len(data)}
                    for begin in range(0, 0 if quiet else len(data), _CHUNK[name]):
                        piece = base64.b64encode(data[begin : begin + _CHUNK[name]]).decode()
                        yield {"event": {"data": {name: piece}}}
                final = events.result
            break
        except SandboxDead:
            if op == "start":
                raise
            await box.again()
            fields = {"pid": fields["pid"], "positions": at}
    if final["timed_out"]:
        raise RpcError("deadline_exceeded", "the command was killed at its time-out")
    yield {"event": {"end": _ended(final)}}


def _ended(final: dict[str, Any]) -> Message:
    if final["signal"]:
        said = f"signal: {_SAID.get(final['signal'], final['signal'])}"
        return {"exitCode": -1, "exited": False, "status": said, "error": said}
    code = final["exit_code"]
    told: Message = {"exitCode": code, "exited": True, "status": f"exit status {code}"}
    return {**told, "error": f"exit status {code}"} if code else told


_SAID = {"SIGKILL": "killed", "SIGTERM": "terminated", "SIGINT": "interrupt", "SIGSEGV": "segmentation fault"}


async def _find(box: Box, asked: Message) -> dict[str, Any]:
    chosen = part(asked, "process")
    if chosen.get("pid"):
        return await box.link.call("process", pid=chosen["pid"])
    for one in (await box.link.call("list"))["processes"]:
        if chosen.get("tag") and one["tag"] == chosen["tag"] and one["running"]:
            return dict(one)
    raise ProcessNotFound(f"process with tag {chosen.get('tag')!r} not found")


async def _pid(box: Box, asked: Message) -> int:
    """Whom a request means; a number is checked by the guest."""
    found: int = part(asked, "process").get("pid") or (await _find(box, asked))["pid"]
    return found


async def list_(box: Box, _: Message) -> Message:
    found = (await box.link.call("list"))["processes"]
    return {"processes": [_shown(one) for one in found if one["running"]]}


def _shown(one: dict[str, Any]) -> Message:
    argv = one["argv"]
    config = {"cmd": argv[0], "args": argv[1:], "envs": one["env"], "cwd": one["cwd"]}
    return {"config": config, "pid": one["pid"], **({"tag": one["tag"]} if one["tag"] else {})}


async def send_input(box: Box, asked: Message) -> Message:
    await _send(box, await _pid(box, asked), part(asked, "input"))
    return {}


async def _send(box: Box, pid: int, given: Message) -> None:
    try:
        data = base64.b64decode(given.get("stdin") or given.get("pty") or "", validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise RpcError("invalid_argument", "the input is not base64") from None
    if data:
        await _write(box, pid, data)


async def _write(box: Box, pid: int, data: bytes) -> None:
    async with box.link.stream("stdin", {"pid": pid}, body=[data], timeout=None) as events:
        async for _ in events:
            pass


async def stream_input(box: Box, messages: AsyncIterator[Message]) -> Message:
    pid: int | None = None
    async for message in messages:
        if "start" in message:
            pid = await _pid(box, part(message, "start"))
        elif "data" in message:
            if pid is None:
                raise RpcError("invalid_argument", "input came before the process was named")
            await _send(box, pid, part(part(message, "data"), "input"))
    return {}


async def send_signal(box: Box, asked: Message) -> Message:
    asked_for = asked.get("signal")
    number = _SIGNALS.get(asked_for) if isinstance(asked_for, (str, int)) else None
    if number is None:
        raise RpcError("invalid_argument", f"there is no signal {asked.get('signal')!r}")
    await box.link.call("signal", pid=await _pid(box, asked), signal=number, tree=True)
    return {}


async def close_stdin(box: Box, asked: Message) -> Message:
    await box.link.call("close_stdin", pid=await _pid(box, asked))
    return {}


async def update(box: Box, asked: Message) -> Message:
    if part(asked, "pty"):
        await box.link.call("resize", pid=await _pid(box, asked), **_size(asked))
    return {}


def _size(asked: Message) -> dict[str, Any]:
    size = part(part(asked, "pty"), "size")
    return {"cols": size.get("cols") or 80, "rows": size.get("rows") or 24}


Unary = Callable[[Box, Message], Awaitable[Message]]
UNARY: dict[str, Unary] = {
    "List": list_, "SendInput": send_input, "SendSignal": send_signal, "CloseStdin": close_stdin, "Update": update,
}  # fmt: skip
STREAMS = {"Start": start, "Connect": connect}
CHANGES = frozenset({"Start", "SendInput", "SendSignal", "CloseStdin", "StreamInput"})
