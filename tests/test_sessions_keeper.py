"""The keeper and the sweeper: sleep when idle, wake when touched, once, on one host or several, and nothing lost.

The first half has one test for each fault of the forerunner, by name.
"""

from __future__ import annotations

import asyncio

import pytest

from sandkeep.errors import (
    BadArgument,
    Busy,
    HostGone,
    RuntimeFailed,
    SandboxDead,
    SandboxElsewhere,
    SandboxNotFound,
    StateConflict,
    StoreUnreachable,
)
from sandkeep.sessions import Keeper, Log, Scope, SessionState, Sweeper
from sessions_kit import ANN, Files, World, run, until

pytest_plugins = ["postgres", "sessions_kit"]

S = SessionState
HOUR = 3600.0


async def running(world: World, keeper: Keeper, files: Files, id: str = "x", **fields: object) -> None:
    await keeper.create(id, ANN, files.make, **fields)


async def idle(world: World, keeper: Keeper, files: Files, id: str = "x", **fields: object) -> None:
    await running(world, keeper, files, id, **fields)
    world.age(id, HOUR)


async def asleep(world: World, keeper: Keeper, files: Files, id: str = "x", **fields: object) -> None:
    await running(world, keeper, files, id, **fields)
    await keeper.pause(id)


def kinds(world: World, id: str = "x") -> list[str]:
    return [event.kind for event in Log(world.db).events(id)]


def test_fault_activity_between_the_read_and_the_pause_is_ignored(world: World) -> None:
    async def go() -> None:
        keeper, files = world.host()
        await idle(world, keeper, files)
        (read,) = keeper.sessions.idle("a")
        await keeper.touch("x")
        with pytest.raises(StateConflict):
            await keeper.pause_idle(read)
        assert keeper.sessions.get("x").state is S.RUNNING
        assert files.named("pause") == 0

    run(go())


def test_fault_a_command_in_flight_is_paused(world: World) -> None:
    async def go() -> None:
        keeper, files = world.host()
        sweeper = world.sweeper(keeper)
        await running(world, keeper, files)
        async with keeper.use("x"), keeper.use("x"):
            world.age("x", HOUR)
            await sweeper.sweep()
            assert keeper.sessions.get("x").state is S.RUNNING
        await sweeper.sweep()
        assert keeper.sessions.get("x").state is S.RUNNING  # its end was activity
        world.age("x", HOUR)
        await sweeper.sweep()
        assert keeper.sessions.get("x").state is S.PAUSED

    run(go())


def test_fault_a_command_seen_only_under_the_sandboxes_lock(world: World) -> None:
    async def go() -> None:
        keeper, files = world.host()
        await idle(world, keeper, files)
        (read,) = keeper.sessions.idle("a")
        files.fail["pause"] = Busy("a command runs")
        with pytest.raises(Busy):
            await keeper.pause_idle(read)
        session = keeper.sessions.get("x")
        assert (session.state, session.failures, session.last_error) == (S.RUNNING, 0, None)
        assert session.last_activity > read.last_activity

    run(go())


def test_fault_a_resume_during_the_pause_is_overwritten(world: World) -> None:
    """A touch that comes in the middle of a pause waits for it and then wakes the sandbox; nothing is overwritten."""

    async def go() -> None:
        keeper, files = world.host()
        await running(world, keeper, files)
        files.work("x")
        held, entered = asyncio.Event(), asyncio.Event()

        async def hold(step: str) -> None:
            if step == "before pause":
                entered.set()
                await held.wait()

        files.step = hold
        pausing = asyncio.create_task(keeper.pause("x"))
        await entered.wait()
        assert keeper.sessions.get("x").state is S.PAUSING
        touching = asyncio.create_task(keeper.touch("x"))
        await asyncio.sleep(0)
        held.set()
        await asyncio.gather(pausing, touching)
        assert keeper.sessions.get("x").state is S.RUNNING
        assert files.work("x") == 2

    run(go())


def test_fault_resuming_does_not_touch_the_row(world: World) -> None:
    async def go() -> None:
        keeper, files = world.host()
        await asleep(world, keeper, files)
        world.age("x", HOUR)
        before = keeper.sessions.get("x")
        after = await keeper.wake("x")
        assert after.state is S.RUNNING
        assert after.last_activity > before.last_activity
        assert after.paused_at is None
        assert keeper.sessions.idle("a") == []

    run(go())


def test_fault_killed_becomes_running_again(world: World) -> None:
    async def go() -> None:
        keeper, files = world.host()
        await asleep(world, keeper, files)
        await keeper.kill("x")
        for verb in (keeper.wake, keeper.resume, keeper.touch, keeper.pause, keeper.fail_over):
            with pytest.raises(SandboxDead):
                await verb("x")
        session = keeper.sessions.get("x")
        assert (session.state, session.removed) == (S.KILLED, True)
        assert await files.real("x") is None
        assert (await keeper.kill("x")).state is S.KILLED

    run(go())


def test_fault_a_crash_between_pause_and_write_resumes_only_to_pause_again(world: World) -> None:
    async def go() -> None:
        keeper, files = world.host()
        await running(world, keeper, files)
        files.work("x")
        session = keeper.sessions.get("x")
        journal = keeper.sessions.move("x", S.RUNNING, S.PAUSING, generation=session.generation)
        slept = await files.pause(journal)
        again, reborn = world.host()
        await Sweeper(again).reconcile()
        found = again.sessions.get("x")
        assert (found.state, found.checkpoint) == (S.PAUSED, slept.checkpoint)
        assert reborn.calls == []
        await again.wake("x")
        assert reborn.work("x") == 2

    run(go())


def test_fault_the_sandbox_is_created_before_its_row(world: World) -> None:
    async def go() -> None:
        keeper, files = world.host()

        async def make(session: object) -> None:
            assert keeper.sessions.get("x").state is S.CREATING
            await files.make(session)  # type: ignore[arg-type]

        assert (await keeper.create("x", ANN, make)).state is S.RUNNING

        async def broken(session: object) -> None:
            raise RuntimeFailed("no")

        with pytest.raises(RuntimeFailed):
            await keeper.create("y", ANN, broken)
        lost = keeper.sessions.get("y")
        assert lost.state is S.ERROR
        assert isinstance(lost.error, RuntimeFailed)
        with pytest.raises(BadArgument):
            await keeper.create("../z", ANN, files.make)
        assert files.named("make") == 1

    run(go())


def test_fault_nobody_reports_activity(world: World) -> None:
    """Use is activity by itself, without any explicit call."""

    async def go() -> None:
        keeper, files = world.host()
        await running(world, keeper, files, auto_pause_timeout=60)
        world.age("x", 59)
        before = keeper.sessions.get("x").last_activity
        async with keeper.use("x"):
            began = keeper.sessions.get("x").last_activity
        assert before < began < keeper.sessions.get("x").last_activity

    run(go())


def test_fault_a_failing_pause_is_swallowed(world: World) -> None:
    async def go() -> None:
        keeper, files = world.host(back_off=(HOUR, 10 * HOUR))
        sweeper = world.sweeper(keeper)
        await idle(world, keeper, files)
        files.work("x")
        files.fail["pause"] = StoreUnreachable("the store is away", "wait")
        for failures in (1, 2, 3):
            await sweeper.sweep()
            await sweeper.sweep()  # too early to try again
            session = keeper.sessions.get("x")
            assert (session.state, session.failures) == (S.RUNNING, failures)
            assert isinstance(session.error, StoreUnreachable)
            assert kinds(world) == ["pause_failed"] * failures
            world.age("x", 20 * HOUR, "next_try")
        files.fail.clear()
        await sweeper.sweep()
        session = keeper.sessions.get("x")
        assert (session.state, session.failures, session.last_error) == (S.PAUSED, 0, None)
        await keeper.wake("x")
        assert files.work("x") == 2

    run(go())


def test_fault_a_pause_that_fails_after_it_took_effect(world: World) -> None:
    async def go() -> None:
        keeper, files = world.host()
        await running(world, keeper, files)

        async def late(step: str) -> None:
            if step == "after pause":
                raise StoreUnreachable("the answer was lost")

        files.step = late
        session = await keeper.pause("x")
        assert session.state is S.PAUSED
        assert session.checkpoint is not None

    run(go())


def test_fault_no_ownership_checks(world: World) -> None:
    async def go() -> None:
        keeper, files = world.host()
        await running(world, keeper, files)
        with pytest.raises(SandboxNotFound):
            keeper.sessions.get("x", Scope("bob"))
        with pytest.raises(StateConflict):
            await keeper.create("x", Scope("bob"), files.make)
        assert keeper.sessions.get("x").owner == "ann"

    run(go())


def test_fault_overlapping_job_runs(world: World) -> None:
    """Many sweepers at once, of the same host: each idle sandbox is paused once."""

    async def go() -> None:
        keeper, files = world.host()
        ids = [f"s{n}" for n in range(6)]
        for id in ids:
            await idle(world, keeper, files, id)
        keepers = [Keeper(world.db, files, "a", hosts=keeper.hosts) for _ in range(4)]
        reads = await asyncio.gather(*(world.db.call(keeper.sessions.idle, "a") for _ in keepers))
        work = [each.pause_idle(session) for each, read in zip(keepers, reads, strict=True) for session in read]
        done = await asyncio.gather(*work, return_exceptions=True)
        assert sum(not isinstance(one, BaseException) for one in done) == len(ids)
        assert all(isinstance(one, StateConflict) for one in done if isinstance(one, BaseException))
        assert files.named("pause") == len(ids)
        assert all(keeper.sessions.get(id).state is S.PAUSED for id in ids)

    run(go())


def test_fault_zero_does_not_mean_never(world: World) -> None:
    async def go() -> None:
        keeper, files = world.host()
        await running(world, keeper, files, auto_pause_timeout=0)
        world.age("x", 1000 * HOUR)
        assert keeper.sessions.idle("a") == []
        await running(world, keeper, files, "y", paused_expiry=0)
        await keeper.pause("y")
        assert keeper.sessions.expiring(1e9) == []

    run(go())


def test_fault_policy_or_changes_lost_from_the_second_resume_on(world: World) -> None:
    """Also: an automatic pause is as durable as a manual one."""

    async def go() -> None:
        keeper, files = world.host()
        sweeper = world.sweeper(keeper)
        await running(world, keeper, files, auto_pause_timeout=123, paused_expiry=456, metadata={"m": 1})
        for cycle in range(1, 9):
            async with keeper.use("x") as session:
                assert files.work("x") == cycle
                assert (session.auto_pause_timeout, session.paused_expiry, session.metadata) == (123, 456, {"m": 1})
            if cycle % 2:
                await keeper.pause("x")
            else:
                world.age("x", HOUR)
                await sweeper.sweep()
            assert keeper.sessions.get("x").state is S.PAUSED
            assert not (files.home / "x").exists()

    run(go())


def test_many_touches_at_once_resume_once(world: World) -> None:
    async def go() -> None:
        keeper, files = world.host()
        await asleep(world, keeper, files)
        woken = await asyncio.gather(*(keeper.wake("x") for _ in range(100)))
        assert {session.generation for session in woken} == {woken[0].generation}
        assert files.named("resume") == 1

    run(go())


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


def test_a_cancelled_caller_does_not_cancel_the_wake(world: World) -> None:
    async def go() -> None:
        keeper, files = world.host()
        await asleep(world, keeper, files)
        held, entered = asyncio.Event(), asyncio.Event()

        async def hold(step: str) -> None:
            entered.set()
            await held.wait()

        files.step = hold
        caller = asyncio.create_task(keeper.wake("x"))
        await entered.wait()
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)
        held.set()
        await keeper.close()
        assert keeper.sessions.get("x").state is S.RUNNING

    run(go())


def test_a_cancelled_use_ends(world: World) -> None:
    async def go() -> None:
        keeper, files = world.host()
        await running(world, keeper, files)
        inside = asyncio.Event()

        async def command() -> None:
            async with keeper.use("x"):
                inside.set()
                await asyncio.sleep(3600)

        tasks = [asyncio.create_task(command()) for _ in range(5)]
        await inside.wait()
        await until(lambda: keeper._uses["x"].count == 5)
        assert keeper.sessions.used_by("a") == {"x"}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: not keeper._uses)
        assert keeper.sessions.used_by("a") == set()

    run(go())


def test_an_unknown_sandbox_is_not_found_by_any_verb(world: World) -> None:
    async def go() -> None:
        keeper, _ = world.host()
        for verb in (keeper.wake, keeper.resume, keeper.touch, keeper.pause, keeper.kill, keeper.fail_over):
            with pytest.raises(SandboxNotFound):
                await verb("nobody")
        with pytest.raises(SandboxNotFound):
            async with keeper.use("nobody"):
                pass
        assert not keeper._uses

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


def test_a_mark_that_an_outage_lost_or_left_is_mended(world: World) -> None:
    async def go() -> None:
        keeper, files = world.host()
        sweeper = world.sweeper(keeper)
        await running(world, keeper, files, "x")
        await running(world, keeper, files, "y")
        keeper.sessions.begin_use("y", "a")
        async with keeper.use("x"):
            keeper.sessions.end_use("x", "a")
            await sweeper.sweep()
            assert keeper.sessions.used_by("a") == {"x"}
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
        work = {
            "make": lambda: running(world, keeper, files),
            "pause": lambda: keeper.pause("x"),
            "resume": lambda: keeper.wake("x"),
        }
        with pytest.raises((SandboxDead, StateConflict)):
            await work[verb]()
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


def test_a_sleeper_is_warned_of_then_removed(world: World) -> None:
    async def go() -> None:
        keeper, files = world.host()
        sweeper = world.sweeper(keeper, warn_before=3 * 24 * HOUR)
        await asleep(world, keeper, files)
        for days, events in ((26, []), (2, ["expiry_warning"]), (1, ["expiry_warning"])):
            world.age("x", days * 24 * HOUR, "paused_at")
            await sweeper.sweep()
            await sweeper.sweep()
            assert kinds(world) == events
            assert keeper.sessions.get("x").state is S.PAUSED
        world.age("x", 4 * 24 * HOUR, "paused_at")
        await sweeper.sweep()
        assert keeper.sessions.get("x").state is S.PAUSED  # the warning has not stood for three days
        world.age("x", 3 * 24 * HOUR, "warned_at")
        await sweeper.sweep()
        session = keeper.sessions.get("x")
        assert (session.state, session.removed) == (S.KILLED, True)
        assert kinds(world) == ["expiry_warning", "expired"]
        assert await files.real("x") is None

    run(go())


def test_a_server_down_past_the_expiry_warns_before_it_removes(world: World) -> None:
    async def go() -> None:
        keeper, files = world.host()
        sweeper = world.sweeper(keeper)
        await asleep(world, keeper, files)
        world.age("x", 400 * 24 * HOUR, "paused_at")
        await sweeper.sweep()
        await sweeper.sweep()
        assert keeper.sessions.get("x").state is S.PAUSED
        assert kinds(world) == ["expiry_warning"]
        assert (await keeper.wake("x")).warned_at is None

    run(go())


def test_a_longer_expiry_takes_the_warning_back(world: World) -> None:
    async def go() -> None:
        keeper, files = world.host()
        sweeper = world.sweeper(keeper)
        await asleep(world, keeper, files)
        world.age("x", 29 * 24 * HOUR, "paused_at")
        await sweeper.sweep()
        keeper.sessions.update("x", paused_expiry=365 * 24 * HOUR)
        world.age("x", 10 * 24 * HOUR, "paused_at")
        await sweeper.sweep()
        session = keeper.sessions.get("x")
        assert (session.state, session.warned_at) == (S.PAUSED, None)

    run(go())


def test_error_needs_an_explicit_resume(world: World) -> None:
    async def go() -> None:
        keeper, files = world.host()
        await running(world, keeper, files)
        files.work("x")
        await keeper.pause("x")
        await keeper.wake("x")
        (files.home / "x").unlink()
        await Sweeper(keeper).reconcile()
        assert keeper.sessions.get("x").state is S.ERROR
        with pytest.raises(SandboxDead, match="resume it"):
            await keeper.touch("x")
        assert (await keeper.resume("x")).state is S.RUNNING
        assert files.work("x") == 2
        await running(world, keeper, files, "bare")
        (files.home / "bare").unlink()
        await Sweeper(keeper).reconcile()
        with pytest.raises(SandboxDead, match="no checkpoint"):
            await keeper.resume("bare")

    run(go())


def test_the_sweeper_by_itself_puts_to_sleep_and_stops_cleanly(world: World) -> None:
    async def go() -> None:
        keeper, files = world.host()
        sweeper = Sweeper(keeper, interval=0.05)
        await sweeper.start()
        await running(world, keeper, files, auto_pause_timeout=0.1)
        await until(lambda: keeper.sessions.get("x").state is S.PAUSED)
        async with keeper.use("x"):
            files.work("x")
        await until(lambda: keeper.sessions.get("x").state is S.PAUSED)
        assert sweeper.troubles == {}
        await sweeper.stop()
        assert not Keeper(world.db, files, "b").hosts.alive("a")

    run(go())
