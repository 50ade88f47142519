"""A fresh sandbox from a checkpoint, here or on another machine than the one that made it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sandkeep.checkpoints.catalog import Store
from sandkeep.checkpoints.merge import Progress
from sandkeep.errors import RuntimeFailed, SandkeepError
from sandkeep.model import RestoreReport, check_metadata
from sandkeep.runtime.base import resolve
from sandkeep.runtime.driver import Driver
from sandkeep.runtime.pick import pick
from sandkeep.sandbox import killing, ladder, lifecycle, memory
from sandkeep.sandbox.home import Home
from sandkeep.sandbox.keeping import Level, StoreLike, address, as_store, fetch
from sandkeep.sandbox.machine import Machine, fresh_hostname
from sandkeep.sandbox.record import Record
from sandkeep.sandbox.saved import Saved, load_saved


def create_from(
    home: Home,
    store_like: StoreLike,
    id: str,
    require: Level,
    *,
    under: Callable[[], list[str]] | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> tuple[Machine, RestoreReport]:
    """As high on the ladder as can be; below `require` nothing is left of it. `under` says which layers lie below what the checkpoint
    holds, for one that holds a part only; it is asked with the layers' lock held."""
    store = as_store(home, store_like)
    saved = load_saved(store, store.get(id).id)
    ladder.check(saved, require)
    lifecycle.check_options(options["limits"], options["network"], options["mounts"], options["cwd"])
    env = lifecycle.check_variables("env", options["env"])
    secrets = lifecycle.check_variables("secrets", options["secrets"])
    record, why = _record(home, store, saved, require, options)
    layer = home.layers.new_id()
    record.stack = [layer]
    session = {**saved.session, "more_env": env, "more_cwd": options["cwd"]}
    machine = Machine(home, record.id)
    why = why or memory.problem(machine, record, saved)
    memory.refuse(why, require)

    def prepare(_: Machine) -> None:
        def use(stack: list[str]) -> None:
            record.stack = stack
            record.save(machine.folder)

        fetch(home, store, saved.id, layer, use, progress, alone=under is not None)
        if under is not None:
            with home.layers_lock():
                use([*record.stack, *under()])
        record.parent_stack = list(record.stack)
        if not why:
            memory.fetch(machine, store, saved.id)

    def start(_: Machine) -> None:
        nonlocal why
        if not why:
            why = memory.try_start(machine, record, saved.image or {}, secrets, require)
            memory.drop(machine)
            if not why:
                machine.give({name: session[name] for name in ("more_env", "more_cwd")}, {})
                return
        guests = {name: value for name, value in session.items() if name != "workflow"}
        machine.start(record, guests, secrets)

    lifecycle.begin(home, record, session, secrets, prepare, start)
    machine.store = store
    if not why:
        return machine, RestoreReport("memory", why="; ".join(record.notes))
    try:
        notes = [*record.notes, *([why] if saved.image else [])]
        report = ladder.report(machine, saved, relaunch=True, notes=notes)
        ladder.enforce(report, require)
    except SandkeepError:
        killing.kill(machine)
        raise
    return machine, report


def _record(home: Home, store: Store, saved: Saved, require: str, options: dict[str, Any]) -> tuple[Record, str]:
    """What the new sandbox is to be, and why it can't have the checkpoint's memory as far as that is known now."""
    home.ensure()
    base = resolve(saved.base["name"], home.path)
    engine, why = _engine(home, saved, require, options["runtime"])
    limits, notes = lifecycle.settle_limits(engine, options["limits"])
    url, store_options = address(store)
    record = Record(
        id=(new := home.new_id()), hostname=fresh_hostname(new), runtime=engine.name, base=saved.base["name"], limits=limits, network=options["network"],
        mounts=list(options["mounts"] or []), metadata=check_metadata(options["metadata"]),
        store=url, store_options=store_options, parent=saved.id, notes=notes,
    )  # fmt: skip
    if base.fingerprint != saved.base["fingerprint"]:
        record.notes.append(f"base {saved.base['name']} differs from the one that the checkpoint was made on")
    return record, why


def _engine(home: Home, saved: Saved, require: str, runtime: str) -> tuple[Driver, str]:
    """With "auto" the runtime that can use the checkpoint's memory, if it has any; otherwise the one asked for."""
    if runtime != "auto" or saved.image is None:
        return pick(runtime, home.path), ""
    try:
        return pick("runsc", home.path), ""
    except RuntimeFailed as error:
        memory.refuse(error.message, require)
        return pick(runtime, home.path), error.message
