"""One run of an agent in a sandbox: started, followed, ended, its events kept in the state."""

from __future__ import annotations

import fnmatch
import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from sandkeep.agents import events, setup
from sandkeep.agents._async.bridge import STOPPED, pause_for
from sandkeep.agents.events import Event, Stream
from sandkeep.agents.options import Options
from sandkeep.agents.response import RunStatus
from sandkeep.agents.schema import problem
from sandkeep.errors import Busy, FileError, FileMissing, ProcessNotFound
from sandkeep.model import HOME, WORKSPACE, CommandResult
from sandkeep.sandbox import AsyncProcess, AsyncSandbox

RUN = "run-"
GRACE = 5.0


@dataclass(frozen=True)
class Ended:
    """How a run ended; `stopped` is what cut it short from outside, to be raised again once it is kept."""

    status: RunStatus
    exit_code: int
    stdout: str = ""
    stderr: str = ""
    duration_ms: float = 0.0
    output: Any = None
    output_error: str | None = None
    stopped: BaseException | None = None


class AsyncTurn:
    def __init__(
        self, sandbox: AsyncSandbox, options: Options, run_id: str, prompt: str, tell: Callable[[str, Any], None]
    ) -> None:
        self._sandbox, self._options, self.run_id, self._prompt = sandbox, options, run_id, prompt
        self._stream = Stream(options.spec.parser, options.masker, tell)
        self.interrupted = False

    @property
    def events(self) -> list[Event]:
        return self._stream.events

    async def _command(self, schema: dict[str, Any] | None) -> dict[str, Any]:
        """The command line with its variables and folder."""
        spec, options = self._options.spec, self._options
        if spec.script:
            env = {"SANDKEEP_RESULT": setup.RESULT, "SANDKEEP_SCHEMA": json.dumps(schema)} if schema else {}
            return {"command": self._prompt, "env": env}
        prompt = setup.asked(self._prompt, schema)
        argv = spec.argv(prompt, options.model, options.base_url, await self._continuing())
        env = spec.environment(options.model, options.base_url)
        return {"command": shlex.join(argv), "env": env, "cwd": WORKSPACE}

    async def _continuing(self) -> bool:
        """Whether the state holds a conversation; the state says so, whoever made it and whenever."""
        if not self._options.spec.conversation:
            return False
        folder, pattern, depth = setup.conversation_place(self._options.spec.conversation)
        try:
            return any(fnmatch.fnmatchcase(one.path, pattern) for one in await self._sandbox.files.list(folder, depth))
        except (FileMissing, FileError):
            return False

    async def start(self, schema: dict[str, Any] | None) -> None:
        """In the background."""
        await self._sandbox.commands.run(**await self._command(schema), background=True, tag=self.run_id)

    async def follow(self, timeout: float | None, schema: dict[str, Any] | None) -> Ended:
        """In the foreground, to its end."""
        if schema is not None and await self._sandbox.files.exists(setup.RESULT):
            await self._sandbox.files.remove(setup.RESULT)
        self._stream.add(Event("message", self._prompt, role="user"))
        try:
            if self.interrupted:
                return Ended("interrupted", 130)
            done: CommandResult = await self._sandbox.commands.run(
                **await self._command(schema), timeout=timeout, tag=self.run_id, on_stdout=self._stream.stdout,
                on_stderr=self._stream.stderr,
            )  # fmt: skip
        except STOPPED as stopped:
            await stop(self._sandbox, self.run_id)
            self._stream.end()
            return Ended("interrupted", 130, stopped=stopped)
        self._stream.end()
        status = self._status(done)
        output, wrong = await self._output(schema) if schema is not None else (None, None)
        if status == "failed" and not any(event.kind == "error" for event in self.events):
            said = done.stderr.strip()[-2000:] or f"ended with exit code {done.exit_code}"
            self._stream.add(Event("error", said))
        return Ended(status, done.exit_code, done.stdout, done.stderr, done.duration_ms, output, wrong)

    async def collect(self, process: AsyncProcess) -> Ended:
        """A run in the background, from what is kept of its output."""
        done = await process.wait()
        self._stream.stdout(done.stdout)
        self._stream.stderr(done.stderr)
        self._stream.end()
        return Ended(self._status(done), done.exit_code, done.stdout, done.stderr, done.duration_ms)

    def _status(self, done: CommandResult) -> RunStatus:
        if self.interrupted:
            return "interrupted"
        if done.error_class == "TIMEOUT":
            return "timed_out"
        return "completed" if done.exit_code == 0 else "failed"

    async def _output(self, schema: dict[str, Any]) -> tuple[Any, str | None]:
        try:
            value = json.loads(await self._sandbox.files.read(setup.RESULT))
        except (FileMissing, FileError):
            return None, f"the agent wrote no {setup.RESULT}"
        except ValueError as error:
            return None, f"{setup.RESULT} is not JSON: {error}"
        wrong = problem(schema, value)
        return (None, wrong) if wrong else (value, None)

    async def keep_events(self) -> None:
        """In the sandbox, so that the next checkpoint has them."""
        await self._sandbox.files.write(events.path_of(self.run_id), events.pack(self.events))


async def running(sandbox: AsyncSandbox) -> str | None:
    """The id of the run that goes on in the sandbox, whoever started it."""
    found = (one.tag for one in await sandbox.commands.list() if one.running and (one.tag or "").startswith(RUN))
    return next(found, None)


async def refuse_running(sandbox: AsyncSandbox) -> None:
    run_id = await running(sandbox)
    if run_id is not None:
        raise Busy(f"{run_id} is running in sandbox {sandbox.id}", "wait for it, or interrupt() it", run_id=run_id)


async def stop(sandbox: AsyncSandbox, run_id: str | None = None) -> bool:
    """End a run: asked first, killed after a while. False if there was none."""
    pids = [
        one.pid
        for one in await sandbox.commands.list()
        if one.running and (one.tag == run_id if run_id else (one.tag or "").startswith(RUN))
    ]
    for pid in pids:
        await _end(await sandbox.commands.connect(pid))
    return bool(pids)


async def _end(process: AsyncProcess) -> None:
    try:
        await process.kill(2)
        for _ in range(int(GRACE / 0.05)):
            if not (await process.info()).running:
                return
            await pause_for(0.05)
        await process.kill(9)
    except ProcessNotFound:
        return


async def prepare(sandbox: AsyncSandbox, options: Options, fresh: bool) -> None:
    """Folders of the mode in a fresh sandbox; what the user gave in any."""
    if fresh:
        for folder in setup.folders(options.workspace_mode):
            await sandbox.files.mkdir(folder)
    for name, text in options.spec.settings.items():
        if not await sandbox.files.exists(f"{HOME}/{name}"):
            await sandbox.files.write(f"{HOME}/{name}", text)
    for path, content in options.prepared.items():
        await sandbox.files.write(path, content)
    settings = options.mcp_path()
    if settings is not None and options.mcp_servers:
        before = await sandbox.files.read(settings) if await sandbox.files.exists(settings) else None
        await sandbox.files.write(settings, setup.mcp_file(options.spec, options.mcp_servers, before))


class AsyncPrivate:
    """Within this block the agent's files that may hold a key are not in the sandbox."""

    def __init__(self, sandbox: AsyncSandbox, paths: list[str], held: dict[str, bytes] | None = None) -> None:
        self._sandbox, self._paths = sandbox, paths
        self._held = dict(held or {})

    async def __aenter__(self) -> Self:
        for path in self._paths:
            try:
                self._held[path] = await self._sandbox.files.read(path)
            except (FileMissing, FileError):
                continue
            await self._sandbox.files.remove(path)
        return self

    def give_up(self) -> dict[str, bytes]:
        """What can't be put back now, for whoever does it later."""
        held, self._held = self._held, {}
        return held

    async def put_back(self) -> None:
        for path, content in self.give_up().items():
            await self._sandbox.files.write(path, content, mode=0o600)

    async def __aexit__(self, *_: object) -> None:
        await self.put_back()
