"""Sleep and wake: a sandbox's memory and files at one instant into a store, its processes freed, and back.

With runsc the memory is part of it: everything stands still, files and memory are taken, the checkpoint is published, the
record says PAUSED, and only then is anything freed. Whatever dies before the record says so leads back to RUNNING. With
runc and crun the processes are recorded and ended; resuming starts the background ones again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sandkeep.checkpoints.catalog import Store
from sandkeep.checkpoints.records import check_words
from sandkeep.errors import CheckpointNotFound, SandkeepError, system
from sandkeep.model import CheckpointInfo, RestoreReport, State
from sandkeep.sandbox import journal, keeping, ladder, lifecycle, memory, relaunching, saving
from sandkeep.sandbox.home import Home, boot
from sandkeep.sandbox.journal import step
from sandkeep.sandbox.machine import Machine, fresh_seed
from sandkeep.sandbox.record import Record
from sandkeep.sandbox.restoring import awake, guests_part, settle
from sandkeep.sandbox.saved import Saved, keep_saved, kept_saved, load_saved
from sandkeep.sandbox.saving import Taken


def pause(
    machine: Machine, *, comment: str | None = None, tag: str | None = None, with_memory: bool | None = None
) -> CheckpointInfo:
    """Asleep in the store. Unless told, memory is saved too where it can be."""
    with machine.held() as record:
        machine.require_running(record)
        store, engine = keeping.store_of(machine, record), machine.driver(record)
        check_words(tag, comment, None, {"name": "", "fingerprint": ""})
        if with_memory:
            memory.needed(record, engine)
        names = sorted(machine.secrets())
        why = memory.possible(record, engine)
        if with_memory is False or why:
            journal.begin(machine.folder, "nap", layer=(layer := machine.home.layers.new_id()))
            step("pause: journalled")
            with saving.standing(machine, record, engine, layer) as taken:
                info = keeping.keep(machine, record, taken, store, comment=comment, tag=tag)
                fall_asleep(machine, record, info, taken, names, None)
            if with_memory is None:
                info = replace(info, notes=_not_kept(why, relaunching.alive(taken.processes)))
        else:
            journal.begin(machine.folder, "pause", layer=(layer := machine.home.layers.new_id()))
            step("pause: journalled")
            with memory.asleep(machine, record, engine) as facts:
                taken, more = memory.take(machine, record, facts, layer)
                info = keeping.keep(machine, record, taken, store, comment=comment, tag=tag, **more)
                fall_asleep(machine, record, info, taken, names, more["volatile"]["image"])
        journal.done(machine.folder)
        return info


def _not_kept(why: str, processes: list[dict[str, Any]]) -> list[str]:
    """Whose memory is gone without anybody having said that it may."""
    if not processes:
        return []
    ended = ", ".join(process["code"] for process in processes)
    return [f"memory was not kept: {why}; ended, and started again on resume if they ran in the background: {ended}"]


def fall_asleep(
    machine: Machine,
    record: Record,
    info: CheckpointInfo,
    taken: Taken,
    secrets: list[str],
    image: dict[str, Any] | None,
) -> None:
    """From here on it is paused; then what it used is freed."""
    sleeper = Saved(info, keeping.base_facts(record, machine.base(record)), taken.session, taken.processes, image)
    keep_saved(machine.folder, sleeper)
    marks = memory.marks(machine) if image else None
    record.state = State.PAUSED
    record.paused = {"checkpoint": info.id, "boot": boot(), "secrets": secrets, "image": marks}
    record.stack, record.copied = list(taken.stack), []
    record.save(machine.folder)
    step("pause: recorded")
    finish_pause(machine, record)


def finish_pause(machine: Machine, record: Record) -> None:
    machine.stop(record)
    step("pause: stopped")
    settle(machine, record, record.stack, record.top + 1)
    machine.make_top(record.top)
    machine.drop_tops(but=record.top)


def checkpoint(machine: Machine, **words: Any) -> CheckpointInfo:
    """Everything, memory too, and go on running."""
    with machine.held() as record:
        machine.require_running(record)
        store, engine = keeping.store_of(machine, record), machine.driver(record)
        memory.needed(record, engine)
        journal.begin(machine.folder, "pause", layer=(layer := machine.home.layers.new_id()))
        with memory.asleep(machine, record, engine) as facts:
            taken, more = memory.take(machine, record, facts, layer)
        journal.done(machine.folder)
        try:
            return keeping.keep(machine, record, taken, store, **more, **words)
        finally:
            memory.drop(machine)


def connect(home: Home, id: str, secrets: dict[str, str] | None) -> tuple[Machine, RestoreReport | None]:
    """A living sandbox; a paused one is resumed, what a crash left is finished first."""
    machine = Machine(home, id)
    machine.given = given = lifecycle.check_variables("secrets", secrets)
    with machine.held() as record:
        report = _resume(machine, record, given, "files") if record.state is State.PAUSED else None
        if report is None:
            machine.require_running(record)
            if given:
                machine.link.call("secrets_set", secrets=given)
    return machine, report


def resume(machine: Machine, secrets: dict[str, str] | None, require: str) -> RestoreReport:
    given = machine.given if secrets is None else lifecycle.check_variables("secrets", secrets)
    ladder.check_level(require)
    with machine.held() as record:
        if record.state is not State.PAUSED:
            machine.require_running(record)
            return RestoreReport("memory", why="it was not paused")
        machine.given = given
        return _resume(machine, record, given, require)


def _resume(machine: Machine, record: Record, secrets: dict[str, str], require: str) -> RestoreReport:
    assert record.paused is not None
    store = keeping.store_of(machine, record)
    saved, forgotten = _slept_in(machine, record, store)
    ladder.check(saved, require)
    why = memory.problem(machine, record, saved)
    if forgotten and not why and record.paused.get("image") != memory.marks(machine):
        why = f"its memory was in checkpoint {saved.id}, which is forgotten"
    memory.refuse(why, require)
    if record.paused.get("boot") != boot() or not machine.home.layers.here(record.stack):
        _from_the_store(machine, record, store, saved.id)
    if not why and (record.paused.get("boot") != boot() or record.paused.get("image") != memory.marks(machine)):
        memory.fetch(machine, store, saved.id)
    journal.begin(machine.folder, "resume")
    step("resume: journalled")
    settle(machine, record, record.stack, record.top + 1)
    report = RestoreReport("memory")
    try:
        if not why:
            why = memory.try_start(machine, record, saved.image or {}, secrets, require)
        if why:
            report = _from_files(machine, record, saved, secrets, why, require)
        report = without_secrets(report, record.paused.get("secrets", []), secrets)
        step("resume: started")
    except (SandkeepError, OSError):
        machine.stop(record)
        journal.done(machine.folder)
        raise
    awake(machine, record)
    step("resume: recorded")
    journal.done(machine.folder)
    memory.drop(machine)
    machine.drop_tops(but=record.top)
    return report


def _slept_in(machine: Machine, record: Record, store: Store) -> tuple[Saved, bool]:
    """The checkpoint it sleeps in, and whether that is forgotten: what is here then wakes without it."""
    assert record.paused is not None
    try:
        return load_saved(store, record.paused["checkpoint"]), False
    except CheckpointNotFound:
        saved = kept_saved(machine.folder)
        whole = record.paused.get("boot") == boot() and machine.home.layers.here(record.stack)
        if saved is None or saved.id != record.paused["checkpoint"] or not whole:
            raise
        return saved, True


def _from_the_store(machine: Machine, record: Record, store: Store, checkpoint: str) -> None:
    """Layers are not synced: what was here before the host's last start may be anything."""
    record.stack = record.parent_stack = keeping.fetched(machine, store, checkpoint)
    record.parent = checkpoint
    record.save(machine.folder)


def without_secrets(report: RestoreReport, had: list[str], given: dict[str, str]) -> RestoreReport:
    """Secrets are never saved: those that nobody gave again are lost, and said to be."""
    lost = [f"secret {name}" for name in had if name not in given]
    if not lost:
        return report
    why = "; ".join(filter(None, [report.why, "secrets are never saved: give them to resume(secrets=…) or connect"]))
    return replace(report, lost=[*report.lost, *lost], why=why)


def _from_files(
    machine: Machine, record: Record, saved: Saved, secrets: dict[str, str], why: str, require: str
) -> RestoreReport:
    machine.start(record, guests_part(dict(saved.session)), secrets)
    machine.link.call("reseed", seed=fresh_seed())
    report = ladder.report(machine, saved, relaunch=True, notes=[why])
    ladder.enforce(report, require)
    return report


def fork(machine: Machine, count: int, secrets: dict[str, str] | None) -> list[Machine | SandkeepError]:
    """Live copies: processes and memory too."""
    lifecycle.check_count(count)
    rebound = lifecycle.check_variables("secrets", secrets)
    with machine.held() as record:
        machine.require_running(record)
        engine = machine.driver(record)
        memory.needed(record, engine)
        held = machine.secrets() if secrets is None else rebound
        journal.begin(machine.folder, "pause", layer=(layer := machine.home.layers.new_id()))
        with memory.asleep(machine, record, engine) as facts:
            taken, more = memory.take(machine, record, facts, layer)
        journal.done(machine.folder)
        about = more["volatile"]["image"]
        try:
            return [_live_copy(machine, record, taken, about, held) for _ in range(count)]
        finally:
            memory.drop(machine)


def _live_copy(
    machine: Machine, record: Record, taken: Taken, about: dict[str, Any], secrets: dict[str, str]
) -> Machine | SandkeepError:
    child = lifecycle.child_of(machine.home, record, taken.stack)

    def start(twin: Machine) -> None:
        memory.start(twin, child, about, memory.folder(machine), secrets)

    try:
        with system():
            return lifecycle.begin(machine.home, child, {"workflow": taken.session["workflow"]}, secrets, start=start)
    except SandkeepError as error:
        return error
