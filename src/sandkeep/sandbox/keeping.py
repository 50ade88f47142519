"""Checkpoints of a sandbox: its layers into a store, and back.

Local layers are a cache of the store: `known/<store>/<checkpoint>.json` says which stack shows what a checkpoint holds, so
a checkpoint reads only the layers above its parent's, and a restore of what is here unpacks nothing. Whatever of that is
absent, stale or wrong costs time and nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from sandkeep.checkpoints.base import Base as Below
from sandkeep.checkpoints.capture import Source
from sandkeep.checkpoints.catalog import Store
from sandkeep.checkpoints.filters import Filter
from sandkeep.checkpoints.lost import note_parent
from sandkeep.checkpoints.merge import Progress
from sandkeep.checkpoints.records import check_words
from sandkeep.checkpoints.remote import capture_here, unpack_here
from sandkeep.errors import BadArgument, CheckpointNotFound
from sandkeep.model import CheckpointInfo, RestoreReport
from sandkeep.runtime.base import Base, resolve
from sandkeep.runtime.elevate import elevated
from sandkeep.sandbox import journal, ladder, memory
from sandkeep.sandbox.home import Home, boot, read_known, write_json
from sandkeep.sandbox.journal import step
from sandkeep.sandbox.machine import Machine
from sandkeep.sandbox.record import Record
from sandkeep.sandbox.restoring import become
from sandkeep.sandbox.saved import follows, load_saved
from sandkeep.sandbox.saving import Taken, take

Level = Literal["memory", "relaunched", "files"]
StoreLike = Store | str | Path | None

IN_HASH = ("env", "cwd", "shell", "user", "workflow")


def as_store(home: Home, store: StoreLike) -> Store:
    if isinstance(store, Store):
        return store
    if store is not None and not isinstance(store, (str, Path)):
        raise BadArgument(f"{store!r} is not a store", "give a Store, a folder, or s3://bucket/prefix")
    return Store(store, home=home.path)


def choose_store(machine: Machine, store: StoreLike) -> None:
    """The store that this sandbox's checkpoints go to; its address is remembered, its keys never."""
    if store is None:
        return
    machine.store = as_store(machine.home, store)
    with machine.held() as record:
        if record.parent is not None and (record.store, record.store_options) != address(machine.store):
            note_parent(machine.store.repo, record.parent)
        record.store, record.store_options = address(machine.store)
        record.save(machine.folder)


def address(store: Store) -> tuple[str, dict[str, Any]]:
    """Where a store is, without its keys."""
    return store.spec.url, {name: value for name, value in store.spec.options.items() if name in ("region", "endpoint")}


def store_of(machine: Machine, record: Record) -> Store:
    if machine.store is None:
        machine.store = Store(record.store, home=machine.home.path, **record.store_options)
    return machine.store


def checkpoint(
    machine: Machine,
    *,
    comment: str | None = None,
    tag: str | None = None,
    metadata: dict[str, Any] | None = None,
    scope: Literal["all", "workspace"] = "all",
    exclude: list[str] | None = None,
    memory: bool = False,
    unless_same: bool = False,
    progress: Progress | None = None,
) -> CheckpointInfo:
    """With `unless_same` a state that equals the sandbox's last checkpoint is not saved again: that one is the answer."""
    check_words(tag, comment, metadata, {"name": "", "fingerprint": ""})
    if memory:
        from sandkeep.sandbox import pausing

        return pausing.checkpoint(machine, comment=comment, tag=tag, metadata=metadata, progress=progress)
    with machine.held() as record:
        machine.require_running(record)
        store = store_of(machine, record)
        Filter(scope, exclude)
        taken = take(machine, record)
        return keep(
            machine,
            record,
            taken,
            store,
            comment=comment,
            tag=tag,
            metadata=metadata,
            scope=scope,
            exclude=exclude,
            unless=record.parent if unless_same else None,
            progress=progress,
        )


def keep(
    machine: Machine,
    record: Record,
    taken: Taken,
    store: Store,
    *,
    attachments: dict[str, Path] | None = None,
    volatile: dict[str, Any] | None = None,
    remembered: bool = True,
    progress: Progress | None = None,
    **words: Any,
) -> CheckpointInfo:
    """Save a taken state to the store. Only layers above the parent's are read.

    Unless `remembered`, the sandbox's lineage and the layers known here stay as they are.
    """
    base = machine.base(record)
    below = len(record.parent_stack)
    on_parent = record.parent is not None and taken.stack[len(taken.stack) - below :] == record.parent_stack
    on_parent = (
        on_parent
        and below <= len(taken.stack)
        and follows(store, record.parent, words.get("scope", "all"), words.get("exclude"))
    )
    trees = [machine.home.layers.tree(layer) for layer in reversed(taken.stack)]
    whole = Source(trees, base=below_of(base))
    source = replace(whole, trees=trees[below:], parent=record.parent, below=trees[:below]) if on_parent else whole
    step("checkpoint: taken")

    def save(source: Source) -> CheckpointInfo:
        return elevated(partial(capture_here, store.spec, source, **facts), inherit=True, progress=progress)

    facts: dict[str, Any] = {
        "base": base_facts(record, base),
        "session": {name: taken.session[name] for name in IN_HASH if name in taken.session},
        "volatile": {
            "history": taken.session.get("history", []),
            "numbers": taken.session.get("numbers"),
            "processes": taken.processes,
            "runtime": record.runtime,
            **(volatile or {}),
        },
        "parent_id": record.parent,
        "attachments": attachments or {},
        **words,
    }
    try:
        info = save(source)
    except CheckpointNotFound:
        if source.parent is None:
            raise
        info = save(whole)  # another home has just forgotten the parent
    step("checkpoint: published")
    if not remembered:
        return info
    if words.get("scope", "all") == "all" and not words.get("exclude"):
        remember(machine.home, store, info.id, taken.stack)
    record.parent, record.parent_stack = info.id, taken.stack
    record.save(machine.folder)
    return info


def below_of(base: Base) -> Below:
    return Below(base.roots())


def base_facts(record: Record, base: Base) -> dict[str, Any]:
    return {"name": record.base, "fingerprint": base.fingerprint}


def remember(home: Home, store: Store, checkpoint: str, stack: list[str]) -> None:
    folder = home.path / "known" / store.repo.id
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{checkpoint}.json", {"stack": stack, "boot": boot()})


def recall(home: Home, store: Store, checkpoint: str) -> list[str] | None:
    """The stack that shows this checkpoint, if all of it is here, and was made in this life of the host: layers are not synced."""
    path = home.path / "known" / store.repo.id / f"{checkpoint}.json"
    known = read_known(path)
    if known is None or known.get("boot") != boot() or not home.layers.here(known["stack"]):
        return None
    os.utime(path)
    return list(known["stack"])


def fetch(
    home: Home,
    store: Store,
    checkpoint: str,
    layer: str,
    use: Callable[[list[str]], None],
    progress: Progress | None = None,
    *,
    remembered: bool = True,
    alone: bool = False,
) -> list[str]:
    """A stack that shows the checkpoint, made of what is here and at most the one new `layer`; with `alone` of that only.

    `use` is told which layers are used from now on, before anybody can discard them, and notes it on disk.
    """

    def found(known: str, *above: str) -> list[str] | None:
        with home.layers_lock():
            stack = recall(home, store, known)
            if stack is not None:
                use([*above, *stack])
            return stack

    stack = None if alone else found(checkpoint)
    if stack is not None:
        return stack
    since, below = None, list[str]()
    for ancestor in [] if alone else store.lineage(checkpoint)[1:]:
        if ancestor.state == "kept" and (stack := found(ancestor.id, layer)) is not None:
            since, below = ancestor.id, stack
            break
    tree = home.layers.begin(layer)
    try:
        base = below_of(resolve(str(store.record(checkpoint).base["name"]), home.path))
        unpacked = elevated(
            partial(unpack_here, store.spec, checkpoint, tree, since=since, base=base),
            inherit=True,
            progress=progress,
        )
    except BaseException:
        home.layers.discard(layer)
        raise
    stack = [layer, *(below if unpacked.on else [])]
    use(stack)
    if remembered:
        remember(home, store, checkpoint, stack)
    return stack


def fetched(
    machine: Machine, store: Store, checkpoint: str, progress: Progress | None = None, *, remembered: bool = True
) -> list[str]:
    """The same for a sandbox that stands on something else: what it will stand on is in its journal meanwhile."""

    def use(stack: list[str]) -> None:
        journal.begin(machine.folder, "fetch", layer=layer, stack=stack)

    use([layer := machine.home.layers.new_id()])
    return fetch(machine.home, store, checkpoint, layer, use, progress, remembered=remembered)


def restore(
    machine: Machine, id: str, require: Level = "files", *, relaunch: bool = False, progress: Progress | None = None
) -> RestoreReport:
    """Be what a checkpoint says, in place."""
    with machine.held() as record:
        store = store_of(machine, record)
        return restore_from(machine, record, store, store.resolve(id), require, relaunch=relaunch, progress=progress)


def restore_from(
    machine: Machine,
    record: Record,
    store: Store,
    id: str,
    require: Level = "files",
    *,
    relaunch: bool = False,
    remembered: bool = True,
    progress: Progress | None = None,
) -> RestoreReport:
    saved = load_saved(store, id)
    if saved.base["name"] != record.base:
        raise BadArgument(
            f"the state stands on base {saved.base['name']!r}, this sandbox on {record.base!r}",
            "create a sandbox from it instead",
        )
    ladder.check(saved, require)
    why = memory.problem(machine, record, saved) if saved.image else ""
    memory.refuse(why, require)
    image = saved.image if not why else None
    stack = fetched(machine, store, saved.id, progress, remembered=remembered)
    if image:
        memory.fetch(machine, store, saved.id)
    step("restore: fetched")
    became = become(machine, record, stack, dict(saved.session), image=image, require=require)
    memory.drop(machine)
    record.parent, record.parent_stack = (saved.id, stack) if remembered else (None, [])
    record.save(machine.folder)
    if image and not became.why:
        return RestoreReport("memory", why=ladder.ended(became.ended))
    relaunch = relaunch or require == "relaunched"
    report = ladder.report(machine, saved, relaunch=relaunch, ended=became.ended, notes=[why or became.why])
    ladder.enforce(report, require)
    return report
