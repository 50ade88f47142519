"""What a turn's end does: save what changed, and say what that was."""

from __future__ import annotations

from sandkeep.checkpoints.catalog import Store
from sandkeep.errors import BadArgument, CheckpointNotFound
from sandkeep.model import CheckpointInfo
from sandkeep.sandbox import keeping
from sandkeep.sandbox.machine import Machine
from sandkeep.sandbox.saved import load_saved

_MOST = 1000


def check(name: str) -> None:
    if not isinstance(name, str) or not name or len(name) > _MOST or "\0" in name:
        raise BadArgument(f"a turn's name is a text of 1 to {_MOST} characters, not {name!r}")


def save(machine: Machine, name: str) -> tuple[CheckpointInfo | None, str]:
    """The checkpoint, or None if the state is that of the last one; and why."""
    before = machine.record().parent
    info = keeping.checkpoint(machine, comment=name, metadata={"turn": name}, unless_same=True)
    if info.id == before:
        return None, f"nothing changed since {before}"
    return info, _changes(keeping.store_of(machine, machine.record()), before, info.id)


def _changes(store: Store, before: str | None, after: str) -> str:
    if before is None:
        return "first save"
    try:
        old, new = store.record(before), store.record(after)
        was, now = load_saved(store, before), load_saved(store, after)
    except CheckpointNotFound:
        return f"changed since {before}, which is gone"
    parts = [name for name in keeping.IN_HASH if was.session.get(name) != now.session.get(name)]
    files = ["files"] if (old.root.data, old.links) != (new.root.data, new.links) else []
    return f"changed since {before}: {', '.join([*files, *parts]) or 'what is attached'}"


def save_failed(machine: Machine, name: str, error: BaseException) -> CheckpointInfo:
    about = {"turn": name, "failed": True, "error": f"{type(error).__name__}: {error}"[:_MOST]}
    return keeping.checkpoint(machine, comment=f"{name} (failed)", metadata=about)
