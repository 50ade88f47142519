"""Make a sandbox be what a stack of layers and a session say, in place: same id, fresh top."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sandkeep.errors import FloorNotReached, SandboxDead
from sandkeep.model import RestoreReport, State
from sandkeep.sandbox import journal, ladder, memory, relaunching
from sandkeep.sandbox.journal import step
from sandkeep.sandbox.machine import Machine, fresh_seed, wait_until
from sandkeep.sandbox.record import Record
from sandkeep.sandbox.saved import ASLEEP
from sandkeep.sandbox.saving import load_snapshot
from sandkeep.sandbox.sweeping import sweep_trash
from sandkeep.workflow import BoundState

ENDING_SECONDS = 5.0


def restore_snapshot(machine: Machine, id: str, require: str = "files", *, relaunch: bool = False) -> RestoreReport:
    """Back to a snapshot of this sandbox. Processes are ended; with `relaunch` the recorded background ones start again."""
    with machine.held() as record:
        saved = load_snapshot(machine, id)
        ladder.check_snapshot(saved["processes"], require)
        became = become(machine, record, saved["layers"], saved["session"])
        relaunch = relaunch or require == "relaunched"
        report = relaunching.report(machine, saved["processes"], relaunch=relaunch, ended=became.ended)
        ladder.enforce(report, require)
        return report


@dataclass
class Became:
    ended: list[str]  # the commands that were running and have been ended
    why: str = ""  # why the memory was not brought back


def become(
    machine: Machine,
    record: Record,
    stack: list[str],
    session: dict[str, Any],
    *,
    image: dict[str, Any] | None = None,
    require: str = "files",
) -> Became:
    """Put the sandbox on `stack` with an empty top; with `image` from the memory image in its folder, if that can be."""
    engine = machine.driver(record)
    alive = machine.alive(record) and not _ending(machine, record)
    ended = relaunching.running(machine) if alive else []
    before = replace(record), machine.link.call("session_get") if alive and image else {}
    new = record.top + 1
    with machine.home.layers_lock():  # whoever discards may have looked at the sandbox, not yet at its snapshots
        journal.begin(machine.folder, "restore", stack=stack, session=session, new=new, image=image)
    step("restore: journalled")
    secrets = machine.secrets() if alive else {}
    why = ""
    if alive and engine.can_rotate:
        with machine.link.stream("hold") as held:  # a call that comes meanwhile waits, and finds what was restored
            held.first_json()
            machine.link.call("kill_all")
            machine.make_top(new)
            engine.rotate(machine.plan(record, stack, new))
            step("restore: mounted")
            record.state, record.paused = State.RUNNING, None
            settle(machine, record, stack, new)
            machine.link.call("session_set", **guests_part(session))
    else:
        machine.stop(record)
        step("restore: stopped")
        settle(machine, record, stack, new)
        try:
            why = memory.try_start(machine, record, image, secrets, require) if image else ""
        except FloorNotReached:
            _go_back(machine, record, *before, secrets)
            raise
        if why or not image:
            machine.start(record, guests_part(session), secrets)
        awake(machine, record)
    step("restore: running")
    BoundState(machine.folder / "workflow.json").replace(session.get("workflow") or {})
    machine.link.call("reseed", seed=fresh_seed())
    journal.done(machine.folder)
    machine.drop_tops(but=new)
    sweep_trash(machine.home)
    return Became([process["code"] for process in ended], why)


def _ending(machine: Machine, record: Record) -> bool:
    """Its connections go a moment before process 1 does."""
    try:
        machine.link.call("hello")
    except SandboxDead:
        return wait_until(lambda: not machine.alive(record), ENDING_SECONDS)
    return False


def _go_back(machine: Machine, record: Record, old: Record, session: dict[str, Any], secrets: dict[str, str]) -> None:
    """Files and session as they were before; the processes are gone."""
    settle(machine, record, old.stack, old.top)
    if old.state is not State.PAUSED:
        parts = ("env", "cwd", "shell", "history", "user")
        machine.start(record, {name: session[name] for name in parts if name in session}, secrets)
    journal.done(machine.folder)
    machine.drop_tops(but=record.top)


def settle(machine: Machine, record: Record, stack: list[str], top: int) -> None:
    record.stack, record.top, record.copied = list(stack), top, []
    record.save(machine.folder)
    for cursor in machine.folder.glob("cursor-*"):
        cursor.unlink()


def awake(machine: Machine, record: Record) -> None:
    """It runs: also one that was paused before."""
    record.state, record.paused = State.RUNNING, None
    record.save(machine.folder)
    (machine.folder / ASLEEP).unlink(missing_ok=True)


def guests_part(session: dict[str, Any]) -> dict[str, Any]:
    """The part of a session that the guest keeps."""
    return {name: value for name, value in session.items() if name != "workflow"}
