"""Several servers on one database: who resumes, who removes, who takes over from the dead."""

from __future__ import annotations

import asyncio

import pytest

from sandkeep.errors import (
    Busy,
    HostGone,
    RuntimeFailed,
    SandboxDead,
    SandboxElsewhere,
    StateConflict,
    StoreUnreachable,
)
from sandkeep.sessions import SessionState
from sessions_kit import ANN, HOUR, World, asleep, idle, kinds, run, running

pytest_plugins = ["postgres", "sessions_kit"]

S = SessionState


def test_many_touches_on_two_servers_resume_once(world: World) -> None:
    async def go() -> None:
        a, at_a = world.host("a")
        b, at_b = world.host("b")
        await asleep(world, a, at_a)
        woken = await asyncio.gather(*(keeper.wake("x") for keeper in (a, b) * 10))
        assert {session.state for session in woken} == {S.RUNNING}
        assert at_a.named("resume") + at_b.named("resume") == 1

    run(go())


def test_a_failed_resume_is_told_to_all_who_wait_and_stays_asleep(world: World) -> None:
    async def go() -> None:
        a, at_a = world.host("a")
        b, at_b = world.host("b")
        await running(world, a, at_a)
        at_a.work("x")
        await a.pause("x")
        held, entered = asyncio.Event(), asyncio.Event()

        async def hold(step: str) -> None:
            entered.set()
            await held.wait()

        at_a.step, at_a.fail["resume"] = hold, StoreUnreachable("away")
        first = asyncio.create_task(a.wake("x"))
        await entered.wait()
        others = [asyncio.create_task(keeper.wake("x")) for keeper in (a, a, b)]
        await asyncio.sleep(0.3)
        held.set()
        done = await asyncio.gather(first, *others, return_exceptions=True)
        assert [type(one) for one in done[:3]] == [StoreUnreachable] * 3
        if not isinstance(done[3], StoreUnreachable):  # the other server came late enough to try by itself
            assert at_b.named("resume") == 1
            return
        session = a.sessions.get("x")
        assert (session.state, session.failures) == (S.PAUSED, 1)
        assert kinds(world) == ["resume_failed"]
        await b.wake("x")
        assert at_b.work("x") == 2
        assert b.sessions.get("x").failures == 0

    run(go())


def test_uses_of_a_dead_server_keep_nothing_awake(world: World) -> None:
    async def go() -> None:
        keeper, files = world.host("a")
        await running(world, keeper, files)
        with pytest.raises(StateConflict):
            keeper.sessions.begin_use("x", "b")
        keeper.sessions.begin_use("x", "a")
        world.age("x", HOUR)
        assert keeper.sessions.idle("a") == []
        world.die("a")
        assert [session.id for session in keeper.sessions.idle("a")] == ["x"]
        world.host("a")
        assert keeper.sessions.used_by("a") == set()

    run(go())


def test_a_sandbox_on_another_living_host_is_elsewhere(world: World) -> None:
    async def go() -> None:
        a, at_a = world.host("a")
        b, _ = world.host("b")
        await running(world, a, at_a)
        assert (await b.wake("x")).host == "a"
        with pytest.raises(SandboxElsewhere) as said:
            async with b.use("x"):
                pass
        assert said.value.details["host"] == "a"
        with pytest.raises(SandboxElsewhere):
            await b.pause("x")

    run(go())


def test_killed_by_one_server_removed_by_the_one_that_has_it(world: World) -> None:
    async def go() -> None:
        a, at_a = world.host("a")
        b, at_b = world.host("b")
        await running(world, a, at_a)
        session = await b.kill("x")
        assert (session.state, session.removed) == (S.KILLED, False)
        sweeper = world.sweeper(a)
        at_a.fail["remove"] = RuntimeFailed("stuck")
        await sweeper.sweep()
        assert a.sessions.get("x").failures == 1
        assert kinds(world) == ["removal_failed"]
        at_a.fail.clear()
        world.age("x", HOUR, "next_try")
        await sweeper.sweep()
        assert a.sessions.get("x").removed
        assert await at_a.real("x") is None
        assert at_b.calls == []

    run(go())


@pytest.mark.parametrize("verb", ["make", "pause", "resume"])
def test_killed_from_elsewhere_in_the_middle_of_an_operation_leaves_nothing(world: World, verb: str) -> None:
    async def go() -> None:
        keeper, files = world.host("a")
        other, _ = world.host("b")
        if verb != "make":
            await running(world, keeper, files)
        if verb == "resume":
            await keeper.pause("x")

        async def kill(step: str) -> None:
            if step == f"before {verb}":
                await other.kill("x")

        files.step = kill
        with pytest.raises((SandboxDead, StateConflict)):
            if verb == "make":
                await keeper.create("x", ANN, files.make)
            else:
                await (keeper.pause if verb == "pause" else keeper.wake)("x")
        session = keeper.sessions.get("x")
        assert (session.state, session.removed) == (S.KILLED, True)
        assert await files.real("x") is None

    run(go())


@pytest.mark.parametrize("home", ["a", "b"], ids=["same machine", "another machine"])
def test_a_stale_resuming_of_a_killed_server_is_taken_over(world: World, home: str) -> None:
    async def go() -> None:
        a, at_a = world.host("a")
        await running(world, a, at_a)
        at_a.work("x")
        session = await a.pause("x")
        a.sessions.move("x", S.PAUSED, S.RESUMING, generation=session.generation, host="a")
        b, at_b = world.host("b", home=home)
        world.die("a")
        woken = await b.wake("x")
        assert (woken.state, woken.host) == (S.RUNNING, "b")
        assert at_b.work("x") == 2
        assert "adopted" in kinds(world)

    run(go())


@pytest.mark.parametrize("effect", [False, True], ids=["before it slept", "after it slept"])
def test_a_stale_pausing_of_a_killed_server_is_taken_over(world: World, effect: bool) -> None:
    async def go() -> None:
        a, at_a = world.host("a")
        await running(world, a, at_a)
        at_a.work("x")
        session = a.sessions.get("x")
        journal = a.sessions.move("x", S.RUNNING, S.PAUSING, generation=session.generation)
        if effect:
            await at_a.pause(journal)
        b, at_b = world.host("b", home="a")
        world.die("a")
        sweeper = world.sweeper(b)
        await sweeper.sweep()
        assert b.sessions.get("x").state is (S.PAUSED if effect else S.RUNNING)
        assert (await b.wake("x")).host == "b"
        assert at_b.work("x") == 2

    run(go())


def test_all_of_a_killed_servers_sandboxes_go_on_on_the_same_machine(world: World) -> None:
    async def go() -> None:
        a, at_a = world.host("a")
        ids = [f"s{n}" for n in range(12)]
        for n, id in enumerate(ids):
            await (running if n % 2 else asleep)(world, a, at_a, id)
        b, at_b = world.host("b", home="a")
        world.die("a")
        woken = await asyncio.gather(*(b.wake(id) for id in ids))
        assert {(session.state, session.host) for session in woken} == {(S.RUNNING, "b")}
        assert at_b.named("resume") == 6
        with pytest.raises(SandboxElsewhere):
            async with a.use("s1"):
                pass

    run(go())


def test_what_ran_on_a_dead_machine_is_not_rolled_back_in_silence(world: World) -> None:
    async def go() -> None:
        a, at_a = world.host("a")
        await running(world, a, at_a, "x")
        at_a.work("x")
        await a.pause("x")
        await a.wake("x")
        at_a.work("x")
        await running(world, a, at_a, "bare")
        b, at_b = world.host("b")
        world.die("a")
        for id in ("x", "bare"):
            with pytest.raises(HostGone):
                await b.wake(id)
        assert b.sessions.get("x").host == "a"
        went_on = await b.fail_over("x")
        assert (went_on.state, went_on.host) == (S.RUNNING, "b")
        assert at_b.work("x") == 2
        assert "failed_over" in kinds(world)
        with pytest.raises(HostGone):
            await b.fail_over("bare")

    run(go())


def test_a_living_host_is_never_taken_over(world: World) -> None:
    async def go() -> None:
        a, at_a = world.host("a")
        b, _ = world.host("b", home="a", patience=0.2)
        await running(world, a, at_a)
        session = a.sessions.get("x")
        with pytest.raises(StateConflict):
            b.sessions.adopt(session, "b")
        await a.pause("x")
        await a.wake("x")
        with pytest.raises(StateConflict):
            await b.fail_over("x")
        now = a.sessions.get("x")
        a.sessions.move("x", S.RUNNING, S.PAUSING, generation=now.generation)
        with pytest.raises(Busy):
            await b.wake("x")
        assert a.sessions.get("x").host == "a"

    run(go())


def test_an_overtaken_resume_throws_its_copy_away(world: World) -> None:
    async def go() -> None:
        a, at_a = world.host("a")
        b, at_b = world.host("b")
        await asleep(world, a, at_a)

        async def overtake(step: str) -> None:
            if step == "after resume":
                world.die("a")
                await b.wake("x")

        at_a.step = overtake
        session = await a.wake("x")
        assert session.host == "b"
        assert at_a.named("discard") == 1
        assert await at_a.real("x") is None
        assert at_b.work("x") == 1

    run(go())


def test_after_an_outage_nobody_is_called_dead_too_early(world: World) -> None:
    a, _ = world.host("a")
    b, _ = world.host("b")
    world.die("a")
    assert not b.hosts.alive("a")
    b.hosts.steady_since = float("inf")
    assert b.hosts.alive("a")
    a.hosts.leave("a", world.incarnations["a"])
    assert not b.hosts.alive("a")
    assert {server.host: server.alive for server in b.hosts.servers()} == {"a": False, "b": True}


def test_a_second_server_under_the_same_host_id_is_noticed(world: World) -> None:
    async def go() -> None:
        keeper, files = world.host("a")
        sweeper = world.sweeper(keeper)
        await idle(world, keeper, files)
        world.host("a")
        with pytest.raises(StateConflict):
            await sweeper.sweep()
        assert files.named("pause") == 0

    run(go())
