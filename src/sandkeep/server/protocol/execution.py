"""One execution of a sandbox: a process in the guest, its input, and its output until a client has all of it.

It lives on without a client. Then its output waits, at most `output.MOST_WAITING` here and a ring's worth in the guest;
after that the process blocks in its write: nothing is lost and nothing grows. It also lives on through a pause with memory:
`resume` goes on reading where the output was left.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from sandkeep.errors import ProcessNotFound, SandboxDead, SandkeepError
from sandkeep.sandbox import AsyncProcess, AsyncSandbox
from sandkeep.server.problems import unexpected
from sandkeep.server.protocol.output import MOMENT, STREAMS, Output, Piece
from sandkeep.server.services import Services
from sandkeep.sessions import SessionState

TAG = "websocket"
MOST_STDIN = 16 << 20
_ARGUMENT = 100_000
_RETRY = 0.05
_PATIENCE = 60.0


class Execution:
    def __init__(self, services: Services, id: str) -> None:
        self.output = Output()
        self.ended = False
        self.suspended = False
        self.delivered = False
        """The client has been told that it is done."""
        self.failure: str | None = None
        self.touched = time.monotonic()
        self.pid = 0
        self._services = services
        self._id = id
        self._live: asyncio.Task[None] | None = None
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._may_end = asyncio.Event()
        self._may_end.set()
        self._timer: asyncio.TimerHandle | None = None
        self._input: deque[bytes] = deque()
        self._input_size = 0
        self._more_input = asyncio.Event()
        self._file: str | None = None

    @property
    def running(self) -> bool:
        return not self.ended

    async def start(self, language: str, code: str) -> None:
        """Returns when the process is there; raises if it could not be started."""
        self._live = asyncio.create_task(self._run(language, code))
        await asyncio.shield(self._started)

    async def adopt(self, pid: int, read: dict[str, int]) -> None:
        """Follow a process that an earlier server, or another, began; `read` is what its client has."""
        self.pid, self.output.read, self.output.sent = pid, dict(read), dict(read)
        self._started.set_result(None)
        self.resume()

    def resume(self) -> None:
        """Read on, after a pause."""
        self.suspended = False
        self._live = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop following; the process is not touched."""
        if self._live is not None:
            self._live.cancel()
            await asyncio.gather(self._live, return_exceptions=True)
        self._end(None)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """What is to be sent, in order, until the end. A piece counts as sent when the next one is asked for."""
        while True:
            self._news.clear()
            piece = self.output.next()
            if piece is not None:
                yield piece
                self.output.done()
                self._room.set()
            elif self.ended:
                await self._may_end.wait()
                return
            else:
                await self._news.wait()

    # input and signals

    def write(self, data: str) -> bool:
        """Queue input. False if too much of it waits already."""
        body = data.encode("utf-8", "replace")
        if self._input_size + len(body) > MOST_STDIN:
            return False
        self.touched = time.monotonic()
        if body and self.running:
            self._input.append(body)
            self._input_size += len(body)
            self._more_input.set()
        return True

    @contextlib.asynccontextmanager
    async def killing(self) -> AsyncIterator[None]:
        """SIGKILL for the whole tree; the end is told only after the block."""
        self._may_end.clear()
        try:
            async with self._services.use(None, self._id) as sandbox:
                with contextlib.suppress(ProcessNotFound):
                    await sandbox._link.call("signal", pid=self.pid, signal=9, tree=True)
            yield
        finally:
            self._may_end.set()

    # the life of it

    async def _run(self, language: str = "", code: str = "") -> None:
        """Hold the sandbox in use, start the process if it is not there, and follow it; go on over whatever closes the
        connection but not the process."""
        lost_at: float | None = None
        try:
            while True:
                async with self._services.keeper.use(self._id) as session:
                    sandbox = await self._services.hands.handle(session)
                    before = dict(self.output.read)
                    try:
                        if self._started.done():
                            await self._follow(sandbox, "attach", {"pid": self.pid, "positions": self.output.read})
                        else:
                            await self._follow(sandbox, "start", await self._asked(sandbox, language, code))
                        return
                    except SandboxDead:
                        if not self._started.done():
                            raise
                        if lost_at is None or self.output.read != before:
                            lost_at = time.monotonic()
                        if time.monotonic() - lost_at > _PATIENCE:
                            raise
                if not await self._still_runs():
                    return
                await asyncio.sleep(_RETRY)
        except ProcessNotFound:
            self._end("The execution did not survive the restore of its sandbox.")
        except (SandkeepError, OSError) as error:
            if not self._started.done():
                self._started.set_exception(error)
            self._end(error.told() if isinstance(error, SandkeepError) else unexpected(error).told())

    async def _asked(self, sandbox: AsyncSandbox, language: str, code: str) -> dict[str, Any]:
        how = {"cwd": "/", "user": "root", "tag": TAG, "follow": True}
        if language != "python":
            return {"code": code, "session": False, **how}
        if len(code.encode("utf-8", "replace")) > _ARGUMENT:
            self._file = f"/tmp/.code-{secrets.token_hex(8)}"
            await sandbox.files.write(self._file, code)
        return {"argv": ["python3", "-u", *(["-c", code] if self._file is None else [self._file])], **how}

    async def _follow(self, sandbox: AsyncSandbox, op: str, fields: dict[str, Any]) -> None:
        async with sandbox._link.stream(op, fields, timeout=None) as events:
            if op == "start":
                self.pid = (await events.first_json())["started"]
                self._started.set_result(None)
            feeding = asyncio.create_task(self._feed(AsyncProcess(sandbox._link, self.pid)))
            try:
                async for kind, data in events:
                    if kind in STREAMS:
                        self.output.take(kind, data)
                        await self._changed()
            finally:
                feeding.cancel()
                await asyncio.gather(feeding, return_exceptions=True)
        if self._file is not None:
            with contextlib.suppress(SandkeepError):
                await sandbox.files.remove(self._file)
        lost = {stream: count for stream, count in (events.result.get("dropped") or {}).items() if count}
        self._end(f"Output was lost: {lost}" if lost else None)

    async def _feed(self, process: AsyncProcess) -> None:
        """A piece of input leaves the queue when the guest has it; what comes after the end is dropped."""
        while True:
            self._more_input.clear()
            while self._input:
                with contextlib.suppress(ProcessNotFound):
                    await process.send_stdin(self._input[0])
                self._input_size -= len(self._input.popleft())
            await self._more_input.wait()

    async def _changed(self) -> None:
        self.touched = time.monotonic()
        if self.output.gathering and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(MOMENT, self._flush)
        self._news.set()
        while self.output.full:
            self._room.clear()
            await self._room.wait()

    def _flush(self) -> None:
        self._timer = None
        self.output.flush()
        self._news.set()

    async def _still_runs(self) -> bool:
        """After the connection was lost: whether to try again. A sandbox that sleeps keeps the execution for `resume`."""
        while True:
            session = await self._services.db.call(self._services.sessions.get, self._id)
            here = session.host == self._services.keeper.host
            if session.state in (SessionState.PAUSED, SessionState.RESUMING) or not here:
                self.suspended = True
                return False
            if session.state is SessionState.RUNNING:
                return True
            if session.state is not SessionState.PAUSING:
                self._end("The sandbox has ended.")
                return False
            await asyncio.sleep(_RETRY)

    def _end(self, failure: str | None) -> None:
        if not self.ended:
            self.failure = failure
            self.output.end()
            self.ended = True
            self._news.set()
