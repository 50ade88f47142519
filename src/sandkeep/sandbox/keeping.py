"""Checkpoints of a sandbox: its layers into a store, and back.

Local layers are a cache of the store: `known/<store>/<checkpoint>.json` says which stack shows what a checkpoint holds, so
a checkpoint reads only the layers above its parent's, and a restore of what is here unpacks nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from sandkeep.checkpoints import Source, Store, capture_here, unpack_here
from sandkeep.checkpoints.base import Base as Below
from sandkeep.errors import BadArgument, SandkeepError
from sandkeep.model import CheckpointInfo, RestoreReport
from sandkeep.runtime.base import Base, resolve
from sandkeep.runtime.driver import pick
from sandkeep.runtime.elevate import elevated
from sandkeep.sandbox import journal, ladder, lifecycle
from sandkeep.sandbox.home import Home, read_json, write_json
from sandkeep.sandbox.journal import step
from sandkeep.sandbox.machine import Machine
from sandkeep.sandbox.record import Record
from sandkeep.sandbox.restoring import become
from sandkeep.sandbox.saving import Taken, take

Level = Literal["memory", "relaunched", "files"]
Progress = Callable[[int, int], object]
StoreLike = Store | str | Path | None

IN_HASH = ("env", "cwd", "shell", "user", "workflow")


def as_store(home: Home, store: StoreLike) -> Store:
    return store if isinstance(store, Store) else Store(store, home=home.path)


def choose_store(machine: Machine, store: StoreLike) -> None:
    """The store that this sandbox's checkpoints go to; its address is remembered, its keys never."""
    if store is None:
        return
    machine.store = as_store(machine.home, store)
    with machine.held() as record:
        record.store, record.store_options = machine.store.address
        record.save(machine.folder)


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
    progress: Progress | None = None,
) -> CheckpointInfo:
    if memory:
        from sandkeep.sandbox import pausing

        return pausing.checkpoint(machine, comment=comment, tag=tag, metadata=metadata, progress=progress)
    with machine.held() as record:
        machine.require_running(record)
        store = store_of(machine, record)
        store.check(tag=tag, comment=comment, metadata=metadata, scope=scope, exclude=exclude)
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
    **words: Any,
) -> CheckpointInfo:
    """Save a taken state to the store. Only layers above the parent's are read."""
    base = machine.base(record)
    below = len(record.parent_stack)
    on_parent = record.parent is not None and taken.stack[len(taken.stack) - below :] == record.parent_stack
    on_parent = (
        on_parent
        and below <= len(taken.stack)
        and store.follows(record.parent, words.get("scope", "all"), words.get("exclude"))
    )
    new = taken.stack[: len(taken.stack) - below] if on_parent else taken.stack
    source = Source(
        trees=[machine.home.layers.tree(layer) for layer in reversed(new)],
        parent=record.parent if on_parent else None,
        base=below_of(base),
    )
    step("checkpoint: taken")
    info = elevated(
        capture_here,
        store.spec,
        source,
        base=base_facts(record, base),
        session={name: taken.session[name] for name in IN_HASH if name in taken.session},
        volatile={
            "history": taken.session.get("history", []),
            "processes": taken.processes,
            "runtime": record.runtime,
            **(volatile or {}),
        },
        parent_id=record.parent,
        attachments=attachments or {},
        **words,
    )
    step("checkpoint: published")
    if words.get("scope", "all") == "all" and not words.get("exclude"):
        remember(machine.home, store, info.id, taken.stack)
        record.parent_stack = taken.stack
    record.parent = info.id
    record.save(machine.folder)
    return info


def below_of(base: Base) -> Below:
    return Below({"/": str(base.root), **({"/usr": "/usr"} if base.usr else {})})


def base_facts(record: Record, base: Base) -> dict[str, Any]:
    return {"name": record.base, "fingerprint": base.fingerprint}


def remember(home: Home, store: Store, checkpoint: str, stack: list[str]) -> None:
    folder = home.path / "known" / store.id
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{checkpoint}.json", {"stack": stack})


def recall(home: Home, store: Store, checkpoint: str) -> list[str] | None:
    """The stack that shows this checkpoint, if all of it is here."""
    try:
        stack: list[str] = read_json(home.path / "known" / store.id / f"{checkpoint}.json")["stack"]
    except FileNotFoundError:
        return None
    return stack if home.layers.here(stack) else None


def fetch(home: Home, store: Store, checkpoint: str, layer: str, progress: Progress | None) -> list[str]:
    """A stack that shows the checkpoint, made of what is here and at most the one new `layer`."""
    known = recall(home, store, checkpoint)
    if known is not None:
        return known
    since, below = None, list[str]()
    for ancestor in store.lineage(checkpoint)[1:]:
        found = recall(home, store, ancestor.id)
        if found is not None:
            since, below = ancestor.id, found
            break
    tree = home.layers.begin(layer)
    elevated(unpack_here, store.spec, checkpoint, tree, since=since, progress=progress)
    stack = [layer, *below]
    remember(home, store, checkpoint, stack)
    return stack


def restore(
    machine: Machine, id: str, require: Level = "files", *, relaunch: bool = False, progress: Progress | None = None
) -> RestoreReport:
    """Be what a checkpoint says, in place."""
    with machine.held() as record:
        store = store_of(machine, record)
        info = store.get(id)
        saved = store.details(info.id)
        if saved.base["name"] != record.base:
            raise BadArgument(
                f"checkpoint {info.id} stands on base {saved.base['name']!r}, this sandbox on {record.base!r}",
                "create a sandbox from the checkpoint instead",
            )
        ladder.check(saved, require)
        layer = machine.home.layers.new_id()
        journal.begin(machine.folder, "fetch", layer=layer)
        stack = fetch(machine.home, store, info.id, layer, progress)
        step("restore: fetched")
        ended = become(machine, record, stack, session_of(saved))
        record.parent, record.parent_stack = info.id, stack
        record.save(machine.folder)
        return ladder.report(machine, saved, relaunch=relaunch or require == "relaunched", ended=ended)


def session_of(saved: Any) -> dict[str, Any]:
    return {**saved.session, "history": saved.volatile.get("history", [])}


def create_from(
    home: Home, store_like: StoreLike, id: str, require: Level, *, progress: Progress | None = None, **options: Any
) -> tuple[Machine, RestoreReport]:
    """A fresh sandbox from a checkpoint, here or on another machine than the one that made it."""
    store = as_store(home, store_like)
    info = store.get(id)
    saved = store.details(info.id)
    ladder.check(saved, require)
    base = resolve(saved.base["name"], home.path)
    env, secrets = (
        lifecycle.check_variables("env", options.pop("env")),
        lifecycle.check_variables("secrets", options.pop("secrets")),
    )
    limits, cwd = options.pop("limits") or lifecycle.Limits(), options.pop("cwd")
    engine = pick(options.pop("runtime"))
    lifecycle.refuse_limits(engine, limits)
    address, store_options = store.address
    home.ensure()
    layer = home.layers.new_id()
    record = Record(
        id=home.new_id(), runtime=engine.name, base=saved.base["name"], limits=limits, network=options["network"],
        mounts=list(options["mounts"] or []), metadata=lifecycle.check_metadata(options["metadata"]), stack=[layer],
        store=address, store_options=store_options, parent=info.id,
    )  # fmt: skip
    if base.fingerprint != saved.base["fingerprint"]:
        record.notes.append(f"base {saved.base['name']} differs from the one that the checkpoint was made on")
    session = session_of(saved)
    session["env"] = {**session.get("env", {}), **env}
    if cwd:
        session["cwd"] = cwd

    def prepare(machine: Machine) -> None:
        with home.layers_lock():
            known = recall(home, store, info.id)
            if known is not None:
                record.stack = known
                record.save(machine.folder)
        if known is None:
            record.stack = fetch(home, store, info.id, layer, progress)
            record.save(machine.folder)
        record.parent_stack = list(record.stack)

    machine = lifecycle.begin(home, record, session, secrets, prepare)
    machine.store = store
    try:
        report = ladder.report(machine, saved, relaunch=require != "files", notes=record.notes)
        ladder.enforce(report, require)
    except SandkeepError:
        lifecycle.kill(machine)
        raise
    return machine, report
