"""A sandbox's memory: taken while everything stands still, and used to start one that goes on where it was.

The guest closes its connections first (a socket of the host can't be saved) and takes new ones when it is told to wake.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from sandkeep.checkpoints.catalog import Store
from sandkeep.checkpoints.remote import unpack_attachment_here
from sandkeep.errors import BadArgument, FloorNotReached, RuntimeFailed, SandboxDead
from sandkeep.layers.pool import remove_later
from sandkeep.runtime import image
from sandkeep.runtime.driver import Driver
from sandkeep.runtime.elevate import elevated
from sandkeep.runtime.link import door
from sandkeep.runtime.plan import Plan
from sandkeep.sandbox import saving
from sandkeep.sandbox.journal import step
from sandkeep.sandbox.machine import READY_SECONDS, Machine, fresh_hostname, fresh_seed
from sandkeep.sandbox.record import Record
from sandkeep.sandbox.saved import Saved
from sandkeep.sandbox.saving import Taken
from sandkeep.workflow import BoundState

NAME = "memory"
_WITHOUT = "save without memory (memory=False): processes are then recorded, and started again on resume"
_DELETED = re.compile(r'dentry\("(.*)"\).*deleted and invalidated dentries')


def possible(record: Record, engine: Driver) -> str:
    """Why the memory of this sandbox can't be saved; empty when it can."""
    if not engine.memory:
        return f"{engine.name} can't save memory"
    return f"{engine.name} can't save memory with network={record.network!r}" if record.network != "none" else ""


def needed(record: Record, engine: Driver) -> None:
    why = possible(record, engine)
    if why:
        raise BadArgument(why, "create the sandbox with runtime runsc and network none")


def folder(machine: Machine) -> Path:
    return machine.folder / "image"


def marks(machine: Machine) -> list[list[Any]]:
    """What tells whether the image here is still the very one that was saved."""
    states = [(path.name, path.stat()) for path in sorted(folder(machine).glob("*"))]
    return [[name, state.st_size, state.st_ino, state.st_ctime_ns] for name, state in states]


def drop(machine: Machine) -> None:
    remove_later(folder(machine), machine.home.trash)


@contextlib.contextmanager
def asleep(machine: Machine, record: Record, engine: Driver) -> Iterator[dict[str, Any]]:
    """The guest has let go of its socket and nothing moves; on leaving it is woken, unless it was stopped."""
    secrets = machine.secrets()
    try:
        facts = _to_sleep(machine)
        step("pause: asleep")
        engine.suspend(machine.id, machine.folder)
        step("pause: suspended")
        yield facts
    finally:
        if machine.alive(record):
            engine.proceed(machine.id, machine.folder)
            wake(machine, engine, secrets)


def _to_sleep(machine: Machine) -> dict[str, Any]:
    """Returns when the guest has no connection open any more."""
    with machine.link.stream("sleep", timeout=READY_SECONDS) as answer:
        for _ in answer:
            pass
        answer.end()
    machine.link.close()
    return answer.result


def wake(machine: Machine, engine: Driver, secrets: dict[str, str]) -> None:
    """Also one that never slept."""
    with contextlib.suppress(*door.ABSENT):  # the next line says why nobody is there
        door.wake(machine.folder)
    machine.link.ready(READY_SECONDS, lambda: engine.alive(machine.id, machine.folder))
    if secrets:
        machine.link.call("secrets_set", secrets=secrets)


def take(machine: Machine, record: Record, facts: dict[str, Any], layer: str) -> tuple[Taken, dict[str, Any]]:
    """Files and memory of a suspended sandbox, and what a checkpoint needs to hold the memory too."""
    engine = machine.driver(record)
    drop(machine)
    changed, left_out = saving.copy_frozen(machine, record, facts, layer)
    step("pause: files taken")
    try:
        engine.checkpoint(machine.id, machine.folder, folder(machine), leave_running=True)
    except RuntimeFailed as error:
        raise RuntimeFailed(f"the memory can't be saved: {_plainly(error.message)}", _WITHOUT) from error
    step("pause: memory taken")
    session = {**facts["session"], "workflow": BoundState(machine.folder / "workflow.json").export()}
    stack = record.shown()
    taken = Taken(stack, session, facts["processes"], "copied" if changed else "unchanged", left_out)
    about = image.facts(engine, record.hostname, machine.folder)
    return taken, {"attachments": {NAME: folder(machine)}, "volatile": {"image": about}}


def _plainly(said: str) -> str:
    """What runsc says of the one thing that users meet, in words."""
    found = _DELETED.search(said)
    return f"a process holds the deleted file {found[1]} open, which runsc can't save" if found else said


def problem(machine: Machine, record: Record, saved: Saved) -> str:
    """Why this checkpoint's memory can't be used by this sandbox; empty when it can."""
    if saved.image is None:
        return "the checkpoint holds no memory image"
    engine = machine.driver(record)
    if not engine.memory:
        return f"{engine.name} can't restore memory"
    if saved.base["fingerprint"] != machine.base(record).fingerprint:
        return f"base {record.base} is not what it was when the memory was saved"
    return image.difference(engine, saved.image, plan(machine, record, saved.image))


def refuse(why: str, require: str) -> None:
    if require == "memory" and why:
        raise FloorNotReached(f"the memory can't be brought back: {why}", "require less, or go where the image fits")


def fetch(machine: Machine, store: Store, checkpoint: str) -> None:
    """The image from the store, whole or not there."""
    drop(machine)
    elevated(unpack_attachment_here, store.spec, checkpoint, NAME, folder(machine), inherit=True)


def plan(machine: Machine, record: Record, about: dict[str, Any]) -> Plan:
    """What the image was taken of: its host name, and process 1 as it was started then."""
    env = dict(one.split("=", 1) for one in about["env"])
    found = machine.plan(record, record.stack, record.top)
    return replace(found, hostname=about["hostname"], argv=list(about["args"]), env=env)


def start(machine: Machine, record: Record, about: dict[str, Any], image: Path, secrets: dict[str, str]) -> None:
    """Run on the record's stack with an empty top, from an image. RuntimeFailed when the runtime won't."""
    engine = machine.driver(record)
    machine.make_top(record.top)
    record.hostname = about["hostname"]
    machine.link.close()
    engine.restore(plan(machine, record, about), image)
    step("resume: restored")
    wake(machine, engine, secrets)


def try_start(
    machine: Machine, record: Record, about: dict[str, Any], secrets: dict[str, str], require: str = "files"
) -> str:
    """Start from the image in the sandbox's own folder: empty, or why that failed, and then nothing runs."""
    try:
        start(machine, record, about, folder(machine), secrets)
        machine.link.call("reseed", seed=fresh_seed())
    except (RuntimeFailed, SandboxDead) as error:
        machine.stop(record)
        machine.empty_top(record.top)
        record.hostname = fresh_hostname(record.id)
        refuse(error.message, require)
        return error.message
    return ""
