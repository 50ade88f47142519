"""The session's environment and history, as the API shows them."""

from __future__ import annotations

from sandkeep.model import HistoryEntry
from sandkeep.runtime.link import AsyncLink
from sandkeep.sandbox._async.bridge import EnvItems
from sandkeep.sandbox.lifecycle import check_variables


class AsyncEnv(EnvItems):
    def __init__(self, link: AsyncLink) -> None:
        self._link = link

    async def all(self) -> dict[str, str]:
        env: dict[str, str] = (await self._link.call("env_get"))["env"]
        return env

    async def get(self, name: str, default: str | None = None) -> str | None:
        return (await self.all()).get(name, default)

    async def set(self, name: str, value: str) -> None:
        await self._link.call("env_set", env=check_variables("env", {name: value}))

    async def unset(self, name: str) -> None:
        await self._link.call("env_unset", names=[name])


class AsyncHistory:
    def __init__(self, link: AsyncLink) -> None:
        self._link = link

    async def list(self) -> list[HistoryEntry]:
        entries = (await self._link.call("history_list"))["history"]
        return [HistoryEntry(one["index"], one["command"], one["timestamp"]) for one in entries]

    async def clear(self) -> None:
        await self._link.call("history_clear")
