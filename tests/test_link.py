"""The host's link: against a real guest, and against servers that lie, flood, stall and hang up."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from guest_box import Box, guest, record
from sandkeep.errors import GuestLied, SandboxDead, SandkeepError
from sandkeep.runtime.link import AsyncLink, Link, door
from waiting import PATIENCE

ROOT = Path(__file__).resolve().parent.parent


def frame(kind: int, payload: bytes) -> bytes:
    return struct.pack("!IB", len(payload) + 1, kind) + payload


@contextmanager
def liar(folder: Path, says: bytes, then_hang_up: bool = True) -> Iterator[Link]:
    """A server that answers anything with these bytes."""
    with socket.socket(fileno=door.make(folder, calls=False)) as listener:
        record(folder, os.getpid())
        listener.listen()
        over = threading.Event()

        def serve() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(1 << 16)
                try:
                    peer.sendall(says)
                except OSError:
                    return
                if not then_hang_up:
                    over.wait(PATIENCE)

        thread = threading.Thread(target=serve)
        thread.start()
        link = Link(folder)
        try:
            yield link
        finally:
            link.close()
            over.set()
            thread.join(PATIENCE)


@pytest.mark.parametrize(
    "says",
    [
        b"\xff\xff\xff\xff\x00",
        frame(9, b"x"),
        frame(0, b"not json"),
        frame(0, b"[1]"),
        frame(0, b"[" * 100_000),
        frame(0, b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
        frame(0, b'{"ok":' + b"9" * 10_000 + b"}"),
        frame(4, b"x" * (1 << 20)) * 40,
    ],
)
def test_a_guest_that_lies_is_named_as_such(tmp_path: Path, says: bytes) -> None:
    with liar(tmp_path, says) as link, pytest.raises(GuestLied):
        link.call("hello")


def test_a_guest_that_hangs_up_stalls_or_is_not_there_is_dead(tmp_path: Path) -> None:
    with pytest.raises(SandboxDead):
        Link(tmp_path / "no-folder").call("hello")
    with pytest.raises(SandboxDead):
        Link(tmp_path).call("hello")
    with liar(tmp_path, frame(1, b"half")) as link, pytest.raises(SandboxDead):
        link.call("hello")
    with liar(tmp_path, b"", then_hang_up=False) as link, pytest.raises(SandboxDead):
        with link.stream("hello", timeout=0.2) as events:
            next(events)


def test_refusals_without_reason_are_still_errors(tmp_path: Path) -> None:
    with liar(tmp_path, frame(0, b'{"ok":false,"code":7,"message":null}')) as link, pytest.raises(SandkeepError):
        link.call("hello")


def test_ready_gives_up_when_nobody_lives(tmp_path: Path) -> None:
    with pytest.raises(SandboxDead, match="ended"):
        Link(tmp_path).ready(PATIENCE, lambda: False)
    with pytest.raises(SandboxDead):
        Link(tmp_path).ready(0.2, lambda: True)


def test_a_folder_with_a_very_long_path(tmp_path: Path) -> None:
    run = tmp_path / ("d" * 120) / ("e" * 120)
    run.mkdir(parents=True)
    with guest(run) as box:
        assert box.text("echo far") == "far\n"


def test_many_threads_share_one_link(box: Box) -> None:
    answers: list[str] = []

    def work(number: int) -> None:
        answers.extend(box.text(f"echo {number}", record=False) for _ in range(5))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(answers) == sorted(f"{number}\n" for number in range(8) for _ in range(5))


def test_a_forked_process_does_not_use_its_parents_connections(box: Box) -> None:
    box.link.call("hello")
    code = (
        "import os, sys; from pathlib import Path; from sandkeep.runtime.link import Link\n"
        "link = Link(Path(sys.argv[1])); boot = link.call('hello')['boot']\n"
        "pid = os.fork()\n"
        "for _ in range(200): assert link.call('hello')['boot'] == boot\n"
        "if pid: assert os.waitpid(pid, 0)[1] == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(box.dir)], timeout=PATIENCE, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_connections_are_reused_and_descriptors_do_not_grow(box: Box) -> None:
    box.run("true")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(30):
        box.run("true", record=False)
        with pytest.raises(SandkeepError):
            box.link.call("file_stat", path="/nowhere/at/all")
        box.run("exit 1", [b"x" * 300_000] * 4, record=False)
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_descriptors_above_1023_work(box: Box) -> None:
    code = (
        "import os, resource, sys; from pathlib import Path; from sandkeep.runtime.link import Link\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (1500, 1500))\n"
        "held = [os.open('/dev/null', os.O_RDONLY) for _ in range(1100)]\n"
        "link = Link(Path(sys.argv[1])); link.call('hello'); link.call('hello')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(box.dir)], timeout=PATIENCE, capture_output=True)
    assert done.returncode == 0, done.stderr


async def async_run(link: AsyncLink, code: str, body: list[bytes] | None = None) -> tuple[int, bytes]:
    out = bytearray()
    async with link.stream("run", {"code": code, "record": False}, body=body, timeout=PATIENCE) as events:
        async for kind, data in events:
            if kind == "stdout":
                out += data
        return events.result["exit_code"], bytes(out)


def test_async_does_the_same_across_event_loops(box: Box) -> None:
    link = AsyncLink(box.dir)

    async def main() -> None:
        assert (await link.ready(PATIENCE, lambda: True))["version"] == 1
        body = [b"z" * (1 << 20)] * 3
        results = await asyncio.gather(
            *(async_run(link, f"echo {n}; exit {n}") for n in range(6)), async_run(link, "cat", body)
        )
        assert results[:6] == [(n, b"%d\n" % n) for n in range(6)]
        assert results[6] == (0, b"".join(body))

    asyncio.run(main())
    asyncio.run(main())
    asyncio.run(link.close())


def test_an_async_caller_that_is_cancelled_leaves_the_link_whole(box: Box) -> None:
    link = AsyncLink(box.dir)

    async def main() -> None:
        task = asyncio.create_task(async_run(link, "sleep 600"))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await async_run(link, "echo next") == (0, b"next\n")
        await link.close()

    asyncio.run(main())


def test_the_generated_twins_are_fresh() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "unasync.py"), "--check"], timeout=PATIENCE, capture_output=True
    )
    assert done.returncode == 0, done.stdout
