"""Commands in the shell session, and the processes they are."""

from __future__ import annotations

import codecs
from collections.abc import AsyncIterator, Callable
from typing import Any

from sandkeep.errors import BadArgument, GuestLied, TimedOut
from sandkeep.model import CommandResult, ProcessInfo
from sandkeep.runtime.link import AsyncLink
from sandkeep.sandbox.lifecycle import check_variables

MAX_OUTPUT = 64 << 20
Sink = Callable[[str], object]


class AsyncProcess:
    """A process in the sandbox, running or ended; anybody who knows its pid can hold one."""

    def __init__(self, link: AsyncLink, pid: int) -> None:
        self._link = link
        self.pid = pid

    async def wait(self, timeout: float | None = None) -> CommandResult:
        """Its outcome with all of the output that is still kept."""
        if timeout is not None:
            await self._settled(timeout)
        collected = Collector(None, None)
        async with self._link.stream("attach", {"pid": self.pid}, timeout=None) as events:
            async for kind, data in events:
                collected.take(kind, data)
            return collected.result(events.result)

    async def _settled(self, timeout: float) -> None:
        seconds = checked_seconds(timeout)
        async with self._link.stream("wait", {"pid": self.pid, "timeout": seconds}, timeout=None) as events:
            async for _ in events:
                pass
        if events.result["running"]:
            raise TimedOut(f"process {self.pid} still runs after {timeout:g} s", "wait longer, or kill it")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.pid}>"

    async def output(self) -> AsyncIterator[tuple[str, bytes]]:
        """(stream, bytes) from the start of what is kept until the process ends."""
        async with self._link.stream("attach", {"pid": self.pid}, timeout=None) as events:
            async for kind, data in events:
                if kind in ("stdout", "stderr"):
                    yield kind, data

    async def kill(self, signal: int = 9) -> None:
        """Signal the process and everything that it started."""
        await self._link.call("signal", pid=self.pid, signal=signal, tree=True)

    async def send_stdin(self, data: bytes | str) -> None:
        async with self._link.stream("stdin", {"pid": self.pid}, body=[input_bytes(data)], timeout=None) as events:
            async for _ in events:
                pass

    async def close_stdin(self) -> None:
        await self._link.call("close_stdin", pid=self.pid)

    async def info(self) -> ProcessInfo:
        return process_info(await self._link.call("process", pid=self.pid))


class AsyncCommands:
    def __init__(self, link: AsyncLink) -> None:
        self._link = link

    async def run(
        self,
        command: str,
        *,
        background: bool = False,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        stdin: bytes | str | None = None,
        timeout: float | None = None,
        on_stdout: Sink | None = None,
        on_stderr: Sink | None = None,
        max_output: int = MAX_OUTPUT,
        tag: str | None = None,
    ) -> Any:
        """Run a command line in the shell session: a CommandResult, or with `background` a Process."""
        fields = run_fields(command, cwd=cwd, env=env, user=user, timeout=timeout, max_output=max_output, tag=tag)
        if background:
            if stdin is not None:
                raise BadArgument("a background command takes its input by send_stdin")
            return AsyncProcess(self._link, (await self._link.call("run", **fields, background=True))["pid"])
        body = None if stdin is None else [input_bytes(stdin)]
        collected = Collector(on_stdout, on_stderr, max_output, sure=True)
        async with self._link.stream("run", fields, body=body, timeout=None) as events:
            async for kind, data in events:
                collected.take(kind, data)
            return collected.result(events.result)

    async def list(self) -> list[ProcessInfo]:
        return [process_info(one) for one in (await self._link.call("list"))["processes"]]

    async def connect(self, pid: int) -> AsyncProcess:
        await self._link.call("process", pid=pid)
        return AsyncProcess(self._link, pid)


def input_bytes(data: bytes | str) -> bytes:
    if isinstance(data, str):
        return data.encode()
    if isinstance(data, (bytes, bytearray, memoryview)):
        return bytes(data)
    raise BadArgument(f"input must be bytes or a text, not {type(data).__name__}")


class Collector:
    """Gathers output: bytes whole, text for callbacks decoded across frame borders."""

    def __init__(
        self, on_stdout: Sink | None, on_stderr: Sink | None, most: int = MAX_OUTPUT, *, sure: bool = False
    ) -> None:
        """At most `most` bytes of each stream. `sure`: the guest was told so, and more is a lie."""
        self._most, self._sure, self._cut = most, sure, False
        self._bytes = {"stdout": bytearray(), "stderr": bytearray()}
        self._sinks = {"stdout": on_stdout, "stderr": on_stderr}
        self._decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in self._bytes}

    def take(self, kind: str, data: Any) -> None:
        if kind not in self._bytes:
            return
        room = self._most - len(self._bytes[kind])
        if len(data) > room:
            if self._sure:
                raise GuestLied(f"the guest sent more than {self._most} bytes of {kind}", "kill this sandbox")
            data, self._cut = data[:room], True
        self._bytes[kind] += data
        self._tell(kind, self._decoders[kind].decode(data))

    def _tell(self, kind: str, text: str) -> None:
        sink = self._sinks[kind]
        if sink is not None and text:
            sink(text)

    def result(self, final: dict[str, Any]) -> CommandResult:
        for kind, decoder in self._decoders.items():
            self._tell(kind, decoder.decode(b"", True))
        out, err = bytes(self._bytes["stdout"]), bytes(self._bytes["stderr"])
        return CommandResult(
            out.decode(errors="replace"), err.decode(errors="replace"), final["exit_code"], final["duration_ms"],
            error_class(final), bool(self._cut or final.get("truncated") or final.get("dropped")), out, err,
        )  # fmt: skip


def error_class(final: dict[str, Any]) -> str | None:
    if final.get("timed_out"):
        return "TIMEOUT"
    if final.get("signal") or final["exit_code"] == 137:
        return "KILLED"
    return "NOT_FOUND" if final["exit_code"] == 127 else None


def run_fields(command: str, **options: Any) -> dict[str, Any]:
    if not isinstance(command, str) or "\0" in command:
        raise BadArgument("a command is a text without NUL")
    if options.get("timeout") is not None:
        checked_seconds(options["timeout"])
    if options.get("env") is not None:
        check_variables("env", options["env"])
    return {"code": command, **{name: value for name, value in options.items() if value is not None}}


def checked_seconds(timeout: float) -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise BadArgument(
            f"timeout must be a number of seconds above zero, not {timeout!r}", "leave it out for no limit"
        )
    return timeout


def process_info(one: dict[str, Any]) -> ProcessInfo:
    return ProcessInfo(
        pid=one["pid"], argv=one["argv"], cwd=one["cwd"], running=one["exit_code"] is None, exit_code=one["exit_code"],
        started=one["started"], pty=one["pty"], tag=one["tag"], background=one["background"], ports=one["ports"],
    )  # fmt: skip
