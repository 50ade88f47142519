"""A sandbox on a server, with the names and results of the embedded one."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Literal, Self, cast, overload
from urllib.parse import quote

from sandkeep.client import answers, whole
from sandkeep.client._async.link import AsyncRemoteLink
from sandkeep.client._async.server import AsyncServer
from sandkeep.client._async.workflow import AsyncRemoteWorkflow
from sandkeep.errors import BadArgument, SandkeepError, system
from sandkeep.model import CheckpointInfo, Limits, RestoreReport, SandboxInfo, SnapshotInfo, check_metadata
from sandkeep.runtime.link import AsyncLink
from sandkeep.sandbox._async.bridge import begin_now
from sandkeep.sandbox._async.commands import AsyncCommands
from sandkeep.sandbox._async.files import AsyncFiles
from sandkeep.sandbox._async.pty import AsyncPty
from sandkeep.sandbox._async.sandbox import id_of
from sandkeep.sandbox._async.session import AsyncEnv, AsyncHistory
from sandkeep.sandbox.lifecycle import check_options, check_variables

Level = Literal["memory", "relaunched", "files"]
Infos = list[SandboxInfo]
Snapshots = list[SnapshotInfo]
Strings = list[str]
Numbers = list[int]
Rules = dict[str, list[str]]


class AsyncRemoteSandbox:
    """An isolated Linux environment. As a context manager it is killed on leaving the block."""

    _server: ClassVar[AsyncServer]

    id: str
    commands: AsyncCommands
    files: AsyncFiles
    pty: AsyncPty
    env: AsyncEnv
    history: AsyncHistory
    workflow: AsyncRemoteWorkflow
    restore_report: RestoreReport | None

    def __init__(
        self,
        *,
        base: str = "host",
        runtime: str | None = None,
        env: dict[str, str] | None = None,
        secrets: dict[str, str] | None = None,
        limits: Limits | None = None,
        network: Literal["none", "host"] = "none",
        cwd: str | None = None,
        metadata: dict[str, Any] | None = None,
        from_checkpoint: str | None = None,
        require: Level = "files",
        project: str | None = None,
        auto_pause_timeout: float | None = None,
        paused_expiry: float | None = None,
        egress: Rules | None = None,
    ) -> None:
        """`egress`: a way out by rules, {"allow": […], "deny": […]}; {} is everything, None is no way out."""
        check_options(limits, network, None, cwd)
        self._created = False
        self._options = {
            "base": base, "runtime": runtime, "env": check_variables("env", env), "secrets": check_variables("secrets", secrets), "network": network, "cwd": cwd,
            "limits": dataclasses.asdict(limits or Limits()), "metadata": check_metadata(metadata), "from_checkpoint": from_checkpoint,
            "require": require, "project": project, "auto_pause_timeout": auto_pause_timeout, "paused_expiry": paused_expiry,
            "egress": egress,
        }  # fmt: skip
        self.restore_report = None
        begin_now(self)

    async def _begin(self) -> None:
        told = await self._server.ask("POST", "/sandboxes", self._options)
        self._hold(told["id"])
        self.restore_report = answers.report_of(told.get("restore_report"))

    def _hold(self, id: str) -> None:
        link = AsyncRemoteLink(self._server, id)
        self.id, self._link, self._created = id, link, True
        same = cast("AsyncLink", link)
        self.commands = AsyncCommands(same)
        self.files = AsyncFiles(same)
        self.pty = AsyncPty(same)
        self.env = AsyncEnv(same)
        self.history = AsyncHistory(same)
        self.workflow = AsyncRemoteWorkflow(self._server, id)

    @classmethod
    def _of(cls, id: str) -> Self:
        self = cls.__new__(cls)
        self.restore_report = None
        self._hold(id)
        return self

    @property
    def _path(self) -> str:
        if not self._created:
            raise BadArgument("this sandbox has not been created yet", "use `async with`, or `await ….create(…)`")
        return f"/sandboxes/{self.id}"

    async def _ask(self, method: str, verb: str, body: Any = None) -> Any:
        return await self._server.ask(method, self._path + verb, body)

    @classmethod
    async def create(cls, **options: Any) -> Self:
        """The same as the constructor, for those who do not use a block."""
        self = cls(**options)
        if not self._created:
            await self._begin()
        return self

    @classmethod
    async def connect(cls, id: str, *, secrets: dict[str, str] | None = None) -> Self:
        """A sandbox that lives already. A paused one is resumed."""
        told = await cls._server.ask("POST", f"/sandboxes/{answers.sandbox_id(id)}/resume", {"secrets": secrets or {}})
        self = cls._of(id)
        self.restore_report = answers.report_of(told.get("restore_report"))
        return self

    @classmethod
    async def attach(cls, id: str) -> Self:
        """A handle on a sandbox as it is: not woken."""
        await cls._server.ask("GET", f"/sandboxes/{answers.sandbox_id(id)}")
        return cls._of(id)

    @classmethod
    async def list(cls, *, project: str | None = None) -> Infos:
        """All that the key sees, oldest first."""
        found: Infos = []
        cursor = None
        while True:
            page = await cls._server.ask("GET", "/sandboxes", project=project, cursor=cursor, limit=1000)
            found += [answers.sandbox_info(one) for one in page["sandboxes"]]
            cursor = page["cursor"]
            if cursor is None:
                return found[::-1]

    async def __aenter__(self) -> Self:
        if not self._created:
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

    async def set_egress(self, rules: Rules | None) -> None:
        """Other rules for the way out, from now on; None ends it."""
        await (self._ask("DELETE", "/egress") if rules is None else self._ask("PUT", "/egress", rules))

    async def info(self) -> SandboxInfo:
        return answers.sandbox_info(await self._ask("GET", ""))

    async def close(self) -> None:
        """Let go of this handle's connections; the sandbox goes on."""
        await self._link.close()

    async def kill(self) -> None:
        """End it and remove it from the server. Checkpoints stay in their store. Killing what is gone is fine."""
        if self._created:
            await self._link.close()
            try:
                await self._ask("DELETE", "")
            except SandkeepError as error:
                if error.code != "SANDBOX_NOT_FOUND":
                    raise

    async def snapshot(self, comment: str = "") -> SnapshotInfo:
        return answers.noun(SnapshotInfo, await self._ask("POST", "/snapshot", {"comment": comment}))

    async def snapshots(self) -> Snapshots:
        return [answers.noun(SnapshotInfo, one) for one in (await self._ask("GET", "/snapshots"))["snapshots"]]

    async def delete_snapshot(self, snapshot: SnapshotInfo | str) -> None:
        await self._ask("DELETE", f"/snapshots/{quote(id_of(snapshot), safe='')}")

    async def restore(
        self, to: SnapshotInfo | CheckpointInfo | str, *, keep: bool = False, require: Level = "files"
    ) -> RestoreReport:
        """Be what a snapshot or checkpoint says. Processes are ended; with `keep` background ones start again."""
        told = await self._ask("POST", "/restore", {"to": id_of(to), "keep": keep, "require": require})
        self.restore_report = answers.noun(RestoreReport, told)
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
        asked = {"count": 1 if count is None else count, "secrets": secrets, "memory": memory}
        told = (await self._ask("POST", "/fork", asked))["sandboxes"]
        made = [answers.error_of(one["error"]) if "error" in one else self._of(one["id"]) for one in told]
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
    ) -> CheckpointInfo:
        """A durable record of the whole state in the server's store."""
        words = {
            "comment": comment,
            "tag": tag,
            "metadata": metadata,
            "scope": scope,
            "exclude": exclude,
            "memory": memory,
        }
        return answers.noun(CheckpointInfo, await self._ask("POST", "/checkpoints", words))

    async def export_state(self, to: BinaryIO | str | Path | None = None) -> bytes | None:
        """The whole state as one self-contained file: returned, or streamed to `to`."""
        if isinstance(to, (str, Path)):
            with whole.written(to) as file:
                await self._server.download(self._path + "/state", file)
            return None
        if to is not None and not hasattr(to, "write"):
            raise BadArgument(f"{to!r} can't be written to", "give a path, or a file opened for writing bytes")
        into = io.BytesIO() if to is None else to
        await self._server.download(self._path + "/state", into)
        return into.getvalue() if isinstance(into, io.BytesIO) and to is None else None

    async def import_state(self, blob: bytes | BinaryIO | str | Path) -> RestoreReport:
        """Be what an exported state says; what was here before is replaced, or on any error untouched."""
        if isinstance(blob, (str, Path)):
            if "\0" in str(blob):
                raise BadArgument(f"{blob!r} names no file")
            with system(), open(blob, "rb") as file:
                told = await self._server.upload(self._path + "/state", file)
        elif not isinstance(blob, (bytes, bytearray, memoryview)) and not hasattr(blob, "read"):
            raise BadArgument(
                f"{type(blob).__name__} is not an exported state", "give bytes, a path or a file opened for reading"
            )
        else:
            told = await self._server.upload(self._path + "/state", blob)
        self.restore_report = answers.noun(RestoreReport, told)
        return self.restore_report

    async def pause(self) -> CheckpointInfo:
        """Put it to sleep in the server's store and free its memory and processes."""
        await self._link.close()
        told = await self._ask("POST", "/pause")
        found = answers.noun(CheckpointInfo, await self._server.ask("GET", f"/checkpoints/{told['checkpoint']}"))
        return dataclasses.replace(found, notes=told.get("notes", []))

    async def resume(self, *, secrets: dict[str, str] | None = None, fail_over: bool = False) -> RestoreReport:
        """Wake it. With `fail_over` also one whose host is gone: from its last checkpoint, without what came after."""
        told = await self._ask("POST", "/resume", {"secrets": secrets or {}, "fail_over": fail_over})
        self.restore_report = answers.report_of(told.get("restore_report")) or RestoreReport(
            "memory", why="it was not paused"
        )
        return self.restore_report

    async def ports(self) -> Numbers:
        """TCP ports that something inside listens on."""
        found: Numbers = (await self._link.call("ports"))["ports"]
        return found

    async def usage(self) -> dict[str, Any]:
        found: dict[str, Any] = await self._ask("GET", "/usage")
        return found
