"""The database itself: migrations, several openers at once, an outage, and servers killed at every step."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import text

from postgres import Postgres
from sandkeep.errors import BadArgument, DatabaseUnreachable, Unsupported
from sandkeep.sessions import Database, Hosts, Keeper, Keys, Sessions, SessionState, Sweeper
from sandkeep.sessions.tables import metadata
from sessions_kit import ANN, Files, World, run, until

pytest_plugins = ["postgres", "sessions_kit"]

S = SessionState
STEPS = 16


def child(body: str, *args: str) -> None:
    """Run this module's function in a process of its own, which may fork: it has no threads yet."""
    tests = str(Path(__file__).parent)
    script = f"import sys; sys.path.insert(0, {tests!r}); import test_sessions_database as t; t.{body}(*sys.argv[1:])"
    done = subprocess.run([sys.executable, "-c", script, *args], capture_output=True, timeout=150)
    assert done.returncode == 0, done.stderr.decode()


def in_forks(count: int, work: object) -> list[int]:
    """The exit status of each of several forks that run `work(n)` at once."""
    pids = []
    for n in range(count):
        if not (pid := os.fork()):
            status = 1
            try:
                work(n)  # type: ignore[operator]
                status = 0
            finally:
                os._exit(status)
        pids.append(pid)
    return [os.waitpid(pid, 0)[1] for pid in pids]


@pytest.fixture(params=["sqlite", "postgresql"])
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/new/sessions%20.db"
    server: Postgres = request.getfixturevalue("postgres")
    return server.url(server.create())


def open_and_use(url: str) -> None:
    def work(n: int) -> None:
        database = Database(url)
        database.open()
        Keys(database).create(f"user{n}")

    assert in_forks(4, work) == [0] * 4


def test_servers_that_start_at_once_on_an_empty_database(empty: str) -> None:
    child("open_and_use", empty)
    database = Database(empty)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: database.open(), range(4)))
    assert {key.user for key in Keys(database).all()} == {f"user{n}" for n in range(4)}
    with database.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    with database.write() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(Unsupported):
        database.open()
    database.close()


def live_until_killed(url: str, folder: str) -> None:
    """For each step of a sandbox's life, a server that is killed with -9 at that step."""

    def work(n: int) -> None:
        files = Files(Path(folder) / f"h{n}", Path(folder) / "store")
        left = n

        async def step(name: str) -> None:
            nonlocal left
            (files.home / "at").write_text(name)
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

        files.step = step

        async def life() -> None:
            keeper = Keeper(Database(url).open(), files, f"h{n}")
            keeper.hosts.join(f"h{n}")
            await keeper.create(f"s{n}", ANN, files.make)
            for _ in range(3):
                (files.home / "worked").write_text(str(files.work(f"s{n}")))
                await keeper.pause(f"s{n}")
                await keeper.wake(f"s{n}")
            await keeper.kill(f"s{n}")

        asyncio.run(life())

    assert in_forks(STEPS, work) == [signal.SIGKILL] * STEPS


def test_a_server_killed_at_any_step_comes_back_with_the_same_sandboxes(url: str, tmp_path: Path) -> None:
    child("live_until_killed", url, str(tmp_path))
    database = Database(url).open()

    async def check(n: int) -> str:
        files = Files(tmp_path / f"h{n}", tmp_path / "store")
        id, at = f"s{n}", (files.home / "at").read_text()
        keeper = Keeper(database, files, f"h{n}")
        sweeper = Sweeper(keeper)
        await sweeper.start()
        session = keeper.sessions.get(id)
        real = await files.real(id)
        if at.endswith("remove"):
            assert (session.state, session.removed, real) == (S.KILLED, True, None)
        elif at == "before make":
            assert (session.state, real) == (S.ERROR, None)
        else:
            assert real is not None
            assert session.state == real.state.upper()
            assert "resume" not in files.calls
            await keeper.wake(id)
            worked = files.home / "worked"
            assert files.work(id) == (int(worked.read_text()) if worked.exists() else 0) + 1
        await sweeper.stop()
        return at

    async def check_all() -> set[str]:
        return {await check(n) for n in range(STEPS)}

    seen = run(check_all())
    assert seen == {f"{when} {verb}" for when in ("before", "after") for verb in ("make", "pause", "resume", "remove")}
    database.close()


def test_postgresql_gone_and_back(postgres: Postgres, tmp_path: Path) -> None:
    database = Database(postgres.url(postgres.create())).open()
    keeper, files = World(database, tmp_path).host("a")
    sweeper = Sweeper(keeper, interval=0.05)

    async def go() -> None:
        await sweeper.start()
        await keeper.create("x", ANN, files.make)
        await keeper.create("y", ANN, files.make, auto_pause_timeout=0.2)

        async def outage(step: str) -> None:
            if step == "after pause" and not sweeper.troubles:
                postgres.stop()

        files.step = outage
        async with keeper.use("x"):
            files.work("x")
            await until(lambda: {"heartbeat", "sweep"} <= sweeper.troubles.keys())
            assert all(isinstance(error, DatabaseUnreachable) for error in sweeper.troubles.values())
            with pytest.raises(DatabaseUnreachable):
                await keeper.wake("x")
        assert not (files.home / "y").exists()
        postgres.start()
        await until(lambda: not sweeper.troubles)
        await until(lambda: keeper.sessions.get("y").state is S.PAUSED)
        await until(lambda: not keeper.sessions.used_by("a"))
        assert files.named("pause") == 1
        assert (await keeper.wake("y")).state is S.RUNNING
        await sweeper.stop()

    try:
        run(go())
    finally:
        postgres.stop()
        postgres.start()
        database.close()


def test_an_unreachable_database_is_said_without_its_password(tmp_path: Path) -> None:
    database = Database("postgresql://ann:hunter2@127.0.0.1:1/sessions")
    with pytest.raises(DatabaseUnreachable) as said:
        database.open()
    assert "127.0.0.1:1/sessions" in str(said.value)
    assert "hunter2" not in str(said.value)
    assert "127.0.0.1" not in json.dumps(said.value.as_dict()) + said.value.told()  # what a caller from outside hears
    database.close()
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "s.db", tmp_path):
        database = Database(f"sqlite:///{path}")
        with pytest.raises(DatabaseUnreachable) as said:
            database.open()
        assert str(path) in str(said.value)
        assert str(tmp_path) not in json.dumps(said.value.as_dict()) + said.value.told()
        database.close()


@pytest.mark.parametrize(
    "url", ["", "nonsense", "mysql://h/d", "sqlite://", "sqlite:///:memory:", "http://u:hunter2@h"]
)
def test_an_address_of_no_known_kind_is_refused(url: str) -> None:
    with pytest.raises(BadArgument) as said:
        Database(url)
    assert "hunter2" not in str(said.value)


def test_postgresql_over_tcp(postgres: Postgres) -> None:
    database = Database(postgres.url(postgres.create(), tcp=True)).open()
    assert Sessions(database, Hosts(database)).create("x", ANN, host="a").generation == 1
    database.close()


def test_the_sqlite_file_is_its_owners_alone(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/s.db").open()
    Keys(database).create("ann")
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    database.close()


def test_many_writers_lose_nothing(url: str) -> None:
    """Two servers' connections, eight threads each: every write is there and none says that the database is locked."""
    databases = [Database(url).open() for _ in range(2)]
    ready = threading.Barrier(16)

    def work(n: int) -> None:
        rows = Sessions(databases[n % 2], Hosts(databases[n % 2]))
        ready.wait(60)
        for turn in range(5):
            session = rows.create(f"s{n}-{turn}", ANN, host="a")
            session = rows.move(session.id, S.CREATING, S.RUNNING, generation=session.generation)
            rows.begin_use(session.id, "a")
            rows.end_use(session.id, "a")
            rows.move(session.id, S.RUNNING, S.PAUSING, generation=session.generation)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(16)))
    rows = Sessions(databases[0], Hosts(databases[0]))
    assert len(rows.find(states=frozenset({S.PAUSING}), limit=1000).sessions) == 80
    for database in databases:
        database.close()
