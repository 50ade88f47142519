"""The journal's own order: an entry goes only when its operation is finished, and each change of it is on disk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from conftest import Make
from sandkeep import Sandbox
from sandkeep.model import State
from sandkeep.sandbox import home as places
from sandkeep.sandbox import journal, recovery


class Died(BaseException):
    """As a kill -9 would end it there."""


@pytest.mark.parametrize("operation", sorted(recovery._FINISH))
def test_whoever_dies_while_it_recovers_leaves_that_to_the_next(
    make: Make, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    sb = make()
    sb.commands.run("echo old > f")
    saved = sb.snapshot()
    sb.commands.run("echo new > f")
    machine = sb._held
    record = machine.record()
    facts: dict[str, Any] = {
        "layer": "ly_0",
        "old": record.top,
        "new": record.top + 1,
        "root": machine.root_device(record),
    }
    if operation == "restore":
        facts = {"stack": saved.layers, "session": {"cwd": "/tmp"}, "new": record.top + 1, "image": None}
    journal.begin(machine.folder, operation, **facts)
    finish = recovery._FINISH[operation]

    def die(*given: Any) -> None:
        if operation != "restore":  # those can be repeated from their end, too
            finish(*given)
        raise Died

    with monkeypatch.context() as patched:
        patched.setitem(recovery._FINISH, operation, die)
        with pytest.raises(Died):
            Sandbox.connect(sb.id, home=sb._home.path)
    assert journal.pending(machine.folder) == {"operation": operation, **facts}
    again = Sandbox.connect(sb.id, home=sb._home.path)
    assert journal.pending(machine.folder) is None
    assert again.info().state is State.RUNNING
    assert again.commands.run("cat ~/workspace/f").stdout == ("old\n" if operation == "restore" else "new\n")


def test_a_restore_whose_recovery_dies_after_the_old_world_was_stopped(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    sb = make()
    sb.commands.run("echo old > f")
    saved = sb.snapshot()
    sb.commands.run("echo new > f")
    machine = sb._held
    journal.begin(machine.folder, "restore", stack=saved.layers, session={}, new=machine.record().top + 1, image=None)

    def die(*_: Any) -> None:
        raise Died

    with monkeypatch.context() as patched:
        patched.setattr(recovery, "settle", die)
        with pytest.raises(Died):
            Sandbox.connect(sb.id, home=sb._home.path)
    again = Sandbox.connect(sb.id, home=sb._home.path)
    assert again.commands.run("cat ~/workspace/f").stdout == "old\n"


def test_each_change_is_on_disk_before_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    sync, rename, unlink = os.fsync, os.rename, os.unlink

    def note(what: str, then: Any) -> Any:
        def noted(*given: Any, **how: Any) -> Any:
            what_is = what
            if what == "sync":
                what_is += " folder" if os.path.isdir(f"/proc/self/fd/{given[0]}") else " file"
            said.append(what_is)
            return then(*given, **how)

        return noted

    monkeypatch.setattr(places.os, "fsync", note("sync", sync))
    monkeypatch.setattr(places.os, "rename", note("rename", rename))
    monkeypatch.setattr(os, "unlink", note("unlink", unlink))
    journal.begin(tmp_path, "copy", layer="ly_0")
    assert said == ["sync file", "rename", "sync folder"]
    said.clear()
    journal.done(tmp_path)
    assert said == ["unlink", "sync folder"]
    assert list(tmp_path.iterdir()) == []
