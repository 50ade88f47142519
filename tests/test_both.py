"""One suite, two kinds of sandbox: this machine's and a server's. Names and results are the same."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandkeep.errors import (
    BadArgument,
    CheckpointNotFound,
    Corrupt,
    FileError,
    FileMissing,
    FloorNotReached,
    HostRefused,
    ProcessNotFound,
    SandboxNotFound,
    SnapshotNotFound,
)
from sandkeep.model import CheckpointInfo, CommandResult, FileInfo, SandboxInfo, State
from sandkeep.sandbox import AsyncSandbox, Sandbox
from serving import Served, served  # noqa: F401
from waiting import until


class Place:
    """Where sandboxes are made: `Sandbox` and `AsyncSandbox` are used alike in both."""

    def __init__(self, sync: Any, asynchronous: Any, where: dict[str, Any], close: Any) -> None:
        self.sync, self.asynchronous, self.where, self.close = sync, asynchronous, where, close

    def make(self, **options: Any) -> Any:
        return self.sync(runtime="runc", **options, **self.where)


@pytest.fixture(params=["embedded", "remote"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "embedded":
        yield Place(Sandbox, AsyncSandbox, {"home": tmp_path / "home"}, None)
        return
    server: Served = request.getfixturevalue("served")
    remote = server.remote()
    yield Place(remote.Sandbox, remote.AsyncSandbox, {}, remote.aclose)


@pytest.fixture
def sandbox(place: Place) -> Iterator[Any]:
    with place.make(env={"COLOUR": "blue"}) as made:
        yield made


def test_commands(sandbox: Any) -> None:
    result = sandbox.commands.run("echo $COLOUR; echo oops >&2; exit 3")
    assert isinstance(result, CommandResult)
    assert (result.stdout, result.stderr, result.exit_code, result.error_class) == ("blue\n", "oops\n", 3, None)
    assert sandbox.commands.run("printf '\\377\\000'").stdout_bytes == b"\xff\x00"
    heard: list[str] = []
    sandbox.commands.run("echo one; sleep 0.1; echo two", on_stdout=heard.append)
    assert "".join(heard) == "one\ntwo\n"
    data = bytes(range(256)) * 4000
    assert sandbox.commands.run("cat", stdin=data).stdout_bytes == data
    assert sandbox.commands.run("sleep 100", timeout=0.2).error_class == "TIMEOUT"
    assert sandbox.commands.run("no-such-program").error_class == "NOT_FOUND"
    with pytest.raises(BadArgument):
        sandbox.commands.run("x\0y")


def test_background_processes(sandbox: Any) -> None:
    process = sandbox.commands.run("read x; echo got $x; sleep 1000", background=True, tag="t")
    process.send_stdin("it\n")
    stream, data = next(iter(process.output()))
    assert (stream, data) == ("stdout", b"got it\n")
    assert [one.tag for one in sandbox.commands.list()] == ["t"]
    assert sandbox.commands.connect(process.pid).info().running
    process.kill()
    assert process.wait().error_class == "KILLED"
    with pytest.raises(ProcessNotFound):
        sandbox.commands.connect(99999)


def test_files(sandbox: Any) -> None:
    written = sandbox.files.write("a/b.txt", "text é", mode=0o600)
    assert isinstance(written, FileInfo)
    assert (written.path, written.mode) == ("/home/user/workspace/a/b.txt", 0o600)
    assert sandbox.files.read_text("a/b.txt") == "text é"
    sandbox.files.write("big", io.BytesIO(b"x" * 3_000_000))
    assert sum(map(len, sandbox.files.read_stream("big"))) == 3_000_000
    assert sandbox.files.read("big", 10, 5) == b"xxxxx"
    sandbox.files.mkdir("c/d")
    sandbox.files.move("a/b.txt", "c/d/e")
    assert {one.name for one in sandbox.files.list("c", depth=2)} == {"d", "e"}
    assert sandbox.files.exists("c/d/e")
    sandbox.files.remove("c")
    assert not sandbox.files.exists("c")
    with pytest.raises(FileMissing):
        sandbox.files.read("c/d/e")
    with pytest.raises(BadArgument):
        sandbox.files.read("")


def test_watching(sandbox: Any) -> None:
    with pytest.raises(FileMissing):
        sandbox.files.watch("nothing/here")
    with sandbox.files.watch(".") as changes:
        sandbox.files.write("whole", "x")
        sandbox.commands.run("touch made; rm made")
        seen = [next(changes) for _ in range(2)]
    assert [(one.kind, one.path.rpartition("/")[2]) for one in seen] == [("modified", "whole"), ("created", "made")]


def test_names_that_are_no_text(sandbox: Any) -> None:
    sandbox.commands.run(r"""echo old > "$(printf 'x\377y')" """)
    (found,) = sandbox.files.list(".")
    assert found.name == "x\udcffy"
    assert sandbox.files.read(found.path) == b"old\n"
    assert sandbox.files.write("new\udcfe", b"new").name == "new\udcfe"
    with pytest.raises(FileMissing):
        sandbox.files.stat("\udcff")
    assert sandbox.commands.run("echo $'\\376'; : \udcfd").stdout_bytes == b"\xfe\n"
    assert sandbox.history.list()[-1].command.endswith("\udcfd")
    with sandbox.files.watch(".") as changes:
        sandbox.commands.run("rm new*")
        assert next(changes).path.endswith("new\udcfe")


def test_nonsense_is_refused_alike(place: Place, sandbox: Any, tmp_path: Path) -> None:
    for id in (None, 5, "", "../x", "a/b?c#d"):
        for way in (place.sync.connect, place.sync.attach):
            with pytest.raises(BadArgument):
                way(id, **place.where)
    for options in (
        {"env": []}, {"env": {"A": 1}}, {"secrets": {"": "x"}}, {"limits": 5}, {"network": "bridge"}, {"cwd": 5}, {"cwd": ""},
        {"metadata": {"a": {1}}}, {"metadata": {"a": float("nan")}}, {"metadata": {1: 2}}, {"metadata": 5}, {"require": "all"},
    ):  # fmt: skip
        with pytest.raises(BadArgument):
            place.make(**options)
    with pytest.raises(BadArgument):
        sandbox.checkpoint(metadata={"a": {1}})
    file = tmp_path / "file"
    file.write_text("mine")
    for wrong in (5, "", "a\0b"):
        with pytest.raises(BadArgument):
            sandbox.export_state(wrong)
    for wrong in (5, None, "a\0b"):
        with pytest.raises(BadArgument):
            sandbox.import_state(wrong)
    for there in (tmp_path, tmp_path / "no/such"):
        with pytest.raises(HostRefused):
            sandbox.export_state(there)
        with pytest.raises(HostRefused):
            sandbox.import_state(there)
    with pytest.raises(Corrupt):
        sandbox.import_state(file)
    assert file.read_text() == "mine"
    sandbox.files.write("f", "kept")
    sandbox.export_state(file)
    sandbox.files.remove("f")
    sandbox.import_state(file)
    assert sandbox.files.read("f") == b"kept"
    assert [one.id for one in place.sync.list(**place.where)] == [sandbox.id]


def test_a_write_whose_source_fails_changes_nothing(sandbox: Any) -> None:
    sandbox.files.write("f", "old")

    def broken() -> Iterator[bytes]:
        yield b"x" * 1_000_000
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        sandbox.files.write("f", broken())
    assert sandbox.files.read("f") == b"old"
    assert sandbox.commands.run("ls").stdout == "f\n"


def test_session(sandbox: Any) -> None:
    sandbox.env["A"] = "1"
    assert sandbox.commands.run("echo $A; cd /tmp; B=2; f() { echo f$B; }").stdout == "1\n"
    assert sandbox.commands.run("f").stdout == "f2\n"
    assert sandbox.cwd == "/tmp"
    sandbox.set_cwd("/usr")
    assert sandbox.commands.run("pwd").stdout == "/usr\n"
    del sandbox.env["A"]
    assert "A" not in sandbox.env
    assert [one.command for one in sandbox.history.list()][-1] == "pwd"
    sandbox.history.clear()
    assert sandbox.history.list() == []


def test_a_folder_that_is_not_there_is_refused_before_anything_runs(place: Place, sandbox: Any) -> None:
    sandbox.set_cwd("/tmp")
    for folder, error in (("/no/such", FileMissing), ("/etc/passwd", FileError), ("/root", FileError)):
        with pytest.raises(error):
            sandbox.set_cwd(folder)
        for how in ({}, {"background": True}):
            with pytest.raises(error):
                sandbox.commands.run("touch /tmp/ran", cwd=folder, **how)
        with pytest.raises(error):
            sandbox.pty.start("touch /tmp/ran", cwd=folder)
        with pytest.raises(error):
            place.make(cwd=folder)
    assert sandbox.cwd == "/tmp"
    assert not sandbox.files.exists("/tmp/ran")
    assert [one.id for one in place.sync.list(**place.where) if one.state is State.RUNNING] == [sandbox.id]
    sandbox.commands.run("mkdir d; cd d; rmdir ../d")
    saved = sandbox.checkpoint()  # a session's own folder may be gone: it goes on in what is left of it
    again = place.make(from_checkpoint=saved.id)
    assert again.commands.run("pwd").stdout == "/tmp\n"
    again.kill()
    with pytest.raises(FileMissing):
        place.make(from_checkpoint=saved.id, cwd="/no/such")
    moved = place.make(from_checkpoint=saved.id, cwd="/usr")
    assert moved.commands.run("pwd").stdout == "/usr\n"
    moved.kill()


def test_terminals(sandbox: Any) -> None:
    terminal = sandbox.pty.start("stty size; read x; stty size; echo $x", cols=90, rows=20)
    until(lambda: b"20 90" in next(iter(terminal.screen())), "its first size")
    terminal.resize(70, 10)
    terminal.send("typed\n")
    assert terminal.wait().stdout.split()[-3:] == ["10", "70", "typed"]


def test_snapshots_and_forks(sandbox: Any) -> None:
    sandbox.commands.run("echo one > f; export WORD=one")
    sandbox.workflow.set_state("step", 1)
    snapshot = sandbox.snapshot("first")
    sandbox.commands.run("echo two > f; export WORD=two")
    sandbox.workflow.update({"step": 2, "more": [None, {"a": 1.5}]})
    with sandbox.fork() as fork:
        assert fork.commands.run("cat f; echo $WORD").stdout == "two\ntwo\n"
        assert fork.info().forked_from == sandbox.id
        fork.commands.run("echo mine > f")
    assert sandbox.commands.run("cat f").stdout == "two\n"
    assert sandbox.restore(snapshot).level == "files"
    assert sandbox.commands.run("cat f; echo $WORD").stdout == "one\none\n"
    assert sandbox.workflow.state == {"step": 1}
    assert sandbox.workflow.delete_state("step")
    assert [one.comment for one in sandbox.snapshots()] == ["first"]
    sandbox.delete_snapshot(snapshot)
    with pytest.raises(SnapshotNotFound):
        sandbox.restore(snapshot)
    forks = sandbox.fork(2)
    assert len({one.id for one in forks}) == 2
    for one in forks:
        one.kill()


def test_checkpoints_and_carrying(sandbox: Any, place: Place) -> None:
    sandbox.commands.run("echo saved > f")
    saved = sandbox.checkpoint("words", tag="t", metadata={"n": 1})
    assert isinstance(saved, CheckpointInfo)
    assert (saved.comment, saved.tag, saved.metadata) == ("words", "t", {"n": 1})
    sandbox.commands.run("rm f; echo other > g")
    blob = sandbox.export_state()
    sandbox.restore(saved)
    assert sandbox.commands.run("cat f; ls").stdout == "saved\nf\n"
    sandbox.import_state(blob)
    assert sandbox.commands.run("cat g; ls").stdout == "other\ng\n"
    with place.make(from_checkpoint=saved.id) as back:
        assert back.commands.run("cat f").stdout == "saved\n"
        assert back.restore_report.level == "files"
    with pytest.raises(CheckpointNotFound):
        place.make(from_checkpoint="ck_" + "0" * 26)


def test_pause_and_resume(sandbox: Any, place: Place) -> None:
    sandbox.commands.run("echo kept > f; export WORD=kept")
    assert isinstance(sandbox.pause(), CheckpointInfo)
    assert sandbox.info().state is State.PAUSED
    assert sandbox.resume().level == "files"
    assert sandbox.commands.run("cat f; echo $WORD").stdout == "kept\nkept\n"
    sandbox.pause()
    again = place.sync.connect(sandbox.id, **place.where)
    assert again.commands.run("cat f").stdout == "kept\n"
    assert again.restore_report.level == "files"


def test_a_floor_holds_for_snapshots_too(sandbox: Any) -> None:
    saved = sandbox.snapshot()
    sandbox.commands.run("echo later > f")
    with pytest.raises(FloorNotReached):
        sandbox.restore(saved, require="memory")
    with pytest.raises(BadArgument):
        sandbox.restore(saved, require="everything")
    service = sandbox.commands.run("sleep 1000", background=True)
    with_service = sandbox.snapshot()
    terminal = sandbox.pty.start("sleep 1000")
    with_terminal = sandbox.snapshot()
    for to in (with_terminal, sandbox.checkpoint()):
        with pytest.raises(FloorNotReached):
            sandbox.restore(to, require="relaunched")
    assert sandbox.commands.connect(service.pid).info().running
    assert sandbox.files.read("f") == b"later\n"
    terminal.kill()
    report = sandbox.restore(with_service, require="relaunched")
    assert (report.level, report.relaunched, report.lost) == ("relaunched", ["sleep 1000"], [])
    assert sandbox.restore(saved, require="relaunched").level == "files"  # nothing ran
    with pytest.raises(SnapshotNotFound):
        sandbox.restore("sn_\0")


def test_finding_and_ending(place: Place) -> None:
    first, second = place.make(metadata={"n": 1}), place.make()
    assert [one.id for one in place.sync.list(**place.where)] == [first.id, second.id]
    info = first.info()
    assert isinstance(info, SandboxInfo)
    assert (info.state, info.runtime, info.base, info.metadata, info.network) == (
        State.RUNNING,
        "runc",
        "host",
        {"n": 1},
        "none",
    )
    first.commands.run("cd /tmp")
    assert place.sync.attach(first.id, **place.where).cwd == "/tmp"
    first.kill()
    first.kill()
    with pytest.raises(SandboxNotFound):
        place.sync.attach(first.id, **place.where)
    second.kill()
    assert place.sync.list(**place.where) == []


def test_async_has_the_same_names(place: Place) -> None:
    async def all_of_it() -> None:
        async with place.asynchronous(runtime="runc", **place.where) as sandbox:
            results = await asyncio.gather(*(sandbox.commands.run(f"echo {n}") for n in range(6)))
            assert [one.stdout for one in results] == [f"{n}\n" for n in range(6)]
            await sandbox.files.write("f", b"x" * 1_000_000)
            assert len(await sandbox.files.read("f")) == 1_000_000
            snapshot = await sandbox.snapshot()
            await sandbox.files.remove("f")
            await sandbox.restore(snapshot)
            assert await sandbox.files.exists("f")
            process = await sandbox.commands.run("cat", background=True)
            await process.send_stdin(b"fed")
            await process.close_stdin()
            assert (await process.wait()).stdout == "fed"
            with pytest.raises(FileMissing):
                await sandbox.files.read("missing")
            assert (await sandbox.info()).state is State.RUNNING
        if place.close is not None:
            await place.close()

    asyncio.run(all_of_it())
