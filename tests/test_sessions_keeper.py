"""The keeper and the sweeper on one host: sleep when idle, wake when touched, once, and nothing lost."""

from __future__ import annotations

import asyncio

import pytest

from sandkeep.errors import (
    SandboxDead,
    SandboxNotFound,
)
from sandkeep.sessions import Keeper, SessionState, Sweeper
from sessions_kit import HOUR, World, asleep, kinds, run, running, until

pytest_plugins = ["postgres", "sessions_kit"]

S = SessionState


def test_many_touches_at_once_resume_once(world: World) -> None:
    async def go() -> None:
        keeper, files = world.host()
        await asleep(world, keeper, files)
        woken = await asyncio.gather(*(keeper.wake("x") for _ in range(100)))
        assert {session.generation for session in woken} == {woken[0].generation}
        assert files.named("resume") == 1

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


def test_a_mark_outlasts_its_use_and_serves_the_next(world: World) -> None:
    async def go() -> None:
        keeper, files = world.host(linger=3600.0)
        await running(world, keeper, files)
        async with keeper.use("x"):
            pass
        assert (keeper.used, keeper.sessions.used_by("a")) == ({"x"}, {"x"})
        seen = keeper.sessions.get("x")
        async with keeper.use("x", seen):
            assert keeper.sessions.get("x").last_activity == seen.last_activity  # nothing was written
        slept = await keeper.pause("x")
        async with keeper.use("x", slept) as session:  # the mark was the old generation's
            assert session.generation > slept.generation
            assert keeper.sessions.used_by("a") == {"x"}
        keeper._linger = 0.0
        async with keeper.use("x", keeper.sessions.get("x")):
            pass
        assert (keeper.used, keeper.sessions.used_by("a")) == (set(), set())
        await keeper.close()

    run(go())


def test_a_lingering_mark_ends_by_itself(world: World) -> None:
    async def go() -> None:
        keeper, files = world.host(linger=0.05)
        await running(world, keeper, files)
        for _ in range(3):
            async with keeper.use("x", keeper.sessions.get("x")):
                assert keeper.sessions.used_by("a") == {"x"}
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
