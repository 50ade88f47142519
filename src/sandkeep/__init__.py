"""Sandboxes that never lose their state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sandkeep.lazy import lazily

if TYPE_CHECKING:
    from sandkeep.checkpoints.catalog import Store, list_checkpoints
    from sandkeep.client import Remote
    from sandkeep.errors import SandkeepError
    from sandkeep.model import (
        CheckpointInfo,
        CommandResult,
        Limits,
        Mount,
        RestoreReport,
        SandboxInfo,
        SnapshotInfo,
        State,
    )
    from sandkeep.sandbox import AsyncSandbox, Persistence, Sandbox
    from sandkeep.workflow import StateManager

__all__ = [
    "AsyncSandbox",
    "CheckpointInfo",
    "CommandResult",
    "Limits",
    "Mount",
    "Persistence",
    "RestoreReport",
    "Sandbox",
    "SandboxInfo",
    "SandkeepError",
    "SnapshotInfo",
    "State",
    "StateManager",
    "Store",
    "connect",
    "list_checkpoints",
]

__getattr__ = lazily(
    globals(),
    {
        "checkpoints.catalog": "Store list_checkpoints",
        "errors": "SandkeepError",
        "model": "CheckpointInfo CommandResult Limits Mount RestoreReport SandboxInfo SnapshotInfo State",
        "sandbox": "AsyncSandbox Persistence Sandbox",
        "workflow": "StateManager",
    },
)


def connect(url: str | None = None, *, api_key: str | None = None) -> Remote:
    """A Sandkeep server: its `Sandbox` and `AsyncSandbox` are used as those here. Needs `sandkeep[client]`."""
    from sandkeep.errors import extra

    with extra("client"):
        from sandkeep.client import connect as to_server
    return to_server(url, api_key=api_key)
