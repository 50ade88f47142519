"""Saving a sandbox's memory with runsc and bringing it back."""

from __future__ import annotations

from pathlib import Path

from runtime_box import Box
from sandkeep.model import Limits
from sandkeep.runtime import cgroup
from sandkeep.runtime.driver import RUNSC
from waiting import until


def test_memory_goes_on_where_it_was(tmp_path: Path) -> None:
    box = Box(RUNSC, tmp_path, limits=Limits(memory="1g"))
    image = tmp_path / "image"
    with box:
        box.sh("echo before > /tmp/file; echo before > /home/user/workspace/file")
        box.sh("(while :; do echo tick; sleep 0.05; done) > /var/log/ticks 2>&1 &")
        until(lambda: int(box.sh("wc -l < /var/log/ticks")) > 2, "the child to tick")
        ticks = box.ask()["ticks"]
        RUNSC.checkpoint(box.id, box.dir, image, leave_running=False)
        assert not RUNSC.alive(box.id, box.dir)
        assert cgroup.groups(box.group) == []
        lines = len((box.plan.upper / "var/log/ticks").read_text().splitlines())

        RUNSC.restore(box.plan, image)
        assert box.ask()["ticks"] >= ticks
        assert box.sh("cat /tmp/file /home/user/workspace/file").split() == ["before", "before"]
        until(lambda: int(box.sh("wc -l < /var/log/ticks")) > lines, "the child to go on")
        group = cgroup.controllers()["memory"] / box.group
        assert str(RUNSC.pid(box.id, box.dir)) in (group / "cgroup.procs").read_text().split()
    assert not RUNSC.alive(box.id, box.dir)


def test_left_running_it_goes_on_here(tmp_path: Path) -> None:
    with Box(RUNSC, tmp_path) as box:
        ticks = box.ask()["ticks"]
        RUNSC.checkpoint(box.id, box.dir, tmp_path / "image", leave_running=True)
        assert RUNSC.alive(box.id, box.dir)
        assert any((tmp_path / "image").iterdir())
        assert box.ask()["ticks"] >= ticks
