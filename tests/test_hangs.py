"""Nobody waits for ever: what a dead process froze goes on when the next one looks, and every call has an end of its own."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from conftest import Make
from guest_box import record
from sandkeep import AsyncSandbox, Sandbox
from sandkeep.errors import Busy, SandboxDead
from sandkeep.runtime import cgroup
from sandkeep.runtime.link import AsyncLink, Link, door, protocol
from sandkeep.sandbox import journal
from sandkeep.sandbox.home import lock
from test_crash import crash
from waiting import PATIENCE, until

T = TypeVar("T")


def in_time(work: Callable[[], T]) -> T:
    """A test that would hang fails instead."""
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(work).result(PATIENCE)
    except Late:
        pytest.fail("it hangs")
    finally:
        pool.shutdown(wait=False)


def freeze(sb: Sandbox) -> None:
    """As a process leaves it that dies in the middle of a copy."""
    journal.begin(sb._held.folder, "copy", layer="ly_0")
    cgroup.freeze(cgroup.name_of(sb.id, sb._held.folder))


@pytest.mark.parametrize("runtime", ["runc", "runsc"])
def test_what_a_killed_process_froze_goes_on_for_whoever_asks_next(make: Make, home: Path, runtime: str) -> None:
    sb = make(runtime=runtime)
    sb.files.write("/tmp/f", "x")
    sb.commands.run("while :; do date > /tmp/now; done", background=True)
    assert crash(home, "snapshot-busy", 2, sb.id) == "copy: copied"
    assert sb._held.undone()
    assert in_time(lambda: sb.commands.run("echo on", timeout=3)).stdout == "on\n"
    assert not sb._held.undone()


@pytest.mark.parametrize(
    "ask",
    [
        lambda sb: sb.files.read("/etc/hostname"),
        lambda sb: sb.commands.run("true", background=True).wait(),
        lambda sb: sb.env.all(),
        lambda sb: sb.info().cwd,
        lambda sb: sb.usage(),
        lambda sb: sb.pty.start("exit").wait(),
        lambda sb: asyncio.run(awaited(sb)),
    ],
)
def test_so_it_does_for_every_kind_of_call(sb: Sandbox, ask: Callable[[Sandbox], object]) -> None:
    freeze(sb)
    assert in_time(lambda: ask(sb))


def test_who_says_that_it_goes_on_is_waited_for_but_not_for_ever() -> None:
    patience, minutes = protocol.Patience(60.0), 0
    while patience.spend(59.0, 0.0, 30):
        patience.renew()
        minutes += 1
    assert 60 <= minutes <= 63


async def awaited(sb: Sandbox) -> str:
    sandbox = await AsyncSandbox.attach(sb.id, home=sb._home.path)
    said: str = (await sandbox.commands.run("echo on", timeout=30)).stdout
    await sandbox._link.close()
    return said


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_also_for_whoever_waits_already(sb: Sandbox, kind: str) -> None:
    """The process died while the command ran: its caller has no time-out, and thaws it."""

    async def wait() -> str:
        sandbox = await AsyncSandbox.attach(sb.id, home=sb._home.path)
        said: str = (await sandbox.commands.run("until [ -e /tmp/go ]; do sleep 0.1; done; echo on")).stdout
        await sandbox._link.close()
        return said

    def go_on() -> str:
        return (
            asyncio.run(wait())
            if kind == "async"
            else str(sb.commands.run("until [ -e /tmp/go ]; do sleep 0.1; done; echo on").stdout)
        )

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(go_on)
        until(lambda: any(one.running for one in sb.commands.list()), "it to begin")
        with lock(sb._held.folder / "lock"):
            freeze(sb)
        until(lambda: not sb._held.undone(), "somebody to look")
        sb.files.write("/tmp/go", "")
        assert waiting.result(PATIENCE) == "on\n"


def test_while_a_living_process_holds_it_a_call_ends_by_itself(sb: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "GRACE", 0.2)
    with lock(sb._held.folder / "lock"):
        freeze(sb)
        with pytest.raises(Busy, match="another operation"):
            in_time(lambda: sb.commands.run("touch /tmp/given-up; sleep 600", timeout=0.2))
        with pytest.raises(Busy):
            in_time(lambda: asyncio.run(awaited_briefly(sb)))
    assert in_time(lambda: sb.commands.run("echo on").stdout) == "on\n"
    until(lambda: not any(one.running for one in sb.commands.list()), "what was given up to end")


async def awaited_briefly(sb: Sandbox) -> None:
    sandbox = await AsyncSandbox.attach(sb.id, home=sb._home.path)
    await sandbox.commands.run("true", timeout=0.2)


def frame(kind: int, payload: bytes) -> bytes:
    return struct.pack("!IB", len(payload) + 1, kind) + payload


@contextmanager
def dripping(folder: Path, pieces: Iterable[bytes]) -> Iterator[None]:
    """A guest that answers with these, one every 50 ms."""
    with socket.socket(fileno=door.make(folder, calls=False)) as listener:
        record(folder, os.getpid())
        listener.listen()

        def serve() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(1 << 16)
                try:
                    for piece in pieces:
                        peer.sendall(piece)
                        time.sleep(0.05)
                except OSError:
                    return

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            thread.join(PATIENCE)


DONE = frame(0, b'{"ok": true}')


def taken(folder: Path, seconds: float) -> int:
    with Link(folder).stream("file_read", timeout=seconds) as events:
        return sum(len(data) for _, data in events)


async def taken_later(folder: Path, seconds: float) -> int:
    async with AsyncLink(folder).stream("file_read", timeout=seconds) as events:
        return sum([len(data) async for _, data in events])


@pytest.mark.parametrize("take", [taken, lambda *how: asyncio.run(taken_later(*how))])
def test_a_trickle_is_no_answer_and_a_stream_may_take_its_time(
    tmp_path: Path, take: Callable[[Path, float], int]
) -> None:
    with dripping(tmp_path, [*[frame(3, b"x")] * 200, DONE]), pytest.raises(SandboxDead, match="did not answer"):
        take(tmp_path, 1.0)
    with dripping(tmp_path, [*[frame(3, bytes(64 << 10))] * 60, DONE]):
        assert take(tmp_path, 1.0) == 60 * (64 << 10)
