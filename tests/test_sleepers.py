"""A paused sandbox wakes where it was paused, whatever became of the checkpoint that it sleeps in."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import Make
from sandkeep import Store
from sandkeep.errors import CheckpointNotFound
from sandkeep.sandbox import keeping, pausing
from sandkeep.sandbox.saved import ASLEEP
from waiting import until


def forget(home: Path, checkpoint: str) -> None:
    with Store(home=home) as store:
        store.forget([checkpoint])
        store.gc()
        with pytest.raises(CheckpointNotFound):
            store.get(checkpoint)


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_it_wakes_without_its_checkpoint(make: Make, home: Path, runtime: str) -> None:
    sb = make(runtime=runtime, env={"A": "1"})
    sb.commands.run("echo precious > f; cd /tmp; export B=2")
    sb.workflow.set_state("step", 3)
    asleep = sb.pause()
    make().checkpoint()
    forget(home, asleep.id)
    sb.resume()
    assert sb.commands.run("cat ~/workspace/f; echo $A $B $PWD").stdout == "precious\n1 2 /tmp\n"
    assert sb.workflow.export()["step"] == 3
    assert not (home / "sandboxes" / sb.id / ASLEEP).exists()
    again = sb.checkpoint()
    with Store(home=home) as store:
        assert store.verify() == []
        assert store.read(again.id, "/home/user/workspace/f") == b"precious\n"


def test_with_its_memory(make: Make, home: Path) -> None:
    sb = make(runtime="runsc")
    sb.commands.run("i=0; while :; do i=$((i + 1)); echo $i > ~/count; sleep 0.05; done", background=True)
    until(lambda: sb.commands.run("cat ~/count").stdout.strip() > "", "the counter")
    asleep = sb.pause()
    forget(home, asleep.id)
    before = int((home / "sandboxes" / sb.id / ASLEEP).exists())
    report = sb.resume(require="memory")
    assert (before, report.level) == (1, "memory")
    now = int(sb.commands.run("cat ~/count").stdout)
    until(lambda: int(sb.commands.run("cat ~/count").stdout or 0) > now, "the counter goes on")


def test_not_after_the_host_was_started_anew(make: Make, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sb = make()
    asleep = sb.pause()
    forget(home, asleep.id)
    for module in (pausing, keeping):
        monkeypatch.setattr(module, "boot", lambda: "another")
    with pytest.raises(CheckpointNotFound):
        sb.resume()
