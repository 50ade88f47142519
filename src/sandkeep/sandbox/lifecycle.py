"""Create, fork and list. The record is written before the sandbox exists, so a crash leaks nothing."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from sandkeep.errors import BadArgument, LimitUnsupported, SandboxNotFound, SandkeepError, system
from sandkeep.model import Limits, Mount, RestoreReport, SandboxInfo, State, check_metadata
from sandkeep.runtime.driver import DRIVERS, Driver
from sandkeep.runtime.pick import pick
from sandkeep.sandbox import relaunching
from sandkeep.sandbox.home import Home
from sandkeep.sandbox.journal import step
from sandkeep.sandbox.killing import killed, remove
from sandkeep.sandbox.machine import Machine, fresh_hostname, fresh_machine_id, fresh_seed
from sandkeep.sandbox.record import Record
from sandkeep.sandbox.saving import take
from sandkeep.sandbox.sweeping import sweep_trash
from sandkeep.workflow import BoundState

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
AT_ONCE = 4


def check_variables(what: str, variables: dict[str, str] | None) -> dict[str, str]:
    if variables is not None and not isinstance(variables, dict):
        raise BadArgument(f"{what} must be a dict of texts, not {variables!r}")
    for name, value in (variables or {}).items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise BadArgument(
                f"{what}: {name!r} is not a variable's name", "letters, digits and _, not starting with a digit"
            )
        if not isinstance(value, str) or "\0" in value:
            raise BadArgument(f"{what}: the value of {name} must be a text without NUL")
    return dict(variables or {})


def check_options(limits: Any, network: Any, mounts: Any, cwd: Any) -> None:
    """What needs no look at the host."""
    if network not in ("none", "host"):
        raise BadArgument(f"network must be 'none' or 'host', not {network!r}")
    if limits is not None and not isinstance(limits, Limits):
        raise BadArgument(f"limits must be Limits(…), not {limits!r}", "write limits=Limits(memory='1g')")
    if mounts is not None and not (isinstance(mounts, (list, tuple)) and all(isinstance(m, Mount) for m in mounts)):
        raise BadArgument(f"mounts must be a list of Mount(host, guest), not {mounts!r}")
    if cwd is not None and not (isinstance(cwd, str) and cwd.startswith("/")):
        raise BadArgument(f"cwd must be an absolute path inside the sandbox, not {cwd!r}")


def create(
    home: Home,
    *,
    base: str = "host",
    runtime: str = "auto",
    env: dict[str, str] | None = None,
    secrets: dict[str, str] | None = None,
    limits: Limits | None = None,
    network: Literal["none", "host"] = "none",
    mounts: list[Mount] | None = None,
    cwd: str | None = None,
    metadata: dict[str, Any] | None = None,
) -> Machine:
    check_options(limits, network, mounts, cwd)
    env, secrets = check_variables("env", env), check_variables("secrets", secrets)
    home.ensure()
    engine = pick(runtime, home.path)
    settled, notes = settle_limits(engine, limits)
    record = Record(
        id=home.new_id(), runtime=engine.name, base=str(base), limits=settled, notes=notes, network=network,
        mounts=list(mounts or []), metadata=check_metadata(metadata),
    )  # fmt: skip
    session = {name: value for name, value in (("more_env", env), ("more_cwd", cwd)) if value}
    return begin(home, record, session, secrets)


def settle_limits(engine: Driver, asked: Limits | None) -> tuple[Limits, list[str]]:
    """What was asked, all of it or an error. Without a word from the user: the defaults that hold here, and notes on the rest."""
    if asked is None:
        problems = engine.enforceable(Limits())
        return (
            (Limits(pids=None), [f"not limited here: {problem}" for problem in problems])
            if problems
            else (Limits(), [])
        )
    problems = engine.enforceable(asked)
    if problems:
        raise LimitUnsupported(
            f"this host can't enforce: {'; '.join(problems)}", "leave the limit out, or see `sandkeep doctor`"
        )
    return asked, []


def begin(
    home: Home,
    record: Record,
    session: dict[str, Any],
    secrets: dict[str, str],
    prepare: Callable[[Machine], None] | None = None,
    start: Callable[[Machine], None] | None = None,
) -> Machine:
    """Bring a new record to life, its layers made by `prepare`; if that fails nothing of it stays.

    `start` is another way than a fresh process 1 to make it run.
    """
    home.ensure()
    record.hostname = fresh_hostname(record.id)
    machine = Machine(home, record.id)
    machine.given = secrets
    with machine.new_folder():
        try:
            with home.layers_lock() if record.stack else contextlib.nullcontext():
                record.save(machine.folder, durable=False)  # a sandbox in the making does not outlive the machine
            step("create: recorded")
            if prepare is not None:
                prepare(machine)
            workflow = session.pop("workflow", None)
            if workflow:
                BoundState(machine.folder / "workflow.json").replace(workflow)
            if start is not None:
                start(machine)
            else:
                machine.start(record, session, secrets)
            if record.stack:
                machine.link.call("reseed", seed=fresh_seed(), hostname=record.hostname, machine_id=fresh_machine_id())
            step("create: started")
            record.state = State.RUNNING
            record.save(machine.folder)
            if killed(machine.folder):
                raise SandboxNotFound(f"sandbox {machine.id} was killed while it was made", id=machine.id)
        except BaseException:
            remove(machine)
            sweep_trash(home)
            raise
    return machine


def fork(machine: Machine, count: int, secrets: dict[str, str] | None = None) -> list[Machine | SandkeepError]:
    """New sandboxes from the state now; one entry each, the machine or what stopped it."""
    check_count(count)
    rebound = check_variables("secrets", secrets)
    with machine.held() as record:
        machine.require_running(record)
        held = machine.secrets() if secrets is None else rebound
        taken = take(machine, record)
        records = [child_of(machine.home, record, taken.stack) for _ in range(count)]

        def one(child: Record) -> Machine | SandkeepError:
            try:
                with system():
                    made = begin(machine.home, child, dict(taken.session), held)
            except SandkeepError as error:
                return error
            made.report = without_processes(taken.processes)
            return made

        if count == 1:
            return [one(records[0])]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(one, records))


def without_processes(processes: list[dict[str, Any]]) -> RestoreReport:
    lost = [process["code"] for process in relaunching.alive(processes)]
    return RestoreReport(
        "files", lost=lost, why="a fork without memory=True has files and session, no processes" if lost else ""
    )


def check_count(count: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 1000:
        raise BadArgument(f"count must be between 1 and 1000, not {count!r}")


def child_of(home: Home, parent: Record, stack: list[str]) -> Record:
    return Record(
        id=home.new_id(), runtime=parent.runtime, base=parent.base, stack=list(stack), limits=parent.limits, network=parent.network,
        mounts=list(parent.mounts), metadata=dict(parent.metadata), forked_from=parent.id, store=parent.store,
        store_options=dict(parent.store_options), parent=parent.parent, parent_stack=list(parent.parent_stack),
    )  # fmt: skip


def info(machine: Machine) -> SandboxInfo:
    machine.mend()
    record = machine.record()
    found = _told(machine.folder, record)
    session = _session(machine) if found.state is State.RUNNING else {}
    return replace(found, cwd=session.get("cwd", ""), env=session.get("env", {}))


def _told(folder: Path, record: Record) -> SandboxInfo:
    state = record.state
    if state is State.RUNNING and not DRIVERS[record.runtime].alive(record.id, folder):
        state = State.DEAD
    return SandboxInfo(
        id=record.id, state=state, runtime=record.runtime, base=record.base, created=record.created, layers=len(record.stack),
        cwd="", env={}, limits=record.limits, network=record.network, mounts=record.mounts,
        metadata=record.metadata, forked_from=record.forked_from, checkpoint=record.parent, notes=record.notes,
    )  # fmt: skip


def _session(machine: Machine) -> dict[str, Any]:
    try:
        return machine.link.call("session_get")
    except SandkeepError:
        return {}


def listing(home: Home) -> list[SandboxInfo]:
    """Oldest first, without env and cwd, since no guest is asked. What is being created or was left by a crash is not listed."""
    found = []
    for id in home.ids():
        try:
            folder = home.sandboxes / id
            found.append(_told(folder, Record.load(folder)))
        except (FileNotFoundError, NotADirectoryError):
            continue
    return sorted((one for one in found if one.state is not State.CREATING), key=lambda one: one.created)


def usage(machine: Machine) -> dict[str, Any]:
    """What it uses now, as the host and the guest count it."""
    machine.mend()
    record = machine.record()
    machine.require_running(record)
    return {**machine.link.call("usage"), **machine.driver(record).usage(machine.id, machine.folder)}
