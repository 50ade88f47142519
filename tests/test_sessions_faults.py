"""One test for each fault of the forerunner, by name."""

from __future__ import annotations

import asyncio

import pytest

from sandkeep.errors import (
    BadArgument,
    Busy,
    RuntimeFailed,
    SandboxDead,
    SandboxNotFound,
    StateConflict,
    StoreUnreachable,
)
from sandkeep.sessions import Keeper, Scope, SessionState, Sweeper
from sessions_kit import ANN, HOUR, World, asleep, idle, kinds, run, running

pytest_plugins = ["postgres", "sessions_kit"]

S = SessionState


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
