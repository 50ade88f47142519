"""Real terminals inside."""

from __future__ import annotations

from collections.abc import AsyncIterator

from sandkeep.runtime.link import AsyncLink
from sandkeep.sandbox._async.commands import AsyncProcess


class AsyncTerminal(AsyncProcess):
    async def send(self, data: bytes | str) -> None:
        await self.send_stdin(data)

    async def resize(self, cols: int, rows: int) -> None:
        await self._link.call("resize", pid=self.pid, cols=cols, rows=rows)

    async def screen(self) -> AsyncIterator[bytes]:
        """The bytes of the terminal, from the start of what is kept."""
        async for _, data in self.output():
            yield data


class AsyncPty:
    def __init__(self, link: AsyncLink) -> None:
        self._link = link

    async def start(
        self,
        command: str | None = None,
        *,
        cols: int = 80,
        rows: int = 24,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
    ) -> AsyncTerminal:
        """A terminal with a login shell in it, or with `command`."""
        options = {"code": command, "cwd": cwd, "env": env, "user": user}
        answer = await self._link.call(
            "start", pty=True, cols=cols, rows=rows, **{k: v for k, v in options.items() if v is not None}
        )
        return AsyncTerminal(self._link, answer["pid"])

    async def connect(self, pid: int) -> AsyncTerminal:
        await self._link.call("process", pid=pid)
        return AsyncTerminal(self._link, pid)
