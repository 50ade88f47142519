"""After a crash: finish or undo the operation that a dead process left in the journal. The caller holds the lock.

| found | means | done |
|---|---|---|
| state CREATING | died while creating | undone: stopped and removed |
| the mark `killed` | died while killing, or killed while another operation held the lock | finished |
| rotate | old and new world are both whole | the live mount says which; finished or undone |
| copy | a half-made layer | undone, thawed |
| fetch | a half-made layer | undone |
| pause | record says PAUSED: freeing was under way | finished |
| pause | otherwise | undone: thawed and woken |
| resume | not yet recorded as running | undone: stopped, still paused |
| restore | may be between two worlds | finished: started afresh on the target |
"""

from __future__ import annotations

import contextlib
from typing import Any

from sandkeep.errors import SandboxNotFound, SandkeepError, Unsupported
from sandkeep.model import State
from sandkeep.sandbox import journal
from sandkeep.sandbox.killing import killed, remove
from sandkeep.sandbox.machine import Machine, move_tree
from sandkeep.sandbox.record import Record
from sandkeep.sandbox.restoring import awake, settle
from sandkeep.workflow import BoundState


def recover(machine: Machine) -> None:
    from sandkeep.sandbox import memory

    entry = journal.pending(machine.folder)
    if not (machine.folder / "record.json").exists():
        remove(machine)
        raise SandboxNotFound(f"sandbox {machine.id} was never finished; its remains are removed", id=machine.id)
    record = Record.load(machine.folder)
    if record.state is State.CREATING or killed(machine.folder):
        remove(machine)
        raise SandboxNotFound(f"sandbox {machine.id} is gone: what a crash left of it is removed", id=machine.id)
    if entry is not None:
        _FINISH[entry["operation"]](machine, record, entry)
        journal.done(machine.folder)
    if record.state is not State.PAUSED:
        memory.drop(machine)  # with what is in the memory of others nobody waits for gc


def _rotate(machine: Machine, record: Record, entry: dict[str, Any]) -> None:
    tree, layers = machine.top(entry["old"]) / "tree", machine.home.layers
    alive = machine.alive(record)
    moved = not tree.exists() and layers.tree(entry["layer"]).exists()
    if record.top == entry["new"]:
        pass
    elif moved and (not alive or machine.root_device(record) != entry["root"]):
        record.stack, record.top = [entry["layer"], *record.stack], entry["new"]
        record.save(machine.folder)
    else:
        if moved:
            move_tree(layers.tree(entry["layer"]), tree)
        layers.discard(entry["layer"])
    _thaw(machine, record, alive)
    machine.make_top(record.top)
    machine.drop_tops(but=record.top)


def _copy(machine: Machine, record: Record, entry: dict[str, Any]) -> None:
    _thaw(machine, record, machine.alive(record))
    if entry["layer"] not in record.copied:
        machine.home.layers.discard(entry["layer"])


def _pause(machine: Machine, record: Record, entry: dict[str, Any]) -> None:
    from sandkeep.sandbox.memory import wake
    from sandkeep.sandbox.pausing import finish_pause

    if record.state is State.PAUSED:
        finish_pause(machine, record)
        return
    engine = machine.driver(record)
    if engine.memory and machine.alive(record):
        engine.proceed(machine.id, machine.folder)
        wake(machine, engine, {})
        record.notes.append("the process that paused it died: its secrets are gone, give them again")
        record.save(machine.folder)
    if "layer" in entry and entry["layer"] not in record.copied:
        machine.home.layers.discard(entry["layer"])


def _nap(machine: Machine, record: Record, entry: dict[str, Any]) -> None:
    from sandkeep.sandbox.pausing import finish_pause

    if record.state is State.PAUSED:
        finish_pause(machine, record)
    else:
        _copy(machine, record, entry)


def _resume(machine: Machine, record: Record, entry: dict[str, Any]) -> None:
    if record.state is State.PAUSED:
        machine.stop(record)
        machine.make_top(record.top)


def _fetch(machine: Machine, record: Record, entry: dict[str, Any]) -> None:
    """The layer may be whole and known by now; if not, nobody uses it and it goes with the unused."""


def _restore(machine: Machine, record: Record, entry: dict[str, Any]) -> None:
    from sandkeep.sandbox import memory

    session = dict(entry["session"])
    workflow = session.pop("workflow", None) or {}
    secrets, about = machine.secrets(), entry.get("image")
    machine.stop(record)
    settle(machine, record, entry["stack"], entry["new"])
    machine.empty_top(record.top)
    why = memory.try_start(machine, record, about, secrets) if about else ""
    if why or not about:
        machine.start(record, session, secrets)
    if why:
        record.notes.append(f"restored after a crash without its memory: {why}")
    awake(machine, record)
    BoundState(machine.folder / "workflow.json").replace(workflow)
    memory.drop(machine)
    machine.drop_tops(but=record.top)


def _thaw(machine: Machine, record: Record, alive: bool) -> None:
    if not alive:
        return
    try:
        machine.driver(record).thaw(machine.id, machine.folder)
    except Unsupported:
        with contextlib.suppress(SandkeepError):
            machine.link.call("cont_all")


_FINISH = {
    "rotate": _rotate,
    "copy": _copy,
    "fetch": _fetch,
    "nap": _nap,
    "pause": _pause,
    "resume": _resume,
    "restore": _restore,
}
