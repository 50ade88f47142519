"""A checkpoint as the sandbox needs it: its base, session, what ran, what is attached."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sandkeep.checkpoints.capture import load_json
from sandkeep.checkpoints.catalog import Store
from sandkeep.errors import CheckpointNotFound, Corrupt
from sandkeep.model import CheckpointInfo
from sandkeep.sandbox.home import read_json, write_json

ASLEEP = (
    "asleep.json"  # beside the record of a paused sandbox: its state as the checkpoint has it, which may be forgotten
)


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


def keep_saved(folder: Path, saved: Saved) -> None:
    write_json(folder / ASLEEP, asdict(saved))


def kept_saved(folder: Path) -> Saved | None:
    try:
        found = read_json(folder / ASLEEP)
    except FileNotFoundError:
        return None
    return Saved(**{**found, "info": CheckpointInfo(**found["info"])})


def follows(store: Store, parent: str | None, scope: str, exclude: list[str] | None) -> bool:
    """Whether a checkpoint with this scope can be saved as a difference to its parent."""
    if parent is None:
        return False
    try:
        record = store.record(parent)
    except (CheckpointNotFound, Corrupt):
        return False
    return (record.scope, record.exclude) == (scope, exclude)
