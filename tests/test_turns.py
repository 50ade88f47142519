"""Turns: what changed is saved at their end, what did not is not; failed ones are kept or undone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from conftest import Make
from sandkeep import AsyncSandbox, Store
from sandkeep.errors import BadArgument


def test_a_turn_saves_what_changed_and_says_so(make: Make, home: Path) -> None:
    sb = make()
    with sb.turn("step 1") as first:
        sb.commands.run("echo one > f")
    assert first.checkpoint is not None
    assert first.reason == "first save"
    assert first.checkpoint.comment == "step 1"
    assert first.checkpoint.metadata == {"turn": "step 1"}
    with sb.turn("step 2") as second:
        sb.commands.run("cat f; ls -la; true")
    assert second.checkpoint is None
    assert second.reason == f"nothing changed since {first.checkpoint.id}"
    with sb.turn("step 3") as third:
        sb.commands.run("echo two > f")
        sb.env.set("A", "1")
        sb.workflow.set_state("n", 3)
    assert third.checkpoint is not None
    assert third.checkpoint.parent_id == first.checkpoint.id
    assert third.reason == f"changed since {first.checkpoint.id}: files, env, workflow"
    assert [one.id for one in Store(home=home).checkpoints()] == [third.checkpoint.id, first.checkpoint.id]


def test_a_failed_turn(make: Make, home: Path) -> None:
    sb = make()
    with sb.turn("good"):
        sb.commands.run("echo good > f")
    with pytest.raises(ZeroDivisionError), sb.turn("bad") as bad:
        sb.commands.run("echo bad > f")
        raise ZeroDivisionError("oh")
    assert bad.checkpoint is None
    assert bad.reason == "failed (ZeroDivisionError), not saved"
    assert sb.commands.run("cat f").stdout == "bad\n"
    with pytest.raises(ZeroDivisionError), sb.turn("worse", keep_failed=True, rollback=True) as worse:
        sb.commands.run("echo worse > f; export A=1")
        sb.workflow.set_state("n", 1)
        raise ZeroDivisionError("oh")
    assert worse.checkpoint is not None
    assert worse.checkpoint.metadata == {"turn": "worse", "failed": True, "error": "ZeroDivisionError: oh"}
    assert worse.reason == "failed (ZeroDivisionError), saved as it was, rolled back"
    assert sb.commands.run("cat f; echo $A").stdout == "bad\n\n"
    assert sb.workflow.state == {}
    assert sb.snapshots() == []
    assert make(from_checkpoint=worse.checkpoint.id).commands.run("cat f").stdout == "worse\n"
    with pytest.raises(BadArgument):
        sb.turn("")


def test_an_async_turn(home: Path) -> None:
    async def turns() -> None:
        async with AsyncSandbox(home=home, runtime="runc") as sb:
            async with sb.turn("one") as one:
                await sb.commands.run("echo one > f")
            assert one.checkpoint is not None
            with pytest.raises(KeyError):
                async with sb.turn("two", rollback=True):
                    await sb.commands.run("echo two > f")
                    raise KeyError
            assert (await sb.commands.run("cat f")).stdout == "one\n"
            async with sb.turn("three") as three:
                pass
            assert three.checkpoint is None

    asyncio.run(turns())
