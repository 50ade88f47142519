"""A checkpoint as the sandbox needs it: its base, session, what ran, what is attached."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sandkeep.checkpoints.capture import load_json
from sandkeep.checkpoints.catalog import Store
from sandkeep.errors import CheckpointNotFound, Corrupt
from sandkeep.model import CheckpointInfo


@dataclass(frozen=True)
class Saved:
    info: CheckpointInfo
    base: dict[str, Any]
    session: dict[str, Any]  # env, cwd, shell, user, workflow, history, numbers of processes
    processes: list[dict[str, Any]] = field(default_factory=list)
    image: dict[str, Any] | None = None  # facts of the memory image; None without one

    @property
    def id(self) -> str:
        return self.info.id


def load_saved(store: Store, checkpoint: str) -> Saved:
    record = store.record(checkpoint)
    loose = load_json(store.repo, record.volatile)
    beside = {"history": loose.get("history", []), "numbers": loose.get("numbers")}
    session = {**load_json(store.repo, record.session), **beside}
    return Saved(record.info(), record.base, session, loose.get("processes", []), loose.get("image"))


def follows(store: Store, parent: str | None, scope: str, exclude: list[str] | None) -> bool:
    """Whether a checkpoint with this scope can be saved as a difference to its parent."""
    if parent is None:
        return False
    try:
        record = store.record(parent)
    except (CheckpointNotFound, Corrupt):
        return False
    return (record.scope, record.exclude) == (scope, exclude)
