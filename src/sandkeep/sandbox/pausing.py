"""Sleep and wake: a sandbox's memory and files at one instant into a store, its processes freed, and back.

With runsc the memory is part of it: the guest lets go of its socket, everything is frozen, files and memory are taken, the
checkpoint is published, the record says PAUSED, and only then is anything freed. Whatever dies before the record says so
leads back to RUNNING. With runc and crun the processes are recorded and ended; resuming starts the background ones again.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sandkeep.checkpoints import Store, unpack_attachment_here
from sandkeep.errors import BadArgument, FloorNotReached, RuntimeFailed, SandkeepError
from sandkeep.model import CheckpointInfo, RestoreReport, State
from sandkeep.runtime import image
from sandkeep.runtime.driver import Driver
from sandkeep.runtime.elevate import elevated
from sandkeep.sandbox import journal, keeping, ladder, lifecycle, saving
from sandkeep.sandbox.home import Home
from sandkeep.sandbox.journal import step
from sandkeep.sandbox.machine import READY_SECONDS, Machine, fresh_seed
from sandkeep.sandbox.record import Record
from sandkeep.sandbox.restoring import guests_part, settle
from sandkeep.sandbox.saved import Saved, load_saved
from sandkeep.sandbox.saving import Taken
from sandkeep.workflow import BoundState


def pause(machine: Machine, *, comment: str | None = None, tag: str | None = None) -> CheckpointInfo:
    with machine.held() as record:
        machine.require_running(record)
        store, engine = keeping.store_of(machine, record), machine.driver(record)
        journal.begin(machine.folder, "pause", layer=(layer := machine.home.layers.new_id()))
        step("pause: journalled")
        if engine.memory:
            with asleep(machine, record, engine) as facts:
                taken, attached, volatile = with_memory(machine, record, engine, facts, layer)
                info = keeping.keep(
                    machine, record, taken, store, comment=comment, tag=tag, attachments=attached, volatile=volatile
                )
                fall_asleep(machine, record, info, taken, store)
        else:
            taken = saving.take(machine, record)
            info = keeping.keep(machine, record, taken, store, comment=comment, tag=tag)
            fall_asleep(machine, record, info, taken, store)
        journal.done(machine.folder)
        return info


def fall_asleep(machine: Machine, record: Record, info: CheckpointInfo, taken: Taken, store: Store) -> None:
    """From here on it is paused; then what it used is freed."""
    record.state = State.PAUSED
    record.paused = {"checkpoint": info.id}
    record.stack, record.copies = list(taken.stack), []
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
        needs_memory(engine)
        journal.begin(machine.folder, "pause", layer=(layer := machine.home.layers.new_id()))
        with asleep(machine, record, engine) as facts:
            taken, attached, volatile = with_memory(machine, record, engine, facts, layer)
            info = keeping.keep(machine, record, taken, store, attachments=attached, volatile=volatile, **words)
        shutil.rmtree(machine.folder / "image")
        journal.done(machine.folder)
        return info


def needs_memory(engine: Driver) -> None:
    if not engine.memory:
        raise BadArgument(f"{engine.name} can't save memory", "create the sandbox with runtime='runsc'")


@contextlib.contextmanager
def asleep(machine: Machine, record: Record, engine: Driver) -> Iterator[dict[str, Any]]:
    """The guest has let go of its socket and nothing moves; on leaving it is woken unless it was stopped."""
    secrets = machine.secrets()
    facts = machine.link.call("sleep")
    machine.link.close()
    try:
        engine.freeze(machine.id, machine.folder)
        step("pause: frozen")
        yield facts
    finally:
        if machine.alive(record):
            engine.thaw(machine.id, machine.folder)
            wake(machine, engine, secrets)


def wake(machine: Machine, engine: Driver, secrets: dict[str, str]) -> None:
    (machine.folder / "run" / "wake").touch()
    machine.link.ready(READY_SECONDS, lambda: engine.alive(machine.id, machine.folder))
    if secrets:
        machine.link.call("secrets_set", secrets=secrets)


def with_memory(
    machine: Machine, record: Record, engine: Driver, facts: dict[str, Any], layer: str
) -> tuple[Taken, dict[str, Path], dict[str, Any]]:
    """Files and memory of a sleeping, frozen sandbox."""
    folder = machine.folder / "image"
    if folder.exists():
        shutil.rmtree(folder)
    changed, left_out = saving.copy_frozen(machine, record, sync=facts["shared_maps"], layer=layer)
    step("pause: files taken")
    engine.checkpoint(machine.id, machine.folder, folder, leave_running=True)
    step("pause: memory taken")
    session = {**facts["session"], "workflow": BoundState(machine.folder / "workflow.json").export()}
    taken = Taken(
        [*record.copies, *record.stack], session, facts["processes"], "copied" if changed else "unchanged", left_out
    )
    return taken, {"memory": folder}, {"image": image.facts(engine, record.hostname, machine.folder)}


def connect(home: Home, id: str, secrets: dict[str, str] | None) -> tuple[Machine, RestoreReport | None]:
    """A living sandbox; a paused one is resumed, what a crash left is finished first."""
    machine = Machine(home, id)
    given = lifecycle.check_variables("secrets", secrets)
    with machine.held() as record:
        report = _resume(machine, record, given, "files") if record.state is State.PAUSED else None
        if report is None:
            machine.require_running(record)
            if given:
                machine.link.call("secrets_set", secrets=given)
    return machine, report


def resume(machine: Machine, secrets: dict[str, str] | None, require: str) -> RestoreReport:
    given = lifecycle.check_variables("secrets", secrets)
    with machine.held() as record:
        if record.state is not State.PAUSED:
            machine.require_running(record)
            return RestoreReport("memory", why="it was not paused")
        return _resume(machine, record, given, require)


def _resume(machine: Machine, record: Record, secrets: dict[str, str], require: str) -> RestoreReport:
    assert record.paused is not None
    store, engine = keeping.store_of(machine, record), machine.driver(record)
    saved = load_saved(store, record.paused["checkpoint"])
    ladder.check(saved, require)
    why = image_problem(engine, saved)
    if require == "memory" and why:
        raise FloorNotReached(
            f"the memory can't be brought back: {why}", "require less, or resume where the image fits"
        )
    journal.begin(machine.folder, "resume")
    step("resume: journalled")
    settle(machine, record, record.stack, record.top + 1)
    if not why:
        try:
            folder = local_image(machine, store, record.paused["checkpoint"])
            start_from_image(machine, record, folder, saved, secrets)
            awake(machine, record)
            return RestoreReport("memory")
        except RuntimeFailed as error:
            machine.stop(record)
            why = error.message
            if require == "memory":
                journal.done(machine.folder)
                raise FloorNotReached(f"the memory can't be brought back: {why}", "require less") from error
    machine.start(record, guests_part(dict(saved.session)), secrets)
    step("resume: started")
    report = ladder.report(machine, saved, relaunch=True, notes=[why])
    try:
        ladder.enforce(report, require)
    except SandkeepError:
        machine.stop(record)
        journal.done(machine.folder)
        raise
    awake(machine, record)
    return report


def image_problem(engine: Driver, saved: Saved) -> str:
    """Why this checkpoint's memory can't be used here; empty when it can."""
    if saved.image is None:
        return "the checkpoint holds no memory image"
    if not engine.memory:
        return f"{engine.name} can't restore memory"
    return image.difference(engine, saved.image)


def local_image(machine: Machine, store: Store, checkpoint: str) -> Path:
    folder = machine.folder / "image"
    if not folder.exists():
        elevated(unpack_attachment_here, store.spec, checkpoint, "memory", folder)
    return folder


def start_from_image(machine: Machine, record: Record, folder: Path, saved: Saved, secrets: dict[str, str]) -> None:
    assert saved.image is not None
    engine = machine.driver(record)
    run = machine.folder / "run"
    run.mkdir(exist_ok=True, mode=0o700)
    for name in ("guest.sock", "wake"):
        (run / name).unlink(missing_ok=True)
    machine.make_top(record.top)
    record.hostname = saved.image["hostname"]
    engine.restore(machine.plan(record, record.stack, record.top), folder)
    step("resume: restored")
    wake(machine, engine, secrets)
    machine.link.call("reseed", seed=fresh_seed())


def awake(machine: Machine, record: Record) -> None:
    """From here on it runs; the image that it came from is not needed any more."""
    record.state, record.paused = State.RUNNING, None
    record.save(machine.folder)
    step("resume: recorded")
    journal.done(machine.folder)
    shutil.rmtree(machine.folder / "image", ignore_errors=True)
    machine.drop_tops(but=record.top)


def fork(machine: Machine, count: int, secrets: dict[str, str] | None) -> list[Machine | SandkeepError]:
    """Live copies: processes and memory too."""
    lifecycle.check_count(count)
    rebound = lifecycle.check_variables("secrets", secrets)
    with machine.held() as record:
        machine.require_running(record)
        engine = machine.driver(record)
        needs_memory(engine)
        held = machine.secrets() if secrets is None else rebound
        journal.begin(machine.folder, "pause", layer=(layer := machine.home.layers.new_id()))
        with asleep(machine, record, engine) as facts:
            taken, attached, volatile = with_memory(machine, record, engine, facts, layer)
        made = [_live_copy(machine, record, taken, attached["memory"], volatile, held) for _ in range(count)]
        shutil.rmtree(machine.folder / "image")
        journal.done(machine.folder)
        return made


def _live_copy(
    machine: Machine, record: Record, taken: Taken, folder: Path, volatile: dict[str, Any], secrets: dict[str, str]
) -> Machine | SandkeepError:
    child = lifecycle.child_of(machine.home, record, taken.stack)

    def start(twin: Machine) -> None:
        child.hostname = volatile["image"]["hostname"]
        twin.make_top(child.top)
        (twin.folder / "run").mkdir(mode=0o700)
        twin.driver(child).restore(twin.plan(child, child.stack, child.top), folder)
        wake(twin, twin.driver(child), secrets)
        BoundState(twin.folder / "workflow.json").replace(taken.session["workflow"])

    try:
        return lifecycle.begin(machine.home, child, {}, secrets, start=start)
    except SandkeepError as error:
        return error
