"""This host's sandboxes as the keeper of sessions needs them: pause, resume, remove, discard, and what is really here.

A sandbox's id is chosen before it exists, since its row comes first. Secrets are held in this process's memory only: they are
bound again when a sandbox wakes here, and after a restart their absence is an event.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sandkeep.errors import Busy, NotFound, SandboxDead, SandboxPaused, SandkeepError
from sandkeep.model import Limits, RestoreReport, State
from sandkeep.runtime.pick import keeps_memory
from sandkeep.sandbox import AsyncSandbox, beginning, keeping, killing, lifecycle, pausing
from sandkeep.sandbox._async.bridge import blocking
from sandkeep.sandbox.home import Home
from sandkeep.sandbox.machine import Machine
from sandkeep.server.spaces import Spaces
from sandkeep.sessions import Database, Log, Reality, Session, Slept


class Reserved(Home):
    """A home that gives out ids which have their rows already."""

    def __init__(self, path: Path, ids: Iterable[str]) -> None:
        super().__init__(path)
        self._ids = iter(ids)

    def new_id(self) -> str:
        return next(self._ids)


class Hands:
    def __init__(self, home: Path, spaces: Spaces, database: Database) -> None:
        self.home = Home(home)
        self.spaces = spaces
        self.asked: dict[str, bool | None] = {}  # ids that their owner pauses, even in use, and whether with memory
        self.awake: Callable[[Session], Awaitable[None]] = (
            _nothing  # told of what was made or woke, before its row says so
        )
        self.reports: dict[str, RestoreReport] = {}  # how much came back when a sandbox last woke or was made here
        self.notes: dict[str, list[str]] = {}  # what was not kept when a sandbox last went to sleep here
        self._db = database
        self._log = Log(database)
        self._secrets: dict[str, dict[str, str]] = {}
        self._handles: dict[str, AsyncSandbox] = {}
        self._ending = False

    async def handle(self, session: Session) -> AsyncSandbox:
        """The library's object for a sandbox that is on this host, its checkpoints bound to its owner's space."""
        found = self._handles.get(session.id)
        if found is None:
            found = AsyncSandbox._of(await blocking(self.machine, session))
            found._link.stays, found._link.ending = True, self._ending
            found = self._handles.setdefault(session.id, found)
        return found

    def let_go(self) -> None:
        """The server was told to stop: whose request ends from now on has not left, and what he waits for goes on."""
        self._ending = True
        for found in self._handles.values():
            found._link.ending = True

    def machine(self, session: Session, home: Home | None = None) -> Machine:
        machine = Machine(home or self.home, session.id)
        machine.store = self.spaces.store(session.owner, session.project)
        return machine

    def hold_secrets(self, id: str, secrets: dict[str, str] | None) -> None:
        if secrets:
            self._secrets[id] = dict(secrets)

    async def create(self, session: Session, options: dict[str, Any]) -> None:
        """Bring up the sandbox of a new row."""
        report = await blocking(self._create, session, options)
        if report is not None:
            self.reports[session.id] = report
        self.hold_secrets(session.id, options.get("secrets"))
        await self.awake(session)

    def _create(self, session: Session, options: dict[str, Any]) -> RestoreReport | None:
        home, store = Reserved(self.home.path, [session.id]), self.spaces.store(session.owner, session.project)
        options = dict(options)
        checkpoint, require = options.pop("from_checkpoint", None), options.pop("require", "files")
        notes = options.pop("notes")
        if checkpoint is None:
            machine = lifecycle.create(home, **options)
            keeping.choose_store(machine, store)
            _note(machine, notes)
            return None
        options.pop("base", None)
        machine, report = beginning.create_from(home, store, checkpoint, require, mounts=None, **options)
        _note(machine, notes)
        return report

    async def pause(self, session: Session) -> Slept:
        sandbox = await self.handle(session)
        if session.id not in self.asked:
            await refuse_foreground(sandbox)
        store = await blocking(self.spaces.store, session.owner, session.project)
        held = await blocking(sandbox._held.secrets)
        try:
            made = await sandbox.pause("paused by the server", memory=self.asked.get(session.id))
            checkpoint, self.notes[session.id] = made.id, made.notes
            if made.notes:
                await self._db.call(self._log.event, session.id, "memory_not_kept", notes=made.notes)
        except SandboxPaused:
            checkpoint = await blocking(_asleep_in, sandbox._held)
        self.hold_secrets(session.id, held)
        self._handles.pop(session.id, None)
        return Slept(checkpoint, store.spec.url)

    async def resume(self, session: Session) -> None:
        self._handles.pop(session.id, None)
        secrets = self._secrets.get(session.id, {})
        report, brought = await blocking(self._resume, session, secrets)
        if brought:
            report = await self._without_snapshots(session.id, report)
        if report is not None:
            self.reports[session.id] = report
            await self._db.call(self._log.event, session.id, "resumed", **asdict(report))
        missing = sorted(set(session.config.get("secrets", [])) - set(secrets))
        if missing:
            await self._db.call(self._log.event, session.id, "secrets_missing", names=missing)
        await self.awake(session)

    async def _without_snapshots(self, id: str, report: RestoreReport | None) -> RestoreReport | None:
        """Snapshots are layers of the host that took them: a sandbox that comes up from its checkpoint has none, and that is said."""
        left = await self._db.call(self._log.snapshots, id)
        if not left or report is None:
            return report
        await self._db.call(self._log.event, id, "snapshots_lost", snapshots=left)
        names = [f"snapshot {one['id']}" + (f" ({one['comment']})" if one["comment"] else "") for one in left]
        return replace(report, lost=[*report.lost, *names])

    def _resume(self, session: Session, secrets: dict[str, str]) -> tuple[RestoreReport | None, bool]:
        """From what sleeps here if it is the session's newest state, else brought from its checkpoint. None if it runs."""
        machine = self.machine(session)
        try:
            with machine.held() as record:
                running = record.state is State.RUNNING and machine.alive(record)
                fits = record.paused is not None and record.paused["checkpoint"] == session.checkpoint
        except NotFound:
            running = fits = False
        else:
            if running:
                return None, False
            if fits:
                return pausing.resume(machine, secrets, "files"), False
            killing.kill(machine)
        if session.checkpoint is None:
            raise SandboxDead(f"{session.id} has no checkpoint to come back from", "create a new one")
        return self._bring(session, secrets), True

    def _bring(self, session: Session, secrets: dict[str, str]) -> RestoreReport:
        """A sandbox with this id from a checkpoint that another host may have made."""
        config, limits = session.config, Limits(**session.config.get("limits", {}))
        runtime = config.get("runtime", "auto")
        if config.get("memory") and config.get("network", "none") == "none":  # it was chosen for it on another host
            runtime = "auto" if keeps_memory(self.home.path, limits) else "runsc"
        options: dict[str, Any] = {
            "runtime": runtime, "env": None, "secrets": secrets, "limits": limits,
            "network": config.get("network", "none"), "mounts": None, "cwd": None, "metadata": session.metadata,
        }  # fmt: skip
        store, home = self.spaces.store(session.owner, session.project), Reserved(self.home.path, [session.id])
        assert session.checkpoint is not None
        return beginning.create_from(home, store, session.checkpoint, "files", **options)[1]

    async def remove(self, session: Session) -> None:
        self._secrets.pop(session.id, None)
        self.reports.pop(session.id, None)
        self.notes.pop(session.id, None)
        await self.discard(session)

    async def discard(self, session: Session) -> None:
        found = self._handles.pop(session.id, None)
        if found is not None:
            await found._link.close()
        await blocking(killing.kill, Machine(self.home, session.id))

    async def real(self, id: str) -> Reality | None:
        """One whose process 1 has ended, as after a reboot of the host, is started again on its files."""
        reality, revived = await blocking(self._real, id)
        if revived:
            self.reports[id] = report = RestoreReport("files", why="its process 1 had ended; the files are whole")
            await self._db.call(self._log.event, id, "revived", **asdict(report))
        return reality

    def _real(self, id: str) -> tuple[Reality | None, bool]:
        machine = Machine(self.home, id)
        try:
            with machine.held() as record:
                if record.state is State.PAUSED and record.paused is not None:
                    return Reality("paused", record.paused["checkpoint"], record.store), False
                if machine.alive(record):
                    return Reality("running"), False
                machine.stop(record)
                machine.start(record, None, self._secrets.get(id, {}))
                return Reality("running"), True
        except NotFound:
            return None, False


def _note(machine: Machine, notes: list[str]) -> None:
    if notes:
        with machine.held() as record:
            record.notes += notes
            record.save(machine.folder)


async def _nothing(_: Session) -> None:
    return


async def refuse_foreground(sandbox: AsyncSandbox) -> None:
    """A command that somebody waits for, also one begun by a server that has since died, is no idleness."""
    try:
        running = [one for one in await sandbox.commands.list() if one.running and not one.background]
    except SandkeepError:
        return
    if running:
        raise Busy(f"{sandbox.id} runs a foreground command", "wait until it ends")


def _asleep_in(machine: Machine) -> str:
    record = machine.record()
    if record.paused is None:
        raise SandboxDead(f"{machine.id} is neither running nor asleep", "resume it from its last checkpoint")
    return str(record.paused["checkpoint"])
