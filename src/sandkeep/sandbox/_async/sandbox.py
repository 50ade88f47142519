"""The one object a user holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self, overload

from sandkeep.checkpoints.merge import Progress
from sandkeep.errors import BadArgument, SandkeepError
from sandkeep.model import CheckpointInfo, Limits, Mount, RestoreReport, SandboxInfo, SnapshotInfo
from sandkeep.runtime.link import AsyncLink
from sandkeep.sandbox import beginning, carrying, keeping, lifecycle, pausing, restoring, saving
from sandkeep.sandbox._async.bridge import begin_now, blocking
from sandkeep.sandbox._async.commands import AsyncCommands
from sandkeep.sandbox._async.files import AsyncFiles
from sandkeep.sandbox._async.pty import AsyncPty
from sandkeep.sandbox._async.session import AsyncEnv, AsyncHistory
from sandkeep.sandbox.home import Home
from sandkeep.sandbox.machine import Machine
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
        from_checkpoint: str | None = None,
        require: Level = "files",
        home: str | Path | None = None,
    ) -> None:
        self._home = Home(home)
        self._machine: Machine | None = None
        self._require = require
        self._from = from_checkpoint
        self._store = store
        self._options: dict[str, Any] = {
            "runtime": runtime, "env": env, "secrets": secrets, "limits": limits, "network": network,
            "mounts": mounts, "cwd": cwd, "metadata": metadata,
        }  # fmt: skip
        self._base = base
        self.restore_report = None
        begin_now(self)

    async def _begin(self) -> None:
        if self._from is None:
            machine = await blocking(lifecycle.create, self._home, base=self._base, **self._options)
            await blocking(keeping.choose_store, machine, self._store)
        else:
            if self._base != "host":
                raise BadArgument("base and from_checkpoint exclude each other", "the checkpoint names its base")
            machine, self.restore_report = await blocking(
                beginning.create_from, self._home, self._store, self._from, self._require, **self._options
            )
        self._hold(machine)

    def _hold(self, machine: Machine) -> None:
        link = AsyncLink(machine.folder / "run")
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
        self.restore_report = None
        self._hold(machine)
        return self

    @property
    def _held(self) -> Machine:
        if self._machine is None:
            raise BadArgument(
                "this sandbox has not been created yet", "use `async with`, or `await AsyncSandbox.create(…)`"
            )
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
        await self.kill()

    @property
    async def cwd(self) -> str:
        cwd: str = (await self._link.call("session_get"))["cwd"]
        return cwd

    async def set_cwd(self, path: str) -> None:
        await self._link.call("session_set", cwd=path)

    async def info(self) -> SandboxInfo:
        return await blocking(lifecycle.info, self._held)

    async def kill(self) -> None:
        """End it and remove it from this host. Checkpoints stay in their store."""
        if self._machine is not None:
            await self._link.close()
            await blocking(lifecycle.kill, self._machine)

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
            self.restore_report = await blocking(restoring.restore_snapshot, self._held, id, relaunch=keep)
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

    async def pause(self, comment: str | None = None, *, tag: str | None = None, memory: bool = True) -> CheckpointInfo:
        """Put it to sleep in the store and free its memory and processes. Without `memory`, or where the runtime can't
        save it, processes are recorded, and the background ones start again on resume."""
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


def id_of(thing: SnapshotInfo | CheckpointInfo | str) -> str:
    id = thing if isinstance(thing, str) else getattr(thing, "id", None)
    if not isinstance(id, str) or not id:
        raise BadArgument(
            f"{thing!r} is neither a snapshot nor a checkpoint",
            "give what snapshot() or checkpoint() returned, or its id",
        )
    return id
