"""The host's link: against a real guest, and against servers that lie, flood, stall and hang up."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from guest_box import Box, guest, record
from sandkeep.errors import GuestLied, NotTheGuest, SandboxDead, SandkeepError
from sandkeep.runtime.link import AsyncLink, Link, door, told
from sandkeep.sandbox._sync.commands import Commands
from sandkeep.sandbox._sync.files import Files
from waiting import PATIENCE

ROOT = Path(__file__).resolve().parent.parent


def frame(kind: int, payload: bytes) -> bytes:
    return struct.pack("!IB", len(payload) + 1, kind) + payload


@contextmanager
def served(folder: Path, speaks: Callable[[socket.socket], None]) -> Iterator[Link]:
    """Who is asked anything speaks like this."""
    with socket.socket(fileno=door.make(folder, calls=False)) as listener:
        record(folder, os.getpid())
        listener.listen()

        def serve() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(1 << 16)
                with contextlib.suppress(OSError):
                    speaks(peer)

        thread = threading.Thread(target=serve)
        thread.start()
        link = Link(folder)
        try:
            yield link
        finally:
            link.close()
            thread.join(PATIENCE)


@contextmanager
def liar(folder: Path, says: bytes, then_hang_up: bool = True) -> Iterator[Link]:
    """A server that answers anything with these bytes."""
    over = threading.Event()

    def speak(peer: socket.socket) -> None:
        peer.sendall(says)
        if not then_hang_up:
            over.wait(PATIENCE)

    with served(folder, speak) as link:
        try:
            yield link
        finally:
            over.set()


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
        frame(4, b" ") * 100,
        frame(4, b""),
        frame(1, b""),
        frame(0, b'{"ok":true,"n":1e999}'),
        frame(0, b'{"ok":true,"n":NaN}'),
        frame(0, b'{"ok":true,"n":' + b"[" * 100 + b"]" * 100 + b"}"),
        frame(0, b'{"ok":true,"n":' + b"9" * 20 + b"}"),
        b"".join(frame(4, b'{"a":[' + b"1," * 500_000) for _ in range(5)) + frame(0, b"1]}"),
        frame(1, b"output that nobody asked for") + frame(0, b'{"ok":true}'),
        frame(0, b'{"event":1}') + frame(0, b'{"ok":true}'),
    ],
)
def test_a_guest_that_lies_is_named_as_such(tmp_path: Path, says: bytes) -> None:
    with liar(tmp_path, says) as link, pytest.raises(GuestLied):
        link.call("hello")


def test_an_answer_without_a_field_is_the_guests_lie(tmp_path: Path) -> None:
    with liar(tmp_path, frame(0, b'{"ok":true}')) as link, pytest.raises(GuestLied, match="exit_code"):
        Commands(link).run("true")


@pytest.mark.parametrize("slowly", [frame(1, b"x"), frame(4, b"[") + frame(4, b"["), b"\0"])
def test_what_drips_does_not_hold_a_quick_call(tmp_path: Path, slowly: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece now and then is no answer: the time for one is all of it, not the silence between."""
    monkeypatch.setattr("sandkeep.runtime.link._sync.link.QUICK", 1.0)
    over = threading.Event()

    def drip(peer: socket.socket) -> None:
        while not over.wait(0.05):
            peer.sendall(slowly)

    with served(tmp_path, drip) as link:
        caught: list[SandkeepError] = []

        def ask() -> None:
            try:
                link.call("hello")
            except SandkeepError as error:
                caught.append(error)

        asker = threading.Thread(target=ask)
        asker.start()
        asker.join(PATIENCE / 2)
        over.set()
        assert caught
        asker.join(PATIENCE)


def test_more_output_than_was_asked_for_is_not_taken(tmp_path: Path) -> None:
    def flood(kind: int) -> Callable[[socket.socket], None]:
        return lambda peer: [peer.sendall(frame(kind, b"x" * (1 << 20))) for _ in range(1000)] and None

    with served(tmp_path, flood(1)) as link, pytest.raises(GuestLied, match="1000 bytes"):
        Commands(link).run("true", max_output=1000)
    with served(tmp_path, flood(3)) as link, pytest.raises(GuestLied, match="1000 bytes"):
        Files(link).read("/f", length=1000)


@pytest.mark.parametrize(
    "says",
    [
        lambda: itertools.repeat(frame(1, b"x") * 10_000),
        lambda: itertools.repeat(frame(2, b"y" * (1 << 20))),
        lambda: itertools.repeat(frame(0, b'{"event":1}') * 1000),
        lambda: iter([frame(4, b"\n" * (1 << 20)) * 31 + frame(0, b"7")]),
        lambda: iter([b"".join(frame(4, b" " * 3 + b"{},[]," * 2000) for _ in range(60)) + frame(0, b"7")]),
    ],
)
def test_a_flood_leaves_the_loop_to_others(tmp_path: Path, says: Callable[[], Iterator[bytes]]) -> None:
    """While it comes, and while it is decoded, whatever else the loop has to do is done."""

    def flood(peer: socket.socket) -> None:
        for piece in says():
            peer.sendall(piece)

    async def main() -> int:
        ticks = 0
        link = AsyncLink(tmp_path)

        async def listen() -> None:
            with contextlib.suppress(SandkeepError):
                async with link.stream("run", timeout=None) as events:
                    async for _ in events:
                        pass

        listener = asyncio.create_task(listen())
        while ticks < 100 and not listener.done():
            await asyncio.sleep(0)
            ticks += 1
        listener.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await listener
        await link.close()
        return ticks

    with served(tmp_path, flood):
        assert asyncio.run(asyncio.wait_for(main(), PATIENCE)) > 0


@pytest.mark.parametrize("calls", [False, True])
def test_to_anybody_else_nothing_is_said(tmp_path: Path, calls: bool) -> None:
    """Somebody of this machine who is not that sandbox: here this very process."""
    given = door.make(tmp_path, calls=calls)
    heard: list[bytes] = []

    def answer() -> None:
        if calls:
            peer = socket.socket(socket.AF_UNIX)
            name = os.read(given, 100).decode().strip()
            with door._folder(tmp_path, "run") as place:
                peer.connect(place.address(name))
        else:
            peer, _ = listener.accept()
        with peer:
            heard.append(peer.recv(100))

    with subprocess.Popen(["sleep", "600"]) as sandbox:
        record(tmp_path, sandbox.pid)
        if not calls:
            listener = socket.socket(fileno=os.dup(given))
            listener.listen()
        thread = threading.Thread(target=answer)
        thread.start()
        try:
            with pytest.raises(NotTheGuest, match="nothing was said"):
                Link(tmp_path).call("secrets_set", secrets={"KEY": "secret"})
            thread.join(PATIENCE)
        finally:
            sandbox.kill()
            os.close(given)
            if not calls:
                listener.close()
    assert heard == [b""]


def test_a_link_or_a_file_for_the_socket_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with served(tmp_path / "other", lambda _: None) as link:
        (tmp_path / "link").mkdir()
        record(tmp_path, os.getpid())
        for make in (lambda at: at.symlink_to(tmp_path / "other/link/guest.sock"), Path.touch, Path.mkdir):
            make(tmp_path / "link/guest.sock")
            with pytest.raises(NotTheGuest):
                Link(tmp_path).call("hello")
            (tmp_path / "link/guest.sock").rename(tmp_path / f"was-{uuid.uuid4().hex}")
        with pytest.raises(SandboxDead):
            link.call("hello")


def test_long_answers_are_decoded_as_the_json_module_would(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(5)
    leaves = [1, -5, 1.5, -2e-7, True, None, 'é\ud800😀\\"\n' * 9, "😀" * 40, "", 10**18]

    def value(depth: int) -> object:
        kind = chance.random()
        if depth > 4 or kind < 0.3:
            return chance.choice(leaves)
        if kind < 0.7:
            return [value(depth + 1) for _ in range(chance.randrange(12))]
        return {chance.choice("abcdef") * chance.randrange(1, 60): value(depth + 1) for _ in range(chance.randrange(9))}

    for window in (50, 64, 300, 1000):
        monkeypatch.setattr(told, "SHORT", window)
        for _ in range(40):
            wanted = {"a": value(0), "b": value(0)}
            for separators in ((",", ":"), (" , ", " : ")):
                text = json.dumps(wanted, separators=separators).encode()
                assert told.decode(text) == json.loads(text)
            broken = bytearray(text)
            broken[chance.randrange(len(broken))] = chance.choice(b'"[]{},:\\x1')
            try:
                wanted = json.loads(broken)
            except ValueError:
                with pytest.raises(GuestLied):
                    told.decode(bytes(broken))
            else:
                assert told.decode(bytes(broken)) == wanted


def test_a_guest_that_hangs_up_stalls_or_is_not_there_is_dead(tmp_path: Path) -> None:
    with pytest.raises(SandboxDead):
        Link(tmp_path / "no-folder").call("hello")
    with pytest.raises(SandboxDead):
        Link(tmp_path).call("hello")
    with liar(tmp_path, frame(0, b'{"ok":true}')[:9]) as link, pytest.raises(SandboxDead):
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
