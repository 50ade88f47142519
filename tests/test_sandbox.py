"""What a user holds: commands, processes, terminals, files, env, history, life."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import Make
from sandkeep import AsyncSandbox, Limits, Mount, Sandbox, State, Store
from sandkeep.errors import (
    BadArgument,
    FileError,
    FileMissing,
    LimitUnsupported,
    ProcessNotFound,
    SandboxDead,
    SandboxNotFound,
    SandboxPaused,
    SandkeepError,
    StoreDenied,
    TimedOut,
)
from sandkeep.model import WORKSPACE, FileEvent
from sandkeep.sandbox._sync.files import told
from waiting import until

RUNTIMES = ["runc", "crun", "runsc"]


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_whole_day_on_each_runtime(make: Make, runtime: str) -> None:
    with make(runtime=runtime, env={"A": "1"}, secrets={"API_KEY": "hush-hush"}) as sb:
        result = sb.commands.run("echo $A $API_KEY; echo err >&2; pwd; exit 3")
        assert (result.stdout, result.stderr, result.exit_code) == (f"1 hush-hush\n{WORKSPACE}\n", "err\n", 3)
        sb.files.write(f"{WORKSPACE}/a/b.txt", "hello")
        assert sb.files.read(f"{WORKSPACE}/a/b.txt") == b"hello"
        before = sb.snapshot("s")
        sb.commands.run("cd /tmp; export A=2; f() { echo fun; }; rm -r ~/workspace/a; echo new > ~/workspace/new")
        assert sb.commands.run("f; pwd; echo $A").stdout == "fun\n/tmp\n2\n"
        sb.restore(before)
        assert sb.commands.run("ls; pwd; echo $A; cat a/b.txt").stdout == f"a\n{WORKSPACE}\n1\nhello"
        other = sb.fork()
        other.commands.run("echo other > only-there")
        assert not sb.files.exists(f"{WORKSPACE}/only-there")
        assert other.commands.run("echo $API_KEY").stdout == "hush-hush\n"
        assert other.commands.run("hostname").stdout != sb.commands.run("hostname").stdout
        other.kill()
        kept = sb.checkpoint("c")
        sb.commands.run("rm -r a")
        sb.restore(kept)
        assert sb.commands.run("cat a/b.txt").stdout == "hello"


@pytest.mark.parametrize("runtime", ["runc", "crun", "runsc"])
def test_timeouts_kill_the_whole_tree_on_time(make: Make, runtime: str) -> None:
    sb = make(runtime=runtime)
    escapes = (
        "setsid sleep 1000 & setsid sh -c 'trap \"\" TERM HUP; sleep 1001' & env -i setsid sleep 1003 >/dev/null 2>&1 &"
    )
    begun = time.monotonic()
    result = sb.commands.run(f"({escapes}) ; sleep 1002", timeout=2)
    assert (result.exit_code, result.error_class) == (124, "TIMEOUT")
    assert time.monotonic() - begun < 60
    assert sb.commands.run("pgrep -f 'sleep 100' || echo none").stdout == "none\n"


def test_output_is_limited_and_says_so(sb: Sandbox) -> None:
    result = sb.commands.run("head -c 100000 /dev/zero; echo e >&2", max_output=1000)
    assert len(result.stdout_bytes) == 1000
    assert result.truncated
    assert result.stderr == "e\n"


def test_any_bytes_come_through(sb: Sandbox) -> None:
    data = bytes(range(256)) * 5000
    sb.files.write("/tmp/data", data)
    assert sb.commands.run("cat /tmp/data").stdout_bytes == data
    assert sb.commands.run("cat", stdin=data).stdout_bytes == data
    heard: list[str] = []
    sb.commands.run("for i in 1 2 3; do printf 'ü%s' $i; sleep 0.05; done", on_stdout=heard.append)
    assert "".join(heard) == "ü1ü2ü3"


def test_background_processes(sb: Sandbox) -> None:
    process = sb.commands.run("echo begun; read line; echo got $line; exit 7", background=True)
    assert [one.pid for one in sb.commands.list() if one.running] == [process.pid]
    again = sb.commands.connect(process.pid)
    again.send_stdin("word\n")
    assert b"".join(data for _, data in process.output()) == b"begun\ngot word\n"
    result = process.wait()
    assert (result.exit_code, result.stdout) == (7, "begun\ngot word\n")
    sleeper = sb.commands.run("sleep 1000 & sleep 1000", background=True)
    sleeper.kill()
    assert sleeper.wait().exit_code == 137
    reader = sb.commands.run("cat; echo end", background=True)
    reader.send_stdin("some ")
    reader.close_stdin()
    assert reader.wait().stdout == "some end\n"
    with pytest.raises(ProcessNotFound):
        sb.commands.connect(999_999)


def test_terminals(sb: Sandbox) -> None:
    terminal = sb.pty.start(cols=80, rows=24)
    terminal.send("stty size; exit 5\n")
    seen = b"".join(terminal.screen())
    assert b"24 80" in seen
    assert terminal.wait().exit_code == 5


def test_files(sb: Sandbox) -> None:
    files = sb.files
    assert files.write("/tmp/x/y/z", "one").size == 3
    files.write("/tmp/x/y/z", " two", append=True)
    assert files.read_text("/tmp/x/y/z") == "one two"
    assert files.read("/tmp/x/y/z", 4, 2) == b"tw"
    info = files.stat("/tmp/x/y/z")
    assert (info.kind, info.size, info.uid) == ("file", 7, 1000)
    files.mkdir("/tmp/x/d")
    files.move("/tmp/x/y/z", "/tmp/x/d/w")
    assert sorted(one.path for one in files.list("/tmp/x", depth=2)) == ["/tmp/x/d", "/tmp/x/d/w", "/tmp/x/y"]
    files.remove("/tmp/x")
    assert not files.exists("/tmp/x")
    with pytest.raises(FileMissing):
        files.read("/tmp/nothing")
    with pytest.raises(FileError):
        files.read("/tmp")
    big = b"0123456789abcdef" * (1 << 18)
    files.write("/tmp/big", iter([big[: 1 << 20], big[1 << 20 :]]))
    assert sum(map(len, files.read_stream("/tmp/big"))) == len(big)


def test_watching_files(sb: Sandbox) -> None:
    seen: list[tuple[str, str]] = []
    ready = threading.Event()

    def look() -> None:
        for event in sb.files.watch("/tmp"):
            seen.append((event.kind, event.path))
            ready.set()
            if event.path.endswith("last"):
                return

    looker = threading.Thread(target=look)
    looker.start()
    until(lambda: sb.commands.run("touch /tmp/first") and ready.is_set(), "the first event")
    sb.commands.run("touch /tmp/last")
    looker.join(60)
    assert ("created", "/tmp/last") in seen


def test_env_cwd_and_history(sb: Sandbox) -> None:
    sb.env["B"] = "two words"
    assert sb.commands.run("echo $B").stdout == "two words\n"
    sb.commands.run("export C=3")
    assert sb.env["C"] == "3"
    del sb.env["B"]
    assert "B" not in sb.env
    sb.commands.run("cd /var")
    assert sb.cwd == "/var"
    assert sb.commands.run("pwd", cwd="/etc", env={"X": "y"}).stdout == "/etc\n"
    assert sb.cwd == "/var"
    assert [one.command for one in sb.history.list()][:2] == ["echo $B", "export C=3"]
    assert "export C=3" in sb.commands.run("history list | grep export").stdout
    sb.commands.run("history clear")
    assert [one.command for one in sb.history.list()] in ([], ["history clear"])
    sb.history.clear()
    assert sb.history.list() == []


def test_secrets_are_in_the_environment_and_nowhere_else(make: Make, home: Path) -> None:
    sb = make(secrets={"TOKEN": "s3cr3t-v4lue-xyz"})
    assert sb.commands.run("echo $TOKEN").stdout == "s3cr3t-v4lue-xyz\n"
    sb.commands.run("export COPY=$TOKEN; true s3cr3t-v4lue-xyz")
    sb.snapshot()
    sb.checkpoint()
    assert "s3cr3t" not in repr(sb.info())
    assert "s3cr3t" not in repr(sb.history.list())
    sb.commands.run("true")
    found = subprocess.run(["grep", "-rl", "s3cr3t-v4lue", str(home)], capture_output=True, text=True).stdout
    assert found == ""
    other = sb.fork(secrets={"TOKEN": "another"})
    assert other.commands.run("echo $TOKEN").stdout == "another\n"


def test_a_sandbox_outlives_its_maker_and_two_may_use_it(home: Path) -> None:
    code = f"from sandkeep import Sandbox; sb = Sandbox(home={str(home)!r}, runtime='runc'); sb.commands.run('X=1; cd /tmp'); print(sb.id)"
    id = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    ).stdout.strip()
    one, two = Sandbox.connect(id, home=home), Sandbox.connect(id, home=home)
    assert one.commands.run("pwd; echo $X").stdout == "/tmp\n1\n"
    results: list[str] = []
    threads = [
        threading.Thread(target=lambda sb=sb: results.append(sb.commands.run("sleep 0.2; echo x").stdout))
        for sb in (one, two)
    ]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["x\n", "x\n"]
    assert [info.id for info in Sandbox.list(home=home)] == [id]
    one.kill()
    with pytest.raises(SandboxNotFound):
        Sandbox.connect(id, home=home)
    two.kill()


def test_a_dead_guest_is_said_to_be_dead_and_restore_revives(sb: Sandbox) -> None:
    sb.files.write(f"{WORKSPACE}/kept", "kept")
    snapshot = sb.snapshot()
    machine = sb._held
    pid = machine.driver(machine.record()).pid(sb.id, machine.folder)
    assert pid is not None
    subprocess.run(["kill", "-9", str(pid)], check=True)
    until(lambda: sb.info().state is State.DEAD, "its death to be seen")
    with pytest.raises(SandboxDead):
        sb.commands.run("true")
    with pytest.raises(SandboxDead):
        sb.snapshot()
    sb.restore(snapshot)
    assert sb.commands.run("cat kept").stdout == "kept"


def test_mounts_and_limits(make: Make, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "file").write_text("from the host")
    with make(mounts=[Mount(str(tmp_path / "data"), "/data")], limits=Limits(memory="256m", pids=64)) as sb:
        assert sb.commands.run("cat /data/file").stdout == "from the host"
        assert sb.commands.run("touch /data/x", user="root").exit_code != 0
        hog = sb.commands.run("python3 -c 'x = bytearray(600 << 20)'", timeout=60)
        assert hog.exit_code != 0
        assert sb.commands.run("echo still here").stdout == "still here\n"
        sb.commands.run("echo ours > /tmp/ours")
        trees = sb._home.layers.trees(sb.snapshot().layers)
        assert any((tree / "tmp/ours").exists() for tree in trees)
        assert not any((tree / "data/file").exists() for tree in trees)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"runtime": "nope"}, BadArgument),
        ({"network": "bridge"}, BadArgument),
        ({"env": {"A=B": "x"}}, BadArgument),
        ({"env": {"A": "x\0"}}, BadArgument),
        ({"cwd": "relative"}, BadArgument),
        ({"cwd": "/no/such"}, FileMissing),
        ({"cwd": 5}, BadArgument),
        ({"mounts": 5}, BadArgument),
        ({"require": "everything"}, BadArgument),
        ({"metadata": {"x": object()}}, BadArgument),
        ({"metadata": {"x": "y" * (1 << 20)}}, BadArgument),
        ({"metadata": {1: 2}}, BadArgument),
        ({"mounts": [Mount("/nothing/here", "/x")]}, BadArgument),
        ({"base": "/nothing/here"}, SandkeepError),
        ({"limits": Limits(disk="1g")}, LimitUnsupported),
        ({"from_checkpoint": "latest"}, SandkeepError),
    ],
)
def test_bad_arguments_leave_nothing(
    make: Make, home: Path, options: dict[str, object], error: type[SandkeepError]
) -> None:
    with pytest.raises(error) as caught:
        make(**options)
    assert caught.value.code
    assert Sandbox.list(home=home) == []


def test_limits_check_themselves() -> None:
    for bad in ({"memory": "lots"}, {"memory": 0}, {"cpus": 0}, {"pids": 1}):
        with pytest.raises(BadArgument):
            Limits(**bad)  # type: ignore[arg-type]
    assert Limits(memory="1.5g").memory == 3 << 29


def test_async_has_the_same_names(home: Path) -> None:
    async def story() -> None:
        async with AsyncSandbox(home=home, runtime="runc") as sb:
            results = await asyncio.gather(*(sb.commands.run(f"sleep 0.1; echo {i}") for i in range(5)))
            assert [one.stdout for one in results] == [f"{i}\n" for i in range(5)]
            await sb.files.write("/tmp/a", b"x")
            assert await sb.files.read("/tmp/a") == b"x"
            await sb.env.set("K", "v")
            assert (await sb.commands.run("cat; echo $K", stdin=b"in ")).stdout == "in v\n"
            snapshot = await sb.snapshot()
            other = await sb.fork()
            assert (await other.commands.run("cat /tmp/a")).stdout == "x"
            await other.kill()
            await sb.restore(snapshot)
            process = await sb.commands.run("echo out; exit 2", background=True)
            assert [data async for _, data in process.output()] == [b"out\n"]
            assert (await process.wait()).exit_code == 2
            assert await sb.cwd == WORKSPACE

    asyncio.run(story())
    public = {name for name in dir(AsyncSandbox) if not name.startswith("_")}
    assert public == {name for name in dir(Sandbox) if not name.startswith("_")}


def test_exit_codes_outlast_a_burst(sb: Sandbox) -> None:
    first = sb.commands.run("exit 7", background=True)
    first.wait()
    for _ in range(220):
        sb.commands.run("exit 1", background=True)
    assert first.wait().exit_code == 7


def test_ports_are_seen_and_reached(sb: Sandbox) -> None:
    sb.commands.run("mkdir -p /tmp/www; echo page > /tmp/www/index.html")
    sb.commands.run("cd /tmp/www && exec python3 -m http.server 8123", background=True)
    until(lambda: 8123 in sb.ports(), "the server")
    wire, early = sb._held.link.tunnel(8123)
    wire.send(b"GET / HTTP/1.0\r\n\r\n")
    seen = early
    while data := wire.receive(60):
        seen += data
    wire.close()
    assert b"200 OK" in seen
    assert seen.endswith(b"page\n")


def test_waiting_has_an_end_of_its_own(sb: Sandbox) -> None:
    process = sb.commands.run("sleep 1000", background=True)
    with pytest.raises(TimedOut):
        process.wait(timeout=0.2)
    assert sb.commands.run("echo well").stdout == "well\n"
    assert repr(sb) == f"<Sandbox {sb.id}>"


def test_what_is_set_while_a_command_runs_stays_set(sb: Sandbox) -> None:
    runner = threading.Thread(
        target=lambda: sb.commands.run(
            "export MADE=1; unset LANG; touch /tmp/runs; while [ ! -e /tmp/go ]; do sleep 0.05; done"
        )
    )
    runner.start()
    until(lambda: sb.files.exists("/tmp/runs"), "the command to run")
    sb.env["B"] = "2"
    sb.files.write("/tmp/go", "")
    runner.join(60)
    assert (sb.env["B"], sb.env["MADE"]) == ("2", "1")
    assert "LANG" not in sb.env
    assert dict(sb.env)["B"] == "2"


def test_a_watch_says_when_it_missed_something() -> None:
    assert told({"event": "overflow"}, "/tmp") == FileEvent("overflow", "/tmp")


def test_a_watch_looks_from_the_start_and_hides_our_own_steps(sb: Sandbox) -> None:
    with sb.files.watch("/tmp") as changes:
        sb.files.write("/tmp/whole", "x")
        event = next(changes)
    assert (event.kind, event.path) == ("modified", "/tmp/whole")
    with pytest.raises(FileMissing):
        sb.files.watch("/nope")


def test_it_says_whether_it_sleeps_or_is_gone(make: Make, home: Path) -> None:
    sb = make(secrets={"TOKEN": "hush-hush"})
    sb.pause()
    with pytest.raises(SandboxPaused):
        sb.commands.run("true")
    sb.resume()
    assert sb.commands.run("echo $TOKEN").stdout == "hush-hush\n"
    sb.pause()
    other = Sandbox.connect(sb.id, home=home)
    assert other.restore_report is not None
    assert other.restore_report.lost == ["secret TOKEN"]
    other.commands.run("exec sleep 1000", background=True)
    fork = other.fork()
    assert fork.restore_report is not None
    assert fork.restore_report.lost == ["exec sleep 1000"]
    other.kill()
    with pytest.raises(SandboxNotFound):
        other.commands.run("true")


@pytest.mark.parametrize(
    "act",
    [
        lambda make, sb: make(limits={"memory": "1g"}),
        lambda make, sb: make(mounts=["/a:/b"]),
        lambda make, sb: make(env="x"),
        lambda make, sb: make(secrets="x"),
        lambda make, sb: make(metadata=5),
        lambda make, sb: make(persistence="forever"),
        lambda make, sb: make(store=5),
        lambda make, sb: Limits(memory="1m"),
        lambda make, sb: sb.commands.run("ls", timeout="5"),
        lambda make, sb: sb.commands.run("ls", timeout=0),
        lambda make, sb: sb.commands.run("ls", env={"a": 1}),
        lambda make, sb: sb.commands.run("a\0b"),
        lambda make, sb: sb.files.write("/tmp/x", 5),
        lambda make, sb: sb.files.read(""),
        lambda make, sb: sb.commands.run("cat", stdin=5),
        lambda make, sb: sb.commands.run("true " + "x" * (33 << 20)),
        lambda make, sb: sb.files.remove("/"),
        lambda make, sb: sb.snapshot(5),
        lambda make, sb: sb.snapshot("\ud800"),
        lambda make, sb: sb.checkpoint("x" * 10_001),
        lambda make, sb: sb.checkpoint(tag=""),
        lambda make, sb: sb.checkpoint(tag="-x"),
        lambda make, sb: sb.checkpoint(tag="two\nlines"),
        lambda make, sb: sb.checkpoint(metadata={"x": "\ud800"}),
        lambda make, sb: Store(5),
        lambda make, sb: Sandbox.list(home=5),
    ],
)
def test_wrong_types_are_told_plainly(
    make: Make, home: Path, sb: Sandbox, act: Callable[[Make, Sandbox], object]
) -> None:
    with pytest.raises(BadArgument):
        act(make, sb)
    assert [info.id for info in Sandbox.list(home=home)] == [sb.id]


def test_a_store_that_can_not_be_had_leaves_no_sandbox(make: Make, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    with pytest.raises(StoreDenied):
        make(store="s3://nothing/x")
    assert Sandbox.list(home=home) == []
