"""The embedded library on a full disk: every refusal has its code, nothing is lost, and it goes on when there is room."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from disks import full, mounted
from sandkeep import Sandbox
from sandkeep.errors import SandkeepError, StoreError, StoreFull


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "small", "8m") as path:
        yield path


def test_every_refusal_is_typed_and_nothing_is_lost(small: Path) -> None:
    home = small / "home"
    with full(small), pytest.raises(StoreFull):
        Sandbox(home=home, runtime="runc")
    sb = Sandbox(home=home, runtime="runc")
    sb.commands.run("echo one > f")
    snapshot, saved = sb.snapshot(), sb.checkpoint()
    sb.commands.run("echo two >> f")
    verbs: dict[str, Callable[[], object]] = {
        "snapshot": sb.snapshot,
        "checkpoint": sb.checkpoint,
        "fork": sb.fork,
        "restore": lambda: sb.restore(snapshot),
        "restore a checkpoint": lambda: sb.restore(saved),
        "pause": sb.pause,
        "export": sb.export_state,
        "export to a file": lambda: sb.export_state(small / "state"),
        "create": lambda: Sandbox(home=home, runtime="runc"),
        "workflow": lambda: sb.workflow.set_state("a", 1),
    }
    with full(small):
        for name, verb in verbs.items():
            with pytest.raises(StoreFull) as caught:
                verb()
            assert (name, caught.value.code) == (name, "STORE_FULL")
            assert caught.value.remedy
        with contextlib.suppress(StoreError):  # the index's cache has words of its own
            Sandbox(home=home, runtime="runc", from_checkpoint=saved.id)
        made = []
        with contextlib.suppress(StoreFull):
            made = [one for one in sb.fork(2) if not isinstance(one, SandkeepError)]
        assert made == []
        assert sb.commands.run("cat f").stdout == "one\ntwo\n"
    assert [one.id for one in Sandbox.list(home=home)] == [sb.id]
    assert sb.commands.run("cat f").stdout == "one\ntwo\n"
    sb.pause()
    sb.resume()
    assert sb.commands.run("cat f").stdout == "one\ntwo\n"
    sb.restore(snapshot)
    assert sb.commands.run("cat f").stdout == "one\n"
    with full(small):
        sb.kill()
    assert Sandbox.list(home=home) == []


def test_a_runtime_that_has_no_room_is_not_called_broken_for_ever(small: Path) -> None:
    home = small / "home"
    with full(small), pytest.raises(SandkeepError):
        Sandbox(home=home)
    with Sandbox(home=home) as sb:
        assert sb.commands.run("echo up").stdout == "up\n"
