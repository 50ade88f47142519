"""Whoever stops waiting for a command ends it: cancelled, interrupted, killed, or gone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import Make
from sandkeep import AsyncSandbox, Sandbox
from waiting import until

TREE = "(setsid sleep 600 &); sleep 600 & echo began; trap '' INT TERM; sleep 600"
RUN = """
import os, signal, sys
from sandkeep import Sandbox
signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may have been started with it ignored
sb = Sandbox.connect(sys.argv[1], home=sys.argv[2])
def said(text):
    if os.environ.get("FORK") and os.fork() == 0:
        os.close(1), os.close(2)
        import time; time.sleep(600)
    print(text, flush=True)
try:
    sb.commands.run(sys.argv[3], on_stdout=said)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.stdin.readline()
"""


def begun(sb: Sandbox) -> int:
    """The pid of the command that somebody waits for, as others see it."""

    def look() -> list[int]:
        return [one.pid for one in sb.commands.list() if one.running and not one.background]

    [pid] = until(look, "the command to begin")
    return int(pid)


def ended(sb: Sandbox) -> None:
    until(lambda: "sleep" not in sb.commands.run("ps -eo args", user="root").stdout, "the tree to end")
    assert sb.commands.run("echo on").stdout == "on\n"


@pytest.fixture(params=["runc", "runsc"])
def alive(request: pytest.FixtureRequest, make: Make) -> Sandbox:
    return make(runtime=request.param)


def test_a_task_that_is_cancelled(alive: Sandbox) -> None:
    async def cancel() -> None:
        sandbox = await AsyncSandbox.attach(alive.id, home=alive._home.path)
        said = asyncio.Event()
        task = asyncio.create_task(sandbox.commands.run(TREE, on_stdout=lambda _: said.set()))
        await asyncio.wait_for(said.wait(), 60)
        assert begun(alive)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await sandbox._link.close()

    asyncio.run(cancel())
    ended(alive)


def test_a_thread_or_process_that_is_interrupted_killed_or_gone(alive: Sandbox) -> None:
    argv = [sys.executable, "-c", RUN, alive.id, str(alive._home.path), TREE]
    for number, more in ((signal.SIGINT, {}), (signal.SIGKILL, {}), (signal.SIGINT, {"FORK": "1"})):
        with subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **more}, process_group=0
        ) as child:
            try:
                assert child.stdout is not None
                assert child.stdout.readline() == "began\n"
                assert begun(alive)
                child.send_signal(number)
                ended(alive)
            finally:
                os.killpg(child.pid, signal.SIGKILL)


@pytest.mark.parametrize("more", [[], ["--json"]])
@pytest.mark.parametrize("times", [1, 3])
def test_control_c_on_the_command_line(make: Make, home: Path, more: list[str], times: int) -> None:
    sb = make()
    argv = [sys.executable, "-m", "sandkeep", "sandbox", "exec", *more, "--home", str(home), sb.id, "--", TREE]
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as child:
        assert begun(sb)
        for _ in range(times):
            child.send_signal(signal.SIGINT)
        _, said = child.communicate(timeout=60)
    assert (child.returncode, said) == (130, b"")
    ended(sb)


def test_another_may_kill_what_somebody_waits_for(alive: Sandbox) -> None:
    argv = [sys.executable, "-m", "sandkeep", "sandbox", "exec", "--home", str(alive._home.path), alive.id, TREE]
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as child:
        alive.commands.connect(begun(alive)).kill()
        assert child.wait(60) == 137
    ended(alive)
