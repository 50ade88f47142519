"""Sandboxes that never lose their state."""

from sandkeep.checkpoints import Store, list_checkpoints
from sandkeep.errors import SandkeepError
from sandkeep.model import CheckpointInfo, CommandResult, Limits, Mount, RestoreReport, SandboxInfo, SnapshotInfo, State
from sandkeep.sandbox import AsyncSandbox, Sandbox
from sandkeep.workflow import StateManager

__all__ = [
    "AsyncSandbox",
    "CheckpointInfo",
    "CommandResult",
    "Limits",
    "Mount",
    "RestoreReport",
    "Sandbox",
    "SandboxInfo",
    "SandkeepError",
    "SnapshotInfo",
    "State",
    "StateManager",
    "Store",
    "list_checkpoints",
]
