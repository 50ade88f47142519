"""Take a sandbox's state at one instant as a stack of layers, and snapshots made of that.

Two ways. *Rotate*: only the guest runs, so the top becomes a layer as it is and a new empty top is put in its place.
*Copy*: processes run (or the runtime can't rotate), so everything is frozen and what changed since the last copy is
copied out. A process that holds a file open goes on writing into the top it began with: never rotate under it. Nor when a file in
the top has two names: below a new top a write to one would not show under the other.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sandkeep.checkpoints.records import check_comment
from sandkeep.errors import BadArgument, SnapshotNotFound, Unsupported
from sandkeep.layers import copying, tops
from sandkeep.model import SnapshotInfo
from sandkeep.runtime import overlay
from sandkeep.runtime.driver import Driver
from sandkeep.runtime.elevate import elevated
from sandkeep.runtime.plan import Plan
from sandkeep.sandbox import journal, squashing
from sandkeep.sandbox.home import boot, read_json, write_json, write_whole
from sandkeep.sandbox.journal import step
from sandkeep.sandbox.machine import Machine, move_tree
from sandkeep.sandbox.record import Record
from sandkeep.workflow import BoundState

_ID = re.compile(r"sn_[0-9a-f]{12}")


@dataclass
class Taken:
    """A state at one instant: layers (top first), the session, the processes that ran, and how the layers were had."""

    stack: list[str]
    session: dict[str, Any]
    processes: list[dict[str, Any]]
    how: str
    left_out: list[str] = field(default_factory=list)


def take(machine: Machine, record: Record) -> Taken:
    """The state now. The caller holds the lock; the record is changed and saved."""
    engine = machine.driver(record)
    with machine.link.stream("hold") as hold:
        facts = hold.first_json()
        session = {**facts["session"], "workflow": BoundState(machine.folder / "workflow.json").export()}
        if facts["idle"] and engine.can_rotate and not record.copied:
            untouched, linked = _look(machine.plan(record, record.stack, record.top))
            if untouched:
                return Taken(list(record.stack), session, facts["processes"], "unchanged")
            if not linked:
                rotate(machine, record, engine)
                return Taken(list(record.stack), session, facts["processes"], "rotated")
        changed, left_out = copy(machine, record, engine, facts)
        stack = record.shown()
        return Taken(stack, session, facts["processes"], "copied" if changed else "unchanged", left_out)


def rotate(machine: Machine, record: Record, engine: Driver) -> None:
    layers = machine.home.layers
    layer, old, new = layers.new_id(), record.top, record.top + 1
    journal.begin(machine.folder, "rotate", layer=layer, old=old, new=new, root=machine.root_device(record))
    step("rotate: journalled")
    tree = layers.begin(layer)
    move_tree(machine.top(old) / "tree", tree)
    step("rotate: top renamed")
    stack = [layer, *record.stack]
    squashed = squashing.find(machine.home, stack)
    if squashed:
        stack = squashing.swap(stack, *squashed)
        record.parent_stack = squashing.swap(record.parent_stack, *squashed)
    machine.make_top(new)
    with frozen(machine, engine):
        engine.rotate(machine.plan(record, stack, new))
        step("rotate: mounted")
    record.stack, record.top = stack, new
    record.save(machine.folder)
    step("rotate: recorded")
    journal.done(machine.folder)
    machine.drop_tops(but=new)
    squashing.later(machine.home, record.base, stack)


def copy(machine: Machine, record: Record, engine: Driver, facts: dict[str, Any]) -> tuple[int, list[str]]:
    journal.begin(machine.folder, "copy", layer=(layer := machine.home.layers.new_id()))
    step("copy: journalled")
    with frozen(machine, engine):
        found = copy_frozen(machine, record, facts, layer)
    journal.done(machine.folder)
    return found


@contextlib.contextmanager
def standing(machine: Machine, record: Record, engine: Driver, layer: str) -> Iterator[Taken]:
    """The state now, and nothing moves until the end of the block: what happens after the instant can't be lost."""
    with machine.link.stream("hold") as hold:
        facts = hold.first_json()
        session = {**facts["session"], "workflow": BoundState(machine.folder / "workflow.json").export()}
        with frozen(machine, engine):
            changed, left_out = copy_frozen(machine, record, facts, layer)
            yield Taken(record.shown(), session, facts["processes"], "copied" if changed else "unchanged", left_out)


def copy_frozen(machine: Machine, record: Record, facts: dict[str, Any], layer: str) -> tuple[int, list[str]]:
    """Copy what changed in a top that stands still. `layer` is in the journal already.

    `facts` are the guest's. Pages written through shared mappings change a file's time only when they were clean: syncing makes
    them so. What the guest is still writing under a name of its own is no state.
    """
    layers = machine.home.layers
    tree, cursor = layers.begin(layer), machine.folder / f"cursor-{record.copied[0] if record.copied else 'none'}"
    if facts["shared_maps"]:
        os.sync()
    half_done = [os.fsencode(path.strip("/")) for path in facts.get("asides", [])]
    copied = elevated(_copy_top, machine.plan(record, record.stack, record.top), tree, cursor, half_done)
    step("copy: copied")
    if copied.anew:
        record.copied = []
    if not copied.changed:
        layers.discard(layer)
        return 0, copied.left_out
    write_whole(machine.folder / f"cursor-{layer}", copied.cursor)
    record.copied = [layer, *record.shown()]
    squashed = squashing.find(machine.home, record.copied)
    if squashed:
        record.copied = squashing.swap(record.copied, *squashed)
        record.parent_stack = squashing.swap(record.parent_stack, *squashed)
    record.save(machine.folder)
    step("copy: recorded")
    cursor.unlink(missing_ok=True)
    squashing.later(machine.home, record.base, record.copied)
    return copied.changed, copied.left_out


def _copy_top(plan: Plan, layer: Path, cursor: Path, half_done: list[bytes]) -> copying.Copied:
    begun = [path for path, same in overlay.begun(plan).items() if same]
    return copying.copy_top(plan.upper, layer, cursor, begun, half_done)


@contextlib.contextmanager
def frozen(machine: Machine, engine: Driver) -> Iterator[None]:
    """Nothing in the sandbox moves inside this block."""
    try:
        engine.freeze(machine.id, machine.folder)
        by_guest = False
    except Unsupported:
        machine.link.call("stop_all")
        by_guest = True
    try:
        yield
    finally:
        if by_guest and engine.alive(machine.id, machine.folder):
            machine.link.call("cont_all")
        elif engine.alive(machine.id, machine.folder):
            engine.thaw(machine.id, machine.folder)


def _look(plan: Plan) -> tuple[bool, bool]:
    """Whether the top is untouched, and whether files in it have several names."""
    try:
        return _look_here(plan)
    except PermissionError:
        return elevated(_look_here, plan)


def _look_here(plan: Plan) -> tuple[bool, bool]:
    return overlay.untouched(plan), tops.linked(plan.upper)


def snapshot(machine: Machine, comment: str = "") -> SnapshotInfo:
    if not isinstance(comment, str):
        raise BadArgument(f"a comment is a text, not {comment!r}")
    check_comment(comment)
    with machine.held() as record:
        machine.require_running(record)
        taken = take(machine, record)
        info = SnapshotInfo(f"sn_{secrets.token_hex(6)}", comment, time.time(), taken.stack, taken.how)
        folder = machine.folder / "snapshots"
        folder.mkdir(exist_ok=True)
        facts = {"number": _next_number(folder), "session": taken.session, "processes": taken.processes}
        write_json(folder / f"{info.id}.json", {**asdict(info), **facts})
        return info


def _next_number(folder: Path) -> int:
    """Snapshots are in the order of these, whatever clocks say. The last one is kept beside them, for this life of the host."""
    try:
        last = read_json(folder / ".last")
        number = last["number"] if last["boot"] == boot() else None
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        number = None
    if number is None:
        number = max((read_json(path).get("number", 0) for path in folder.glob("sn_*.json")), default=0)
    write_json(folder / ".last", {"number": number + 1, "boot": boot()}, durable=False)
    return int(number) + 1


def load_snapshot(machine: Machine, id: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = read_json(machine.folder / "snapshots" / f"{_plain(id)}.json")
    except FileNotFoundError:
        raise SnapshotNotFound(
            f"sandbox {machine.id} has no snapshot {id}", "list the sandbox's snapshots to see what there is", id=id
        ) from None
    return found


def snapshots(machine: Machine) -> list[SnapshotInfo]:
    """Oldest first."""
    machine.home.existing(machine.id)
    folder = machine.folder / "snapshots"
    found = [read_json(path) for path in folder.glob("sn_*.json")] if folder.is_dir() else []
    names = SnapshotInfo.__dataclass_fields__
    found.sort(key=lambda data: (data.get("number", 0), data["timestamp"]))
    return [SnapshotInfo(**{k: v for k, v in data.items() if k in names}) for data in found]


def delete_snapshot(machine: Machine, id: str) -> None:
    from sandkeep.sandbox.sweeping import discard_unused

    with machine.held():
        load_snapshot(machine, id)
        (machine.folder / "snapshots" / f"{id}.json").unlink()
    discard_unused(machine.home)


def _plain(id: str) -> str:
    if not isinstance(id, str) or not _ID.fullmatch(id):
        raise SnapshotNotFound(f"{id!r} is not a snapshot's id", "ids look like sn_0123456789ab")
    return id
