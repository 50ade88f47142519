"""The workflow variables of a sandbox on a server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from sandkeep.client._async.server import AsyncServer
from sandkeep.workflow.state import WorkflowState


class AsyncRemoteWorkflow:
    """Nothing is cached: what another program set is seen by the next call."""

    def __init__(self, server: AsyncServer, id: str) -> None:
        self._server = server
        self._path = f"/sandboxes/{id}/workflow"

    async def set_state(self, key: str, value: Any) -> None:
        await self.update({key: value})

    async def get_state(self, key: str, default: Any = None) -> Any:
        return (await self.export()).get(key, default)

    async def update(self, mapping: Mapping[str, Any]) -> None:
        await self._server.ask("PATCH", self._path, {"variables": WorkflowState(mapping).variables()})

    async def delete_state(self, key: str) -> bool:
        return bool((await self._server.ask("DELETE", f"{self._path}/{quote(key, safe='')}"))["deleted"])

    @property
    async def state(self) -> dict[str, Any]:
        return await self.export()

    async def export(self) -> dict[str, Any]:
        variables: dict[str, Any] = (await self._server.ask("GET", self._path))["variables"]
        return variables

    async def replace(self, variables: Mapping[str, Any]) -> None:
        """All variables become these."""
        await self._server.ask("PUT", self._path, {"variables": WorkflowState(variables).variables()})
