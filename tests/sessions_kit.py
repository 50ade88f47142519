"""For the tests of sessions: both databases as one fixture, and sandboxes that are files.

A sandbox here is a number in a file that grows as it is worked with. Its home folder is one host's; the store is shared.
Each effect is one atomic rename, so a process can be killed between any two.

(PYTEST_DONT_REWRITE: test modules import this before pytest learns that it is a plugin.)
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from sqlalchemy import update

from postgres import Postgres
from sandkeep.sessions import Database, Hosts, Keeper, Log, Reality, Scope, Session, Slept, Sweeper
from sandkeep.sessions.tables import servers, sessions

T = TypeVar("T")
ANN = Scope("ann")
HOUR = 3600.0
_template: str | None = None


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of a fresh database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/sessions.db"
    global _template
    server: Postgres = request.getfixturevalue("postgres")
    if _template is None:
        name = server.create()
        made = Database(server.url(name))
        made.open()
        made.close()
        _template = name
    return server.url(server.create(_template))


@pytest.fixture
def db(url: str) -> Iterator[Database]:
    database = Database(url)
    database.open()
    yield database
    database.close()


class Files:
    """A `Sandboxes` of files, with a hook before and after each effect."""

    def __init__(self, home: Path, store: Path) -> None:
        self.home, self.store = home, store
        home.mkdir(exist_ok=True)
        store.mkdir(exist_ok=True)
        self.calls: list[str] = []
        self.fail: dict[str, Exception] = {}
        self.step: Callable[[str], Awaitable[None]] = _nothing

    def named(self, verb: str) -> int:
        return self.calls.count(verb)

    async def make(self, session: Session) -> None:
        await self._do("make", lambda: _write(self.home / session.id, "0"))

    def work(self, id: str) -> int:
        """Something happens inside; only a running one can."""
        value = int((self.home / id).read_text()) + 1
        _write(self.home / id, str(value))
        return value

    async def pause(self, session: Session) -> Slept:
        checkpoint = uuid.uuid4().hex

        def sleep() -> None:
            if (self.home / session.id).exists():
                _write(self.store / checkpoint, (self.home / session.id).read_text())
                _write(self.home / f"{session.id}.paused", checkpoint)
                (self.home / session.id).unlink()

        await self._do("pause", sleep)
        return Slept((self.home / f"{session.id}.paused").read_text())

    async def resume(self, session: Session) -> None:
        def awake() -> None:
            _write(self.home / session.id, (self.store / str(session.checkpoint)).read_text())
            (self.home / f"{session.id}.paused").unlink(missing_ok=True)

        await self._do("resume", awake)

    async def remove(self, session: Session) -> None:
        await self._do("remove", lambda: self._drop(session.id))

    async def discard(self, session: Session) -> None:
        await self._do("discard", lambda: self._drop(session.id))

    async def real(self, id: str) -> Reality | None:
        if (self.home / id).exists():
            return Reality("running")
        if (self.home / f"{id}.paused").exists():
            return Reality("paused", (self.home / f"{id}.paused").read_text())
        return None

    def _drop(self, id: str) -> None:
        (self.home / id).unlink(missing_ok=True)
        (self.home / f"{id}.paused").unlink(missing_ok=True)

    async def _do(self, verb: str, effect: Callable[[], None]) -> None:
        self.calls.append(verb)
        await self.step(f"before {verb}")
        if error := self.fail.get(verb):
            raise error
        effect()
        await self.step(f"after {verb}")


async def _nothing(step: str) -> None:
    await asyncio.sleep(0)


def _write(path: Path, text: str) -> None:
    fresh = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    fresh.write_text(text)
    os.replace(fresh, path)


class World:
    """Hosts on one database, each a keeper with its sandboxes."""

    def __init__(self, db: Database, folder: Path) -> None:
        self.db = db
        self.folder = folder
        self.incarnations: dict[str, str] = {}

    def host(self, name: str = "a", *, home: str | None = None, **options: Any) -> tuple[Keeper, Files]:
        files = Files(self.folder / (home or name), self.folder / "store")
        hosts = Hosts(self.db)
        self.incarnations[name] = hosts.join(name)
        hosts.steady_since = float("-inf")
        return Keeper(self.db, files, name, hosts=hosts, **options), files

    def sweeper(self, keeper: Keeper, **options: Any) -> Sweeper:
        """A sweeper of a host that has joined; it sweeps when told."""
        sweeper = Sweeper(keeper, **options)
        sweeper._incarnation = self.incarnations[keeper.host]
        return sweeper

    def age(self, id: str, seconds: float, *columns: str) -> None:
        """Let time have passed for one session."""
        shifted = {name: sessions.c[name] - seconds for name in columns or ("last_activity",)}
        with self.db.write() as connection:
            connection.execute(update(sessions).where(sessions.c.id == id).values(**shifted))

    def die(self, host: str) -> None:
        """A host stops without a word: its heartbeat is old."""
        with self.db.write() as connection:
            connection.execute(update(servers).where(servers.c.host == host).values(heartbeat=1.0))


@pytest.fixture
def world(db: Database, tmp_path: Path) -> World:
    return World(db, tmp_path)


def run(work: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(120):
            return await work

    return asyncio.run(bounded())


async def until(true: Callable[[], bool]) -> None:
    """Poll; the test's own time-out ends it if it never comes."""
    while not true():
        await asyncio.sleep(0.01)


async def running(world: World, keeper: Keeper, files: Files, id: str = "x", **fields: Any) -> None:
    await keeper.create(id, ANN, files.make, **fields)


async def idle(world: World, keeper: Keeper, files: Files, id: str = "x", **fields: Any) -> None:
    await running(world, keeper, files, id, **fields)
    world.age(id, HOUR)


async def asleep(world: World, keeper: Keeper, files: Files, id: str = "x", **fields: Any) -> None:
    await running(world, keeper, files, id, **fields)
    await keeper.pause(id)


def kinds(world: World, id: str = "x") -> list[str]:
    return [event.kind for event in Log(world.db).events(id)]
