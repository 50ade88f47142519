"""A sandbox as a running thing: its folder, its plan for the runtime, its guest. Blocking; knows nothing of snapshots."""

from __future__ import annotations

import contextlib
import os
import secrets as random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sandkeep.checkpoints.catalog import Store
from sandkeep.errors import BadArgument, RuntimeFailed, SandboxDead, SandboxPaused, SandkeepError
from sandkeep.layers.pool import throw_away
from sandkeep.model import RestoreReport, State
from sandkeep.runtime.base import Base, lacks, resolve
from sandkeep.runtime.driver import DRIVERS, Driver, tail
from sandkeep.runtime.elevate import elevated
from sandkeep.runtime.link import Link, guest_argv, guest_code
from sandkeep.runtime.plan import Plan
from sandkeep.sandbox import journal
from sandkeep.sandbox.home import Home, lock
from sandkeep.sandbox.record import Record

READY_SECONDS = 60.0


class Machine:
    """One sandbox of one home. `held()` gives exclusive access to what is on disk."""

    def __init__(self, home: Home, id: str) -> None:
        self.home = home
        self.id = id
        self.folder = home.sandbox(id)
        self.link = Link(self.folder)
        self.store: Store | None = None
        self.given: dict[str, str] = {}  # secrets that this process gave; nowhere but in its memory
        self.report: RestoreReport | None = None  # of a fork: what did not come along

    @contextlib.contextmanager
    def held(self, *, wait: bool = True) -> Iterator[Record]:
        """The record, under the sandbox's lock, after finishing or undoing what a dead process left.

        What is killed meanwhile is removed at the end.
        """
        from sandkeep.sandbox import killing, recovery

        self.home.existing(self.id)
        with lock(self.folder / "lock", wait=wait, what=f"sandbox {self.id}"):
            self.home.existing(self.id)
            recovery.recover(self)
            try:
                yield Record.load(self.home.existing(self.id))
            finally:
                if killing.killed(self.folder):
                    killing.remove(self)

    @contextlib.contextmanager
    def new_folder(self) -> Iterator[None]:
        """Its folder, made and locked. Whoever sweeps up may take it for a remain before it is locked: then it is made again."""
        while True:
            self.folder.mkdir(mode=0o700)
            with contextlib.ExitStack() as held:
                with contextlib.suppress(FileNotFoundError):
                    held.enter_context(lock(self.folder / "lock"))
                if (self.folder / "lock").exists():
                    yield
                    return

    def record(self) -> Record:
        return Record.load(self.home.existing(self.id))

    def driver(self, record: Record) -> Driver:
        return DRIVERS[record.runtime]

    def base(self, record: Record) -> Base:
        return resolve(record.base, self.home.path)

    def top(self, number: int) -> Path:
        return self.folder / "tops" / str(number)

    def plan(self, record: Record, stack: list[str], top: int) -> Plan:
        folder = self.top(top)
        return Plan(
            id=self.id,
            dir=self.folder,
            base=self.base(record),
            layers=self.home.layers.trees(stack),
            upper=folder / "tree",
            work=folder / "work",
            hostname=record.hostname,
            limits=record.limits,
            network=record.network,
            mounts=record.mounts,
            argv=guest_argv(forgetful=self.driver(record).memory),
            env={},
            code=guest_code(self.home.path),
        )

    def make_top(self, number: int) -> None:
        """Its tree is made when it is mounted, like what it covers."""
        (self.top(number) / "work").mkdir(parents=True, exist_ok=True, mode=0o755)

    def empty_top(self, number: int) -> None:
        """What ran on it for a moment may have written to it."""
        if self.top(number).exists():
            throw_away(self.top(number), self.home.trash)
        self.make_top(number)

    def drop_tops(self, but: int) -> None:
        """Throw away every top but one; called once no mount uses them."""
        for entry in (self.folder / "tops").iterdir():
            if entry.name != str(but):
                throw_away(entry, self.home.trash)

    def start(self, record: Record, session: dict[str, Any] | None, secrets: dict[str, str]) -> None:
        """Run process 1 on the record's stack and top and give it its session and secrets."""
        self.make_top(record.top)
        engine, plan = self.driver(record), self.plan(record, record.stack, record.top)
        try:
            engine.start(plan)
            self.link.close()
            self.link.ready(READY_SECONDS, lambda: engine.alive(self.id, self.folder))
        except (RuntimeFailed, SandboxDead) as error:
            raise self._why_not(plan, error) from error
        self.give(session, secrets)

    def _why_not(self, plan: Plan, error: SandkeepError) -> SandkeepError:
        """Why it did not start, with what process 1 said: the folder that holds its words may go now."""
        if missing := lacks(plan.base):
            return BadArgument(
                f"base {plan.base.spec!r} has no {missing}", "a base needs /usr/bin/env and Python 3.8 or newer"
            )
        remedy = "run `sandkeep doctor`"
        if plan.layers:
            remedy += "; if Python was removed or broken inside, go back to an older state, or read its files from its checkpoint"
        if isinstance(error, SandboxDead):
            return RuntimeFailed(f"{error.message}: {tail(self.folder)}".rstrip(": "), remedy)
        return type(error)(error.message, remedy, **error.details).at(error.place)

    def give(self, session: dict[str, Any] | None, secrets: dict[str, str]) -> None:
        """`more_env` and `more_cwd` are what a caller asks for on top of a session: unlike a session's own, that folder must be there."""
        session = dict(session or {})
        more, where = session.pop("more_env", None), session.pop("more_cwd", None)
        if session:
            self.link.call("session_set", **session)
        if where:
            self.link.call("session_set", cwd=where)
        if more:
            self.link.call("env_set", env=more)
        if secrets:
            self.link.call("secrets_set", secrets=secrets)

    def stop(self, record: Record) -> None:
        self.link.close()
        self.driver(record).stop(self.id, self.folder)

    def alive(self, record: Record) -> bool:
        return self.driver(record).alive(self.id, self.folder)

    def root_device(self, record: Record) -> int | None:
        """Which mount is the living sandbox's root: tells whether a live switch has happened."""
        pid = self.driver(record).pid(self.id, self.folder)
        return None if pid is None else os.stat(f"/proc/{pid}/root").st_dev

    def require_running(self, record: Record) -> None:
        if record.state is State.PAUSED:
            raise SandboxPaused(f"sandbox {self.id} is paused", "resume it first", id=self.id)
        if not self.alive(record):
            raise SandboxDead(
                f"sandbox {self.id} has ended: its process 1 is gone; its files are whole",
                "restore a snapshot, or kill it",
                id=self.id,
            )

    def undone(self) -> bool:
        return os.path.exists(f"{self.folder}/{journal.NAME}")

    def mend(self) -> None:
        """If nobody is at work here, what a dead process left is finished. A failure shows in what the caller does next."""
        if self.undone():
            with contextlib.suppress(SandkeepError, OSError), self.held(wait=False):
                pass

    def absent(self) -> SandkeepError:
        """Why the guest does not answer."""
        try:
            self.require_running(self.record())
        except SandkeepError as error:
            return error
        return SandboxDead(f"sandbox {self.id} does not answer: it is being changed or starts", "try again")

    def secrets(self) -> dict[str, str]:
        """What the guest holds, for a start over. A guest that does not answer has none to give."""
        try:
            held: dict[str, str] = self.link.call("secrets_get")["secrets"]
        except SandkeepError:
            return {}
        return held


def move_tree(tree: Path, to: Path) -> None:
    """Renaming a folder takes the right to write to it, which an ordinary user may have inside alone."""
    try:
        os.rename(tree, to)
    except PermissionError:
        elevated(os.rename, tree, to)


def fresh_hostname(id: str) -> str:
    return id.replace("_", "-")


def fresh_seed() -> str:
    return random.token_hex(64)


def fresh_machine_id() -> str:
    return random.token_hex(16)


def wait_until(condition: Any, seconds: float, pause: float = 0.005) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(pause)
    return bool(condition())
