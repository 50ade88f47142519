"""The one layer that REST, the WebSocket protocol and E2B call. No HTTP in it: scopes and nouns in, the library's results out.

Whatever a scope does not see does not exist. State-changing work on one sandbox takes turns here, so that a queue of callers
waits in the loop and not in threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeVar

from sandkeep.checkpoints.catalog import Store
from sandkeep.errors import BadArgument, CheckpointNotFound, Denied, SandboxElsewhere, SandboxNotFound, SandkeepError
from sandkeep.model import CheckpointInfo, Limits, RestoreReport, SandboxInfo, SnapshotInfo, check_metadata
from sandkeep.runtime.pick import keeps_memory
from sandkeep.sandbox import AsyncSandbox, lifecycle, pausing
from sandkeep.sandbox._async.bridge import blocking
from sandkeep.server.egress import Egress, Rules
from sandkeep.server.gateway import Gateway
from sandkeep.server.hands import Hands, Reserved
from sandkeep.server.readiness import Readiness
from sandkeep.server.settings import Settings
from sandkeep.server.spaces import Spaces
from sandkeep.sessions import Database, Hosts, Keeper, Keys, Log, Page, Scope, Session, SessionState, Sweeper, Tokens
from sandkeep.sessions.records import check_json
from sandkeep.sessions.tables import sessions as rows

Level = Literal["memory", "relaunched", "files"]
T = TypeVar("T")
LINGER = 0.5


@dataclass(frozen=True)
class NewSandbox:
    """What a caller may say about a sandbox to be."""

    base: str = "host"
    runtime: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    limits: Limits = field(default_factory=Limits)
    network: Literal["none", "host"] = "none"
    cwd: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    project: str | None = None
    from_checkpoint: str | None = None
    require: Level = "files"
    auto_pause_timeout: float | None = None
    paused_expiry: float | None = None
    memory: bool | None = None  # whether it may sleep, so that its memory must; None: if it may by itself
    egress: dict[str, Any] | None = None  # rules; none is no way out


class Services:
    def __init__(self, settings: Settings, database: Database) -> None:
        self.settings = settings
        self.db = database
        self.spaces = Spaces(settings)
        self.gateway = Gateway(database, self.spaces, settings.storage_quota)
        self.hands = Hands(settings.home, self.spaces, database)
        self.keeper = Keeper(database, self.hands, settings.host_id, hosts=Hosts(database), linger=LINGER)
        self.sessions = self.keeper.sessions
        self.sweeper = Sweeper(self.keeper, interval=settings.sweep_interval, address=settings.address or None)
        self.keys, self.tokens, self.log = Keys(database), Tokens(database), Log(database)
        self.egress = Egress(settings, database, self.sessions, self.hands)
        self.hands.awake = self.egress.settle
        self.readiness = Readiness(settings)
        self._turns: dict[str, _Turn] = {}

    # who and what

    async def get(self, scope: Scope | None, id: str) -> Session:
        """The row; neither woken nor touched. The killed are gone."""
        try:
            session = await self.db.call(self.sessions.get, id, scope)
        except BadArgument as error:
            raise SandboxNotFound(f"no sandbox {id!r}", "list yours to see their ids") from error
        if session.state is SessionState.KILLED:
            raise SandboxNotFound(f"no sandbox {id}", "list yours to see their ids")
        return session

    async def find(self, scope: Scope, **query: Any) -> Page:
        return await self.db.call(self.sessions.find, scope, **query)

    @asynccontextmanager
    async def use(self, scope: Scope | None, id: str) -> AsyncIterator[AsyncSandbox]:
        """A running sandbox, woken if need be and not idle until the block ends."""
        async with self.keeper.use(id, await self.get(scope, id)) as session:
            yield await self.hands.handle(session)

    async def touch(self, scope: Scope, id: str) -> Session:
        await self.get(scope, id)
        return await self.keeper.touch(id)

    async def address(self, session: Session) -> str | None:
        """Of the server of another living host that runs it; None if there is none, or none is known."""
        if session.state is not SessionState.RUNNING or session.host in (None, self.keeper.host):
            return None
        return await self.db.call(self.keeper.hosts.address, session.host)

    async def info(self, session: Session) -> SandboxInfo | None:
        """What this host knows of it; None if it is not here."""
        if session.host != self.keeper.host:
            return None
        try:
            return await (await self.hands.handle(session)).info()
        except SandboxNotFound:
            return None

    # life

    async def create(self, scope: Scope, new: NewSandbox, request: str | None = None) -> Session:
        base = self._base(new)
        limits = {name: value for name, value in asdict(new.limits).items() if value is not None}
        policy = self._policy(new)
        runtime, why = await self._runtime(new, bool(policy["auto_pause_timeout"]))
        config = {
            "base": new.base,
            "runtime": runtime,
            "memory": why is not None,
            "network": new.network,
            "limits": limits,
            "secrets": sorted(new.secrets),
        }
        if new.egress is not None:
            config["egress"] = self._egress(new.egress, new.network)
        if new.from_checkpoint is not None:
            store = await blocking(self.spaces.store, scope.user, scope.place(new.project))
            found = await blocking(store.get, new.from_checkpoint)
            new, config["from_checkpoint"] = replace(new, from_checkpoint=found.id), found.id
        options = {
            "notes": [f"memory is not kept in sleep: {why}"] if why else [],
            "base": base, "runtime": runtime, "env": new.env, "secrets": new.secrets, "limits": new.limits, "network": new.network,
            "cwd": new.cwd, "metadata": new.metadata, "from_checkpoint": new.from_checkpoint, "require": new.require,
        }  # fmt: skip
        lifecycle.check_options(new.limits, new.network, None, new.cwd)
        lifecycle.check_variables("env", new.env)
        lifecycle.check_variables("secrets", new.secrets)
        check_metadata(new.metadata)
        return await self.keeper.create(
            self.hands.home.new_id(), scope, lambda session: self.hands.create(session, options), project=new.project,
            metadata=new.metadata, config=config, request=request, **policy,
        )  # fmt: skip

    async def _runtime(self, new: NewSandbox, sleeps: bool) -> tuple[str, str | None]:
        """Who may sleep and names no runtime gets what keeps memory, where that is healthy. Why not, or None if nobody asked."""
        runtime = new.runtime or self.settings.runtime
        if runtime != "auto" or not (sleeps if new.memory is None else new.memory):
            return runtime, None
        if new.network == "host":
            return runtime, "no runtime can with network='host'"
        why = await blocking(keeps_memory, self.settings.home, new.limits)
        return (runtime if why else "runsc"), why

    def _base(self, new: NewSandbox) -> str:
        if new.network == "host" and not self.settings.host_network:
            raise Denied(
                "this server gives no sandbox the host's network",
                "leave network out; ports are reached through the server",
            )
        if new.base == "host":
            return "host"
        try:
            return self.settings.bases[new.base]
        except KeyError:
            raise BadArgument(
                f"no base {new.base!r}", f"bases here: {', '.join(['host', *self.settings.bases])}"
            ) from None

    def _policy(self, new: NewSandbox) -> dict[str, float]:
        given = {"auto_pause_timeout": new.auto_pause_timeout, "paused_expiry": new.paused_expiry}
        usual = {"auto_pause_timeout": self.settings.auto_pause, "paused_expiry": self.settings.paused_expiry}
        return {name: usual[name] if value is None else value for name, value in given.items()}

    def _egress(self, told: dict[str, Any], network: str) -> dict[str, Any]:
        rules = Rules.of(told)
        if not self.settings.egress:
            raise Denied("this server gives no sandbox a way out", "leave egress out, or ask the server's operator")
        if network == "host":
            raise BadArgument("egress rules don't hold on the host's network", "leave network or egress out")
        return rules.as_dict()

    async def set_egress(self, scope: Scope | None, id: str, told: dict[str, Any] | None) -> Session:
        """Other rules, or none: no way out. They hold for the next connection; what they refuse is cut."""
        session = await self.get(scope, id)
        rules = None if told is None else self._egress(told, session.config.get("network", "none"))
        changed = await self.db.call(self.sessions.update, id, config={**session.config, "egress": rules})
        if changed.state is SessionState.RUNNING and changed.host == self.keeper.host:
            await self.egress.settle(changed)
        return changed

    async def update(self, scope: Scope, id: str, **changes: Any) -> Session:
        await self.get(scope, id)
        return await self.db.call(self.sessions.update, id, **changes)

    async def kill(self, scope: Scope | None, id: str) -> None:
        await self.get(scope, id)
        async with self._turn(id):
            await self.keeper.kill(id)

    async def pause(self, scope: Scope | None, id: str, *, memory: bool | None = None) -> Session:
        """With its memory where that can be saved, unless `memory` says otherwise."""
        await self.get(scope, id)
        async with self._turn(id):
            self.hands.asked[id] = memory
            try:
                return await self.keeper.pause(id)
            finally:
                del self.hands.asked[id]

    async def resume(
        self, scope: Scope | None, id: str, secrets: dict[str, str] | None = None, *, fail_over: bool = False
    ) -> Session:
        """With `fail_over` also one whose host is gone, from its last checkpoint."""
        await self.get(scope, id)
        self.hands.hold_secrets(id, lifecycle.check_variables("secrets", secrets))
        session = await (self.keeper.fail_over if fail_over else self.keeper.resume)(id)
        if session.host == self.keeper.host:
            await self.hands.real(id)
        if secrets:
            async with self.use(scope, id) as sandbox:
                await sandbox._link.call("secrets_set", secrets=secrets)
        return session

    async def fork(
        self, scope: Scope, id: str, count: int = 1, *, secrets: dict[str, str] | None = None, memory: bool = False
    ) -> list[Session | SandkeepError]:
        """One entry each: the new sandbox's row, or what stopped it."""
        lifecycle.check_count(count)
        lifecycle.check_variables("secrets", secrets)
        async with self.use(scope, id), self._turn(id):
            parent = await self.get(scope, id)
            ids = [self.hands.home.new_id() for _ in range(count)]
            machine = self.hands.machine(parent, Reserved(self.hands.home.path, ids))
            held = secrets if secrets is not None else await blocking(machine.secrets)
            barrier = asyncio.Barrier(count)
            made: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

            async def make(session: Session) -> None:
                if await barrier.wait() == 0:
                    await _settle(made, self._fork(machine, ids, held, memory=memory))
                outcome = (await asyncio.shield(made))[session.id]
                if isinstance(outcome, SandkeepError):
                    raise outcome
                self.hands.hold_secrets(session.id, held)
                await self.egress.settle(session)

            async def one(child: str) -> Session | SandkeepError:
                try:
                    return await self.keeper.create(
                        child, scope, make, project=parent.project, metadata=parent.metadata,
                        config={**parent.config, "secrets": sorted(held), "forked_from": id},
                        auto_pause_timeout=parent.auto_pause_timeout, paused_expiry=parent.paused_expiry,
                    )  # fmt: skip
                except asyncio.BrokenBarrierError:
                    return SandkeepError("not all of the forks could be recorded", "try again with fewer")
                except SandkeepError as error:
                    await barrier.abort()
                    return error

            return list(await asyncio.gather(*map(one, ids)))

    async def _fork(self, machine: Any, ids: list[str], held: dict[str, str], *, memory: bool) -> dict[str, Any]:
        verb = pausing.fork if memory else lifecycle.fork
        return dict(zip(ids, await blocking(verb, machine, len(ids), held), strict=True))

    async def alone(self, id: str, work: Callable[[], Awaitable[T]]) -> T:
        """Work that changes one sandbox, when its turn comes."""
        async with self._turn(id):
            return await work()

    # save points

    async def snapshot(self, scope: Scope, id: str, comment: str = "") -> SnapshotInfo:
        async with self.use(scope, id) as sandbox, self._turn(id):
            made = await sandbox.snapshot(comment)
            await self.db.call(self.log.event, id, "snapshot", id=made.id, comment=comment)
            return made

    async def snapshots(self, scope: Scope, id: str) -> list[SnapshotInfo]:
        session = self.here(await self.get(scope, id))
        return await (await self.hands.handle(session)).snapshots()

    async def delete_snapshot(self, scope: Scope, id: str, snapshot: str) -> None:
        session = self.here(await self.get(scope, id))
        async with self._turn(id):
            await (await self.hands.handle(session)).delete_snapshot(snapshot)
            await self.db.call(self.log.event, id, "snapshot_deleted", id=snapshot)

    def here(self, session: Session) -> Session:
        if session.host != self.keeper.host:
            raise SandboxElsewhere(
                f"{session.id} is on host {session.host}", "ask that host's server", host=session.host
            )
        return session

    async def restore(
        self, scope: Scope, id: str, to: str, *, keep: bool = False, require: Level = "files"
    ) -> RestoreReport:
        async with self.use(scope, id) as sandbox, self._turn(id):
            report = await sandbox.restore(to, keep=keep, require=require)
            await self.egress.settle(await self.get(scope, id), again=True)
            return report

    async def checkpoint(self, scope: Scope | None, id: str, /, **words: Any) -> CheckpointInfo:
        check_json(words.get("metadata") or {}, "metadata")
        async with self.use(scope, id) as sandbox, self._turn(id):
            made = await sandbox.checkpoint(**words)
            if made.scope == "all" and not made.excluded:
                store = sandbox._held.store
                url = None if store is None else store.spec.url
                await self.db.call(self.sessions.saved, id, self.keeper.host, made.id, url)
            return made

    async def stores(self, scope: Scope, project: str | None = None) -> list[Store]:
        """The stores of checkpoints that a scope sees: its project's, or all of its user's."""
        if scope.project is not None or project is not None:
            return [await blocking(self.spaces.store, scope.user, scope.place(project))]
        projects = await self.db.call(self._projects, scope.user)
        return [await blocking(self.spaces.store, scope.user, one) for one in [None, *projects]]

    def _projects(self, user: str) -> list[str]:
        from sqlalchemy import select

        with self.db.read() as connection:
            found = connection.execute(select(rows.c.project).where(rows.c.owner == user).distinct()).scalars()
            return sorted(name for name in found if name is not None)

    async def store_with(
        self, scope: Scope, checkpoint: str, project: str | None = None
    ) -> tuple[Store, CheckpointInfo]:
        """The store that has a checkpoint, among those that the scope sees."""
        for store in await self.stores(scope, project):
            try:
                return store, await blocking(store.get, checkpoint)
            except CheckpointNotFound as error:
                missing = error
        raise missing

    async def drain(self) -> None:
        """Put to sleep what runs here, as far as the time allows; what can't sleep, or must never, goes on running."""
        slots = asyncio.Semaphore(4)

        async def one(session: Session) -> None:
            async with slots:
                try:
                    await self.pause(None, session.id)
                except SandkeepError as error:
                    await self.db.call(self.log.event, session.id, "drain_failed", **error.as_dict())

        running = await self.db.call(self.sessions.at, self.keeper.host, frozenset({SessionState.RUNNING}))
        tasks = [asyncio.create_task(one(session)) for session in running if session.auto_pause_timeout]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=self.settings.drain_seconds)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    @asynccontextmanager
    async def _turn(self, id: str) -> AsyncIterator[None]:
        turn = self._turns.setdefault(id, _Turn())
        turn.wanted += 1
        try:
            async with turn.lock:
                yield
        finally:
            turn.wanted -= 1
            if not turn.wanted:
                del self._turns[id]


@dataclass
class _Turn:
    """Who changes one sandbox now, and how many want to."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    wanted: int = 0


async def _settle(future: asyncio.Future[Any], work: Any) -> None:
    try:
        future.set_result(await work)
    except BaseException as error:
        future.set_exception(error)
        if not isinstance(error, SandkeepError):
            raise
