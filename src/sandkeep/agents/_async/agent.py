"""A coding agent in a sandbox: every run kept as a checkpoint, any of them gone on from."""

from __future__ import annotations

import logging
import secrets as random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Self

from sandkeep.agents import facts, installing, setup
from sandkeep.agents._async.bridge import blocking, pause_for
from sandkeep.agents._async.turn import RUN, AsyncPrivate, AsyncTurn, prepare, refuse_running, running, stop
from sandkeep.agents.facts import Step
from sandkeep.agents.holding import Holding
from sandkeep.agents.options import Options, check_prompt
from sandkeep.agents.response import AgentResponse, AgentStatus, RunStatus
from sandkeep.agents.schema import check_schema
from sandkeep.agents.setup import Named
from sandkeep.checkpoints.catalog import Store
from sandkeep.checkpoints.filters import KEY_FILES
from sandkeep.checkpoints.records import SHOWN, check_comment
from sandkeep.errors import AgentMismatch, BadArgument, FileError, NotFound, SandboxNotFound, SandkeepError, StoreError
from sandkeep.model import HOME, WORKSPACE, CheckpointInfo, RestoreReport, State
from sandkeep.sandbox import AsyncSandbox, keeping
from sandkeep.sandbox._async.commands import checked_seconds

log = logging.getLogger("sandkeep.agents")
Channel = Literal["content", "stdout", "stderr", "lifecycle"]
RUNNING = "a run"
SOON = 5.0
CHANNELS = ("content", "stdout", "stderr", "lifecycle")


class AsyncAgent:
    """As a context manager its sandbox is killed on leaving the block. docs/agents.md lists the options."""

    def __init__(self, type: str = "shell", **options: Any) -> None:
        try:
            checked = Options(type, **options)
        except TypeError as error:
            raise BadArgument(f"Agent: {error}", "docs/agents.md lists the options")
        self._begun(checked)

    def _begun(self, options: Options) -> None:
        self._options = options
        self._holding = Holding()
        self._sandbox: AsyncSandbox | None = None
        self._store: Store | None = None
        self._stored: AsyncSandbox | None = None  # the sandbox that knows the store
        self._turn: AsyncTurn | None = None
        self._sinks: dict[str, list[Callable[[Any], object]]] = {channel: [] for channel in CHANNELS}
        self._notes: list[str] = []
        self._asked = False  # to interrupt a run that has not begun
        self._put_back: dict[str, bytes] = {}  # private files that a pause left out

    @property
    def type(self) -> str:
        return self._options.type

    @property
    def session_id(self) -> str:
        """The tag of this object's checkpoints."""
        return str(self._options.tag)

    @property
    def sandbox(self) -> AsyncSandbox:
        """The sandbox in use: commands, files, ports and all."""
        if self._sandbox is None:
            raise SandboxNotFound("this agent has no sandbox yet", "run() something first")
        return self._sandbox

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    def on(self, channel: Channel, callback: Callable[[Any], object]) -> None:
        """Live: "content" gives events, "stdout" and "stderr" text, "lifecycle" dicts."""
        if channel not in CHANNELS:
            raise BadArgument(f"there is nothing called {channel!r} to listen to", f"use one of {', '.join(CHANNELS)}")
        self._sinks[channel].append(callback)

    def _tell(self, channel: str, value: Any) -> None:
        """A listener that fails never costs the run; it is in the notes and in the log."""
        for callback in self._sinks[channel]:
            try:
                callback(value)
            except Exception as error:
                log.exception("a listener to %s failed", channel)
                self._notes.append(f"a listener to {channel} failed: {error!r}")

    def _lived(self, event: str, **more: Any) -> None:
        self._tell("lifecycle", {"event": event, "sandbox_id": self._sandbox.id if self._sandbox else None, **more})

    # running

    async def run(
        self,
        prompt: str,
        *,
        timeout: float | None = None,
        background: bool = False,
        from_checkpoint: str | None = None,
        checkpoint_comment: str | None = None,
        schema: dict[str, Any] | None = None,
    ) -> AgentResponse:
        """Give the agent a prompt; the next run goes on with the same conversation.

        `from_checkpoint` (an id, a name or "latest") puts the agent into a fresh sandbox that is what the checkpoint says.
        """
        check_prompt(prompt)
        check_comment(checkpoint_comment)
        if schema is not None:
            check_schema(schema)
        if background and (timeout is not None or schema is not None):
            raise BadArgument("a background run takes neither timeout nor schema", "use wait() to follow it")
        if timeout is not None:
            checked_seconds(timeout)
        if from_checkpoint is not None and self._options.sandbox_id is not None:
            raise BadArgument("from_checkpoint makes a fresh sandbox: it excludes sandbox_id", "give one of them")
        with self._holding.during(RUNNING):
            self._notes, self._asked = [], False
            sandbox = await self._ready(from_checkpoint)
            turn = AsyncTurn(sandbox, self._options, f"{RUN}{random.token_hex(6)}", prompt, self._tell)
            turn.interrupted = self._asked
            if background:
                await turn.start(schema)
                self._lived("run started", run_id=turn.run_id, background=True)
                return self._response(turn, "running", None)
            return await self._foreground(sandbox, turn, prompt, timeout, checkpoint_comment, schema)

    async def _foreground(
        self,
        sandbox: AsyncSandbox,
        turn: AsyncTurn,
        prompt: str,
        timeout: float | None,
        comment: str | None,
        schema: dict[str, Any] | None,
    ) -> AgentResponse:
        self._turn = turn
        self._lived("run started", run_id=turn.run_id, background=False)
        try:
            ended = await turn.follow(timeout, schema)
        finally:
            self._turn = None
        await self._keep_events(turn)
        saved, wrong = await self._keep(sandbox, turn.run_id, ended.status, ended.exit_code, prompt, comment)
        self._lived("run ended", run_id=turn.run_id, status=ended.status, exit_code=ended.exit_code)
        if ended.stopped is not None:
            raise ended.stopped
        return self._response(
            turn, ended.status, ended.exit_code, stdout=ended.stdout, stderr=ended.stderr, checkpoint=saved,
            checkpoint_error=wrong, output=ended.output, output_error=ended.output_error, duration_ms=ended.duration_ms,
        )  # fmt: skip

    async def _keep_events(self, turn: AsyncTurn) -> None:
        try:
            await turn.keep_events()
        except FileError as error:
            log.warning("the events of %s are not in the sandbox: %s", turn.run_id, error)
            self._notes.append(f"the events are not in the sandbox: {error}")

    def _response(self, turn: AsyncTurn, status: Any, exit_code: int | None, **more: Any) -> AgentResponse:
        return AgentResponse(
            turn.run_id, self.sandbox.id, self.session_id, status, exit_code, events=list(turn.events), notes=self._notes,
            **more,
        )  # fmt: skip

    async def _keep(
        self,
        sandbox: AsyncSandbox,
        run_id: str,
        status: RunStatus,
        exit_code: int | None,
        prompt: str,
        comment: str | None,
    ) -> tuple[CheckpointInfo | None, str | None]:
        """The automatic checkpoint: its failure is told, and never the run's."""
        if self._options.storage is False or (status != "completed" and not self._options.keep_failed):
            return None, None
        told = self._options.masker.text(prompt)[: facts.PROMPT_SHOWN]
        try:
            saved = await self._save(sandbox, comment, run_id=run_id, status=status, exit_code=exit_code, prompt=told)
        except (SandkeepError, OSError) as error:
            log.warning("the checkpoint after %s failed: %s", run_id, error)
            self._lived("checkpoint failed", run_id=run_id, error=str(error))
            return None, str(error)
        self._lived("checkpoint saved", run_id=run_id, checkpoint=saved.id)
        return saved, None

    async def _save(self, sandbox: AsyncSandbox, comment: str | None, **run: Any) -> CheckpointInfo:
        options = self._options
        about = facts.metadata(options.spec, options.workspace_mode, options.model, **run)
        store = await self._needed()
        await self._tell_store(sandbox, store)
        private = [path for path in self._private() if path not in KEY_FILES]
        async with AsyncPrivate(sandbox, private):
            info = await sandbox.checkpoint(comment, tag=self.session_id, metadata=about, **options.kept)
        left = info.excluded if len(info.excluded) <= SHOWN else await blocking(store.left_out, info.id)
        for path in sorted({*KEY_FILES} & {*left}):
            self._notes.append(f"not in the checkpoint, for it may hold a key: {path}")
        return info

    async def wait(self) -> AgentResponse:
        """The outcome of the run in the background. It is not checkpointed; checkpoint() does that."""
        with self._holding.during("waiting"):
            sandbox = self.sandbox
            found = [one for one in await sandbox.commands.list() if (one.tag or "").startswith(RUN) and one.background]
            if not found:
                raise NotFound("no run was started in the background of this sandbox", "run(…, background=True)")
            last = max(found, key=lambda one: one.started)
            turn = AsyncTurn(sandbox, self._options, str(last.tag), "", self._tell)
            ended = await turn.collect(await sandbox.commands.connect(last.pid))
            await self._keep_events(turn)
            return self._response(
                turn,
                ended.status,
                ended.exit_code,
                stdout=ended.stdout,
                stderr=ended.stderr,
                duration_ms=ended.duration_ms,
            )

    async def execute_command(self, command: str, *, timeout: float | None = None, background: bool = False) -> Any:
        """A command beside the agent, in its sandbox: a CommandResult, or a Process."""
        with self._holding.during("a command"):
            sandbox = await self._ready(None)
            return await sandbox.commands.run(command, timeout=timeout, background=background, cwd=WORKSPACE)

    async def interrupt(self) -> bool:
        """End the run that goes on, here or in the background; it is kept and marked. False if there is none."""
        here = self._holding.operation == RUNNING
        self._asked = here
        deadline = time.monotonic() + SOON
        while True:
            turn = self._turn
            if turn is not None:
                turn.interrupted = True
            if self._sandbox is not None and await stop(self._sandbox):
                return True
            if not here or self._holding.operation != RUNNING or time.monotonic() > deadline:
                return here
            await pause_for(0.05)

    # its sandbox

    async def _ready(self, from_checkpoint: str | None) -> AsyncSandbox:
        """The sandbox to run in: awake, with nothing going on in it."""
        if from_checkpoint is not None:
            return await self._begin_from(from_checkpoint)
        if self._sandbox is None:
            return await self._attach(self._options.sandbox_id) if self._options.sandbox_id else await self._begin()
        if (await self._sandbox.info()).state is State.PAUSED:
            await self._wake()
        await refuse_running(self._sandbox)
        return self._sandbox

    async def _begin(self) -> AsyncSandbox:
        store, options = await self._reached(), self._options
        create = partial(installing.create, options.place, options.spec, options.host_packages, **options.sandbox())
        sandbox = await AsyncSandbox.attach(await blocking(create), home=options.place.path)
        return await self._hold(sandbox, store, fresh=True)

    async def _begin_from(self, checkpoint: str) -> AsyncSandbox:
        store, options = await self._opened(), self._options
        if store is None:
            raise no_storage()
        info = await blocking(facts.check, store, checkpoint, options.spec, options.workspace_mode)
        if self._sandbox is not None:
            await refuse_running(self._sandbox)
        create = partial(installing.create_from, options.place, options.spec, options.host_packages, store, info)
        id, report = await blocking(partial(create, **options.sandbox()))
        sandbox = await AsyncSandbox.attach(id, home=options.place.path)
        sandbox.restore_report = report
        before, self._sandbox = self._sandbox, None
        found = await self._hold(sandbox, store, fresh=False)
        if setup.TEMP in await blocking(store.left_out, info.id):
            await sandbox.files.mkdir(setup.TEMP)
        if before is not None:
            await before.kill()
        self._lived("restored", checkpoint=info.id)
        return found

    async def _attach(self, id: str) -> AsyncSandbox:
        options, store = self._options, await self._reached()
        about = (await (await AsyncSandbox.attach(id, home=options.place.path)).info()).metadata.get("agent") or {}
        mode = about.get("workspace_mode", options.workspace_mode)
        if about.get("type", self.type) != self.type or mode != options.workspace_mode:
            raise AgentMismatch(
                f"sandbox {id} is of agent {about.get('type')!r}, workspace mode {mode!r}", "use its own"
            )
        sandbox = await AsyncSandbox.connect(id, home=options.place.path, secrets=options.all_secrets)
        await refuse_running(sandbox)
        await sandbox._link.call("secrets_set", secrets=options.all_secrets)
        return await self._hold(sandbox, store, fresh=False)

    async def _hold(self, sandbox: AsyncSandbox, store: Store | None, fresh: bool) -> AsyncSandbox:
        try:
            if store is not None:
                await self._tell_store(sandbox, store)
            await prepare(sandbox, self._options, fresh)
        except BaseException:
            if sandbox.id != self._options.sandbox_id:
                await sandbox.kill()
            raise
        self._sandbox = sandbox
        self._lived("sandbox ready", fresh=fresh)
        return sandbox

    async def _opened(self) -> Store | None:
        if self._store is None:
            self._store = await blocking(self._options.open_store)
        return self._store

    async def _reached(self) -> Store | None:
        """The store, or None where there is none now: a run goes on without, and says that it was not kept."""
        try:
            return await self._opened()
        except StoreError as error:
            log.warning("the store can't be had: %s", error)
            return None

    async def _tell_store(self, sandbox: AsyncSandbox, store: Store) -> None:
        if self._stored is not sandbox:
            await blocking(keeping.choose_store, sandbox._held, store)
            self._stored = sandbox

    @classmethod
    def _in(cls, sandbox: AsyncSandbox, options: Options) -> Self:
        """An agent in a sandbox that is ready."""
        self = cls.__new__(cls)
        self._begun(options)
        self._sandbox = sandbox
        return self

    async def _adopt(
        self, sandbox: AsyncSandbox, response: AgentResponse, prompt: str, comment: str | None
    ) -> AgentResponse:
        """Go on in the sandbox where another object ran the prompt; what it did is kept as ours."""
        self._sandbox = sandbox
        saved, wrong = await self._keep(sandbox, response.run_id, response.status, response.exit_code, prompt, comment)
        return replace(response, checkpoint=saved, checkpoint_error=wrong)

    async def pause(self, comment: str | None = None) -> CheckpointInfo:
        """Put the sandbox to sleep in the store; the next run wakes it."""
        with self._holding.during("a pause"):
            if self._options.storage is False:
                raise no_storage()
            await refuse_running(self.sandbox)
            await self._tell_store(self.sandbox, await self._needed())
            async with AsyncPrivate(self.sandbox, [*{*KEY_FILES, *self._private()}]) as private:
                info = await self.sandbox.pause(comment, tag=self.session_id)
                self._put_back = private.give_up()
            self._lived("paused", checkpoint=info.id)
            return info

    async def resume(self) -> RestoreReport:
        with self._holding.during("a resume"):
            return await self._wake()

    async def _wake(self) -> RestoreReport:
        report = await self.sandbox.resume(secrets=self._options.all_secrets)
        await AsyncPrivate(self.sandbox, [], self._put_back).put_back()
        self._put_back = {}
        self._lived("resumed", level=report.level)
        return report

    def _private(self) -> list[str]:
        return [f"{HOME}/{path}" for path in self._options.spec.private]

    async def kill(self) -> None:
        """End the sandbox, whatever goes on in it. Checkpoints stay; the next run begins a fresh one."""
        sandbox, self._sandbox = self._sandbox, None
        if self._turn is not None:
            self._turn.interrupted = True
        if sandbox is not None:
            await sandbox.kill()
            self._lived("killed", killed=sandbox.id)

    async def status(self) -> AgentStatus:
        sandbox, turn, operation = self._sandbox, self._turn, self._holding.operation
        if sandbox is None:
            return AgentStatus("busy" if operation else "none", operation, None, self.session_id, None, None)
        try:
            info = await sandbox.info()
        except SandboxNotFound:
            return AgentStatus("dead", operation, sandbox.id, self.session_id, None, None)
        run_id = turn.run_id if turn else None
        state: Any = info.state.value
        if info.state is State.RUNNING:
            run_id = run_id or await running(sandbox)
            state = "busy" if operation else "running" if run_id else "idle"
        return AgentStatus(state, operation, sandbox.id, self.session_id, run_id, info.checkpoint)

    # checkpoints and files

    async def checkpoint(self, comment: str | None = None) -> CheckpointInfo:
        with self._holding.during("a checkpoint"):
            if self._options.storage is False:
                raise no_storage()
            await refuse_running(self.sandbox)
            return await self._save(self.sandbox, comment, status="explicit")

    async def list_checkpoints(self, limit: int = 100, tag: str | None = None) -> list[CheckpointInfo]:
        """Of the whole store, the newest first."""
        return await blocking((await self._needed()).checkpoints, limit, tag)

    async def log(self, checkpoint: str = "latest") -> list[Step]:
        """The lineage of a checkpoint, the oldest first: who did what."""
        return await blocking(facts.log, await self._needed(), checkpoint)

    async def _needed(self) -> Store:
        store = await self._opened()
        if store is None:
            raise no_storage()
        return store

    async def upload_context(self, files: Named) -> None:
        await self._upload(setup.files_below(f"{WORKSPACE}/context", files, "context"))

    async def upload_files(self, files: Named) -> None:
        await self._upload(setup.files_below(WORKSPACE, files, "files"))

    async def _upload(self, files: dict[str, bytes]) -> None:
        with self._holding.during("an upload"):
            sandbox = await self._ready(None)
            for path, content in files.items():
                await sandbox.files.write(path, content)

    async def get_output_files(self, recursive: bool = False) -> dict[str, bytes]:
        """Name below output/ → content."""
        folder = f"{WORKSPACE}/output"
        found = await self.sandbox.files.list(folder, 100 if recursive else 1)
        files = [one.path for one in found if one.kind == "file"]
        return {path.removeprefix(f"{folder}/"): await self.sandbox.files.read(path) for path in files}


def no_storage() -> BadArgument:
    return BadArgument("this agent was made without storage", "leave out storage=False, or name a folder or bucket")
