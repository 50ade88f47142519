"""kill -9 of the host's process at every step of every operation: the next one finds a whole world, old or new."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import Make
from sandkeep import Sandbox
from sandkeep.errors import SandboxNotFound
from sandkeep.sandbox.home import Home
from sandkeep.sandbox.sweeping import gc
from waiting import until

CRASHER = Path(__file__).with_name("crasher.py")


def crash(home: Path, operation: str, at: int, *argument: str) -> str | None:
    """The step it died at; None when the operation ended first."""
    done = subprocess.run(
        [sys.executable, str(CRASHER), str(home), operation, str(at), *argument],
        capture_output=True,
        text=True,
        timeout=170,
    )
    if done.returncode == 0:
        return None
    assert done.returncode == -signal.SIGKILL, done.stderr
    return done.stdout.splitlines()[-1]


def steps() -> range:
    return range(1, 30)


def whole(sb: Sandbox, wanted: set[str]) -> None:
    """It answers, its files are one of the states that may be, it can be saved, and nothing stands still."""
    sb = Sandbox.connect(sb.id, home=sb._home.path)
    seen = sb.commands.run("cat ~/workspace/f; ls ~/workspace", timeout=60).stdout
    assert seen in wanted
    sb.commands.run("echo after > ~/workspace/after")
    saved = sb.snapshot()
    sb.commands.run("rm ~/workspace/after")
    sb.restore(saved)
    assert sb.commands.run("cat ~/workspace/after").stdout == "after\n"
    sb.commands.run("rm ~/workspace/after")


def test_create(home: Path) -> None:
    Sandbox(home=home, runtime="runc").kill()
    for at in steps():
        if crash(home, "create", at) is None:
            break
        gc(Home(home))
        assert Sandbox.list(home=home) == []
    assert len(Sandbox.list(home=home)) == 1


@pytest.mark.parametrize("busy", [False, True])
def test_snapshot(make: Make, home: Path, busy: bool) -> None:
    sb = make()
    sb.commands.run("echo one > f")
    if busy:
        sb.commands.run("while :; do date > /tmp/now; done", background=True)
    for at in steps():
        sb.commands.run(f"echo {at} > ~/workspace/f")
        died = crash(home, "snapshot-busy" if busy else "snapshot", at, sb.id)
        whole(sb, {f"{at}\nf\n"})
        if busy and died is not None and not any(one.running for one in sb.commands.list()):
            sb.commands.run("while :; do date > /tmp/now; done", background=True)
        if died is None:
            return
    pytest.fail("it never ended")


@pytest.mark.parametrize("operation", ["restore", "restore-checkpoint"])
def test_restore(make: Make, home: Path, operation: str) -> None:
    sb = make()
    sb.commands.run("echo old > f")
    target = sb.snapshot().id if operation == "restore" else sb.checkpoint().id
    for at in steps():
        sb.commands.run("echo new > ~/workspace/f")
        died = crash(home, operation, at, sb.id, target)
        whole(sb, {"old\nf\n", "new\nf\n"} if died else {"old\nf\n"})
        if died is None:
            return
    pytest.fail("it never ended")


def test_restore_of_a_dead_one(make: Make, home: Path) -> None:
    sb = make()
    sb.commands.run("echo old > f")
    target = sb.snapshot().id
    machine = sb._held
    for at in steps():
        pid = machine.driver(machine.record()).pid(sb.id, machine.folder)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        until(lambda: not machine.alive(machine.record()), "it to end")
        died = crash(home, "restore-dead", at, sb.id, target)
        sb.restore(target)
        whole(sb, {"old\nf\n"})
        if died is None:
            return
    pytest.fail("it never ended")


@pytest.mark.parametrize("operation", ["fork", "checkpoint"])
def test_fork_and_checkpoint(make: Make, home: Path, operation: str) -> None:
    sb = make()
    for at in steps():
        sb.commands.run(f"echo {at} > ~/workspace/f")
        died = crash(home, operation, at, sb.id)
        gc(Home(home))
        whole(sb, {f"{at}\nf\n"})
        for info in Sandbox.list(home=home):
            if info.id != sb.id:
                assert died is None or died.startswith("create: started") or operation == "fork"
                Sandbox.attach(info.id, home=home).kill()
        if died is None:
            return
    pytest.fail("it never ended")


def test_kill(make: Make, home: Path) -> None:
    for at in steps():
        sb = make()
        sb.commands.run("echo x > f")
        sb.snapshot()
        died = crash(home, "kill", at, sb.id)
        gc(Home(home))
        with pytest.raises(SandboxNotFound):
            Sandbox.connect(sb.id, home=home)
        assert Home(home).layers.ids() == []
        if died is None:
            return
    pytest.fail("it never ended")
