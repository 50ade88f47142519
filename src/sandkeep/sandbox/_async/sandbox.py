"""The one object a user holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self, overload

from sandkeep.checkpoints.merge import Progress
from sandkeep.errors import BadArgument, SandkeepError, Unsupported
from sandkeep.model import CheckpointInfo, Limits, Mount, RestoreReport, SandboxInfo, SnapshotInfo
from sandkeep.runtime.link import AsyncLink
from sandkeep.sandbox import beginning, carrying, keeping, killing, ladder, lifecycle, pausing, restoring, saving
from sandkeep.sandbox import persistence as persisting
from sandkeep.sandbox._async.bridge import begin_now, blocking
from sandkeep.sandbox._async.commands import AsyncCommands
from sandkeep.sandbox._async.files import AsyncFiles
from sandkeep.sandbox._async.pty import AsyncPty
from sandkeep.sandbox._async.session import AsyncEnv, AsyncHistory
from sandkeep.sandbox._async.turn import AsyncTurn
from sandkeep.sandbox._async.watched import AsyncWatchedLink
from sandkeep.sandbox.home import Home
from sandkeep.sandbox.machine import Machine
from sandkeep.sandbox.persistence import Keeper, Persistence
from sandkeep.workflow import BoundState

Level = Literal["memory", "relaunched", "files"]
Infos = list[SandboxInfo]
Snapshots = list[SnapshotInfo]
Strings = list[str]
Numbers = list[int]


class AsyncSandbox:
    """An isolated Linux environment. As a context manager it is killed on leaving the block."""

    id: str
    commands: AsyncCommands
    files: AsyncFiles
    pty: AsyncPty
    env: AsyncEnv
    history: AsyncHistory
    workflow: BoundState
    restore_report: RestoreReport | None

    def __init__(
        self,
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
        store: Any = None,
        from_checkpoint: CheckpointInfo | str | None = None,
        require: Level = "files",
        persistence: Persistence | None = None,
        home: str | Path | None = None,
        egress: Any = None,
        progress: Progress | None = None,
    ) -> None:
        if egress is not None:
            raise Unsupported(
                "egress by rules needs a server, which stands outside", "use sandkeep.connect(…), or network='host'"
            )
        ladder.check_level(require)
        self._home = Home(home)
        self._machine: Machine | None = None
        self._require = require
        self._from = None if from_checkpoint is None else id_of(from_checkpoint)
        self._progress = progress
        self._store = store
        self._persistence = checked_persistence(persistence)
        self._keeper: Keeper | None = None
        self._options: dict[str, Any] = {
            "runtime": runtime, "env": env, "secrets": secrets, "limits": limits, "network": network,
            "mounts": mounts, "cwd": cwd, "metadata": metadata,
        }  # fmt: skip
        self._base = base
        self.restore_report = None
        begin_now(self)

    async def _begin(self) -> None:
        if self._persistence.mode != "ephemeral":
            if self._from is not None:
                raise BadArgument(
                    "persistence and from_checkpoint exclude each other", "the namespace says what to load"
                )
            machine, self.restore_report, self._keeper = await blocking(
                persisting.begin, self._home, self._store, self._persistence, {"base": self._base, **self._options}
            )
        elif self._from is None:
            if self._store is not None:
                self._store = await blocking(keeping.as_store, self._home, self._store)
            machine = await blocking(lifecycle.create, self._home, base=self._base, **self._options)
            await blocking(keeping.choose_store, machine, self._store)
        else:
            if self._base != "host":
                raise BadArgument("base and from_checkpoint exclude each other", "the checkpoint names its base")
            machine, self.restore_report = await blocking(
                beginning.create_from,
                self._home,
                self._store,
                self._from,
                self._require,
                progress=self._progress,
                **self._options,
            )
        self._hold(machine)

    def _hold(self, machine: Machine) -> None:
        link = (
            AsyncLink(machine.folder, machine)
            if self._keeper is None
            else AsyncWatchedLink(machine.folder, machine, self._keeper.check)
        )
        self._machine, self._link, self.id = machine, link, machine.id
        self.commands = AsyncCommands(link)
        self.files = AsyncFiles(link)
        self.pty = AsyncPty(link)
        self.env = AsyncEnv(link)
        self.history = AsyncHistory(link)
        self.workflow = BoundState(machine.folder / "workflow.json")

    @classmethod
    def _of(cls, machine: Machine) -> Self:
        self = cls.__new__(cls)
        self._home = machine.home
        self._keeper = None
        self.restore_report = machine.report
        self._hold(machine)
        return self

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {getattr(self, 'id', 'not created')}>"

    @property
    def _held(self) -> Machine:
        if self._machine is None:
            raise BadArgument(
                "this sandbox has not been created yet", "use `async with`, or `await AsyncSandbox.create(…)`"
            )
        if self._keeper is not None:
            self._keeper.check()
        return self._machine

    @classmethod
    async def create(cls, **options: Any) -> Self:
        """The same as the constructor, for those who do not use a block."""
        self = cls(**options)
        if self._machine is None:
            await self._begin()
        return self

    @classmethod
    async def connect(cls, id: str, *, home: str | Path | None = None, secrets: dict[str, str] | None = None) -> Self:
        """A sandbox that lives already, made by this process or another. A paused one is resumed."""
        machine, report = await blocking(pausing.connect, Home(home), id, secrets)
        self = cls._of(machine)
        self.restore_report = report
        return self

    @classmethod
    async def attach(cls, id: str, *, home: str | Path | None = None) -> Self:
        """A handle on a sandbox as it is: not woken, not even looked at."""
        found = Home(home)
        await blocking(found.existing, id)
        return cls._of(Machine(found, id))

    @classmethod
    async def list(cls, *, home: str | Path | None = None) -> Infos:
        return await blocking(lifecycle.listing, Home(home))

    async def __aenter__(self) -> Self:
        if self._machine is None:
            await self._begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self.kill()
        finally:
            if self._keeper is not None:
                await blocking(self._keeper.release, forget=False)

    @property
    async def cwd(self) -> str:
        cwd: str = (await self._link.call("session_get"))["cwd"]
        return cwd

    async def set_cwd(self, path: str) -> None:
        await self._link.call("session_set", cwd=path)

    async def info(self) -> SandboxInfo:
        return await blocking(lifecycle.info, self._held)

    async def kill(self, *, save: bool = True) -> None:
        """End it and remove it from this host. Checkpoints stay in their store.

        A persistent one is saved first; if that fails it is still there. Without `save` what was not saved is lost.
        """
        if self._machine is not None:
            if self._keeper is not None:
                await blocking(self._keeper.close, save=save)
            await self._link.close()
            await blocking(killing.kill, self._machine)
            if self._keeper is not None:
                await blocking(self._keeper.release, forget=True)

    @property
    def _kept(self) -> Keeper:
        if self._keeper is None:
            raise Unsupported(
                "this sandbox is ephemeral: it has no persisted state",
                "create it with persistence=Persistence(mode='session', namespace='…')",
            )
        return self._keeper

    async def save_state(self) -> CheckpointInfo | None:
        """Save the state in the namespace as its newest generation; None if the newest is the same."""
        return await blocking(self._kept.save)

    async def load_state(self, generation: str | None = None) -> RestoreReport:
        """Be what the namespace's newest generation says, or an older one; newer ones are then set aside."""
        await self._link.close()
        self.restore_report = await blocking(self._kept.load, generation)
        return self.restore_report

    async def clear_persisted_state(self) -> None:
        """Forget every generation of the namespace."""
        await blocking(self._kept.clear)

    def turn(self, name: str, *, keep_failed: bool = False, rollback: bool = False) -> AsyncTurn:
        """A block whose state is saved at its end, if it changed anything."""
        return AsyncTurn(self, name, keep_failed=keep_failed, rollback=rollback)

    async def snapshot(self, comment: str = "") -> SnapshotInfo:
        return await blocking(saving.snapshot, self._held, comment)

    async def snapshots(self) -> Snapshots:
        return await blocking(saving.snapshots, self._held)

    async def delete_snapshot(self, snapshot: SnapshotInfo | str) -> None:
        await blocking(saving.delete_snapshot, self._held, id_of(snapshot))

    async def restore(
        self,
        to: SnapshotInfo | CheckpointInfo | str,
        *,
        keep: bool = False,
        require: Level = "files",
        progress: Progress | None = None,
    ) -> RestoreReport:
        """Be what a snapshot or checkpoint says. Processes are ended; with `keep` background ones start again."""
        id = id_of(to)
        await self._link.close()
        if id.startswith("sn_"):
            self.restore_report = await blocking(restoring.restore_snapshot, self._held, id, require, relaunch=keep)
        else:
            self.restore_report = await blocking(
                keeping.restore, self._held, id, require, relaunch=keep, progress=progress
            )
        return self.restore_report

    @overload
    async def fork(self, *, secrets: dict[str, str] | None = None, memory: bool = False) -> Self: ...

    @overload
    async def fork(
        self, count: int, *, secrets: dict[str, str] | None = None, memory: bool = False
    ) -> Sequence[Self | SandkeepError]: ...

    async def fork(
        self, count: int | None = None, *, secrets: dict[str, str] | None = None, memory: bool = False
    ) -> Any:
        """A new sandbox from this one as it is now; of `count`: one entry each, a sandbox or the error that stopped it."""
        verb = pausing.fork if memory else lifecycle.fork
        found = await blocking(verb, self._held, 1 if count is None else count, secrets)
        made = [one if isinstance(one, SandkeepError) else self._of(one) for one in found]
        if count is not None:
            return made
        if isinstance(made[0], SandkeepError):
            raise made[0]
        return made[0]

    async def checkpoint(
        self,
        comment: str | None = None,
        *,
        tag: str | None = None,
        metadata: dict[str, Any] | None = None,
        scope: Literal["all", "workspace"] = "all",
        exclude: Strings | None = None,
        memory: bool = False,
        progress: Progress | None = None,
    ) -> CheckpointInfo:
        """A durable, portable record of the whole state in the store."""
        return await blocking(
            keeping.checkpoint, self._held, comment=comment, tag=tag, metadata=metadata, scope=scope, exclude=exclude,
            memory=memory, progress=progress,
        )  # fmt: skip

    async def export_state(self, to: BinaryIO | str | Path | None = None) -> bytes | None:
        """The whole state as one self-contained file: returned, or streamed to `to`."""
        return await blocking(carrying.export_state, self._held, to)

    async def import_state(self, blob: bytes | BinaryIO | str | Path) -> RestoreReport:
        """Be what an exported state says; what was here before is replaced, or on any error untouched."""
        await self._link.close()
        self.restore_report = await blocking(carrying.import_state, self._held, blob)
        return self.restore_report

    async def pause(
        self, comment: str | None = None, *, tag: str | None = None, memory: bool | None = None
    ) -> CheckpointInfo:
        """Put it to sleep in the store and free its memory and processes.

        Memory is saved where it can be (runsc without network), or it is an error with True; otherwise processes are
        recorded, and the background ones start again on resume.
        """
        await self._link.close()
        return await blocking(pausing.pause, self._held, comment=comment, tag=tag, with_memory=memory)

    async def resume(self, *, secrets: dict[str, str] | None = None, require: Level = "files") -> RestoreReport:
        self.restore_report = await blocking(pausing.resume, self._held, secrets, require)
        return self.restore_report

    async def ports(self) -> Numbers:
        """TCP ports that something inside listens on."""
        found: Numbers = (await self._link.call("ports"))["ports"]
        return found

    async def usage(self) -> dict[str, Any]:
        return await blocking(lifecycle.usage, self._held)


def checked_persistence(given: Persistence | None) -> Persistence:
    if given is not None and not isinstance(given, Persistence):
        raise BadArgument(
            f"{given!r} is not a Persistence", "write persistence=Persistence(mode='persistent', namespace='my-agent')"
        )
    return given or Persistence()


def id_of(thing: SnapshotInfo | CheckpointInfo | str) -> str:
    id = thing if isinstance(thing, str) else getattr(thing, "id", None)
    if not isinstance(id, str) or not id:
        raise BadArgument(
            f"{thing!r} is neither a snapshot nor a checkpoint",
            "give what snapshot() or checkpoint() returned, or its id",
        )
    return id
