"""Moving folders that rename(2) refuses: between mounts, and those of a lower layer. All that they are comes along, or nothing."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread

import pytest

from conftest import Make
from guest_box import Box, guest
from sandkeep.errors import FileError, FileMissing
from sandkeep.guest.moving import _Move
from sandkeep.guest.problems import Problem
from trees import looks, make_socket
from waiting import until


@pytest.fixture
def other() -> Iterator[Path]:
    """A folder on another mount than the tests' own."""
    with tempfile.TemporaryDirectory(prefix="sk-test-", dir="/dev/shm") as folder:
        assert os.stat(folder).st_dev != os.stat(tempfile.gettempdir()).st_dev, "mount a tmpfs on /dev/shm"
        yield Path(folder)


def odd(at: Path) -> Path:
    """A folder with every kind of thing in it, of a fixed time."""
    (at / "d/in ner\n").mkdir(parents=True)
    (at / "d/empty").mkdir(mode=0o700)
    (at / "d/file").write_bytes(os.urandom(9_000_000))
    os.link(at / "d/file", at / "d/in ner\n/same")
    os.chmod(at / "d/file", 0o4711)
    (at / "d/link").symlink_to("nowhere")
    os.mkfifo(at / "d/fifo", 0o640)
    make_socket(at / "d/socket")
    with open(at / "d/sparse", "wb") as file:
        file.truncate(1 << 28)
        file.seek(1 << 27)
        file.write(b"middle")
    for name in ("d/in ner\n", "d/sparse"):
        os.setxattr(at / name, "user.mark", b"\0one")
    access = bytes.fromhex(
        "02000000 01000600ffffffff 0200070005000000 04000400ffffffff 10000700ffffffff 20000400ffffffff"
    )
    os.setxattr(at / "d/empty", "system.posix_acl_access", access)
    os.setxattr(at / "d/empty", "system.posix_acl_default", access)
    if os.geteuid() == 0:
        for name in ("d/link", "d/in ner\n", "d/fifo"):
            os.chown(at / name, 5, 6, follow_symlinks=False)
    for path in sorted((at / "d").rglob("*"), reverse=True):
        os.utime(path, ns=(10**18, 10**18), follow_symlinks=False)
    os.utime(at / "d", ns=(10**18, 10**18))
    return at / "d"


def names(at: Path) -> list[str]:
    return sorted(os.listdir(at))


def test_all_that_a_folder_is_goes_to_another_mount_and_back(box: Box, tmp_path: Path, other: Path) -> None:
    source, target = odd(tmp_path), other / "moved"
    before = looks(source)
    box.link.call("file_move", path=str(source), to=str(target))
    assert looks(target) == before
    assert not source.exists()
    assert names(other) == ["moved"]
    assert (target / "sparse").stat().st_blocks * 512 < 1 << 20
    assert (target / "socket").is_socket()
    source.mkdir()  # an empty folder may be replaced
    box.link.call("file_move", path=f"{target}/", to=str(source))
    assert looks(source) == before
    assert names(other) == []


def test_one_file_goes_over_another(box: Box, tmp_path: Path, other: Path) -> None:
    (tmp_path / "a").write_text("a")
    (other / "b").write_text("b")
    box.link.call("file_move", path=str(tmp_path / "a"), to=str(other / "b"))
    assert ((other / "b").read_text(), (tmp_path / "a").exists(), names(other)) == ("a", False, ["b"])
    (tmp_path / "link").symlink_to("b")
    box.link.call("file_move", path=str(tmp_path / "link"), to=str(other / "c"))
    assert os.readlink(other / "c") == "b"


def test_what_rename_would_refuse_is_refused_before_anything_is_done(box: Box, tmp_path: Path, other: Path) -> None:
    source = odd(tmp_path)
    before = looks(tmp_path)
    (other / "file").write_text("x")
    (other / "full/in").mkdir(parents=True)
    for path, to, number in (
        (source, other / "file", errno.ENOTDIR),
        (source, other / "full", errno.ENOTEMPTY),
        (source / "file", other / "full", errno.EISDIR),
        (source, other / "no/where", errno.ENOENT),
    ):
        with pytest.raises((FileError, FileMissing)) as raised:
            box.link.call("file_move", path=str(path), to=str(to))
        assert raised.value.details["errno"] == number
    with pytest.raises(FileError):
        box.link.call("file_move", path=str(source), to=str(other / "full"), overwrite=False)
    assert looks(tmp_path) == before
    assert names(other) == ["file", "full"]


def test_a_failure_in_the_middle_leaves_all_as_it_was(tmp_path: Path, other: Path) -> None:
    """One entry that can't be had on the other side: here, a name that is taken in between."""
    source = odd(tmp_path)
    before = looks(tmp_path)
    task = _Move(str(source), str(other / "to"))
    steps = task.steps()
    next(steps)
    for name in names(source):
        if not os.path.lexists(os.path.join(task.aside, name)):
            Path(task.aside, name).write_text("taken")
    with pytest.raises(FileExistsError):
        list(steps)
    assert looks(tmp_path) == before
    assert names(other) == []


def test_a_call_that_is_told_that_it_goes_on_waits_for_the_end(tmp_path: Path, other: Path) -> None:
    (tmp_path / "box").mkdir()
    (tmp_path / "d").mkdir()
    for number in range(600):
        (tmp_path / f"d/{number}").touch()
    with guest(tmp_path / "box", before="from guest import jobs; jobs._TELL_SECONDS = 0.0") as box:
        with box.link.stream("file_move", {"path": str(tmp_path / "d"), "to": str(other / "e")}) as events:
            assert {name for kind, said in events for name in (kind, *said)} == {"json", "moving"}
        box.link.call("file_move", path=str(other / "e"), to=str(tmp_path / "d"))
        assert len(names(tmp_path / "d")) == 600
        box.link.call("file_remove", path=str(tmp_path / "d"), recursive=True)
        assert not (tmp_path / "d").exists()


@pytest.fixture
def moving(tmp_path: Path) -> _Move:
    (tmp_path / "d/sub").mkdir(parents=True)
    for number in range(600):
        (tmp_path / f"d/sub/{number}").write_text("x")
    (tmp_path / "d/file").write_text("old")
    return _Move(str(tmp_path / "d"), str(tmp_path / "to"))


CHANGES = {
    "a file comes": lambda at: (at / "d/new").write_text("new"),
    "a file goes": lambda at: (at / "d/sub/5").unlink(),
    "another file in its place": lambda at: ((at / "d/x").write_text("y"), (at / "d/x").replace(at / "d/file")),
    "a folder's mode": lambda at: (at / "d/sub").chmod(0o700),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_source_that_changes_is_not_moved(moving: _Move, tmp_path: Path, change: str) -> None:
    steps = moving.steps()
    while len(moving.seen) < 603:
        next(steps)
    assert len(names(tmp_path)) == 2
    CHANGES[change](tmp_path)
    before = looks(tmp_path / "d")
    with pytest.raises(Problem, match="changed while it was moved"):
        list(steps)
    assert looks(tmp_path / "d") == before
    assert names(tmp_path) == ["d"]


def test_a_write_during_the_move_is_in_what_was_moved(moving: _Move, tmp_path: Path) -> None:
    with open(tmp_path / "d/file", "a") as file:
        for _ in moving.steps():
            file.write(" new")
            file.flush()
        file.write(" last")
    assert (tmp_path / "to/file").read_text().startswith("old new")
    assert (tmp_path / "to/file").read_text().endswith("last")
    assert names(tmp_path) == ["to"]


def test_what_comes_while_the_source_is_removed_stays_and_is_named(moving: _Move, tmp_path: Path) -> None:
    steps = moving.steps()
    while not (tmp_path / "to").exists():
        next(steps)
    (tmp_path / "d/late").write_text("late")
    with pytest.raises(Problem, match="stays"):
        list(steps)
    assert names(tmp_path / "d") == ["late"]
    assert len(names(tmp_path / "to/sub")) == 600


def test_who_leaves_undoes_it_up_to_the_rename_and_finishes_it_after(moving: _Move, tmp_path: Path) -> None:
    before = looks(tmp_path)
    steps = moving.steps()
    next(steps)
    steps.close()
    after = looks(tmp_path)
    assert {path: facts for path, facts in after.items() if path} == {path: f for path, f in before.items() if path}
    again = _Move(moving.path, moving.to)
    steps = again.steps()
    while not (tmp_path / "to").exists():
        next(steps)
    steps.close()
    assert names(tmp_path) == ["to"]


FILL = """
umask 022; mkdir -p old/in old/empty; echo one > old/a; ln old/a old/in/b; echo x > old/in/x; chmod 4755 old/in/x; ln -s nowhere old/link
setfattr -n user.mark -v 1 old/in 2>/dev/null; touch -d '2001-02-03 04:05:06' old/in/x old/in old
"""
LOOK = "(cd %s && find . -printf '%%p %%y %%m %%U %%G %%s %%T@ %%l %%n\\n' | grep -v '^[.] ' | sort; cat in/b)"


@pytest.mark.parametrize("runtime", ["runc", "crun", "runsc"])
@pytest.mark.parametrize("to", ["new", "/tmp/new", "/usr/share/new"])
def test_folders_from_before_a_save_are_moved(make: Make, runtime: str, to: str) -> None:
    sb = make(runtime=runtime)
    if runtime != "runsc":
        sb.snapshot()
    assert sb.commands.run(FILL).exit_code == 0
    sb.commands.run("rm old/in/b; cp -p old/a old/in/b")  # no links: a top with links is not put below another
    before = sb.commands.run(LOOK % "old").stdout
    saved = sb.snapshot()
    sb.files.move("old", to)
    assert sb.commands.run(LOOK % to).stdout == before
    assert not sb.files.exists("old")
    assert ".sandkeep" not in sb.commands.run(f"ls -A $(dirname {to})").stdout
    assert sb.commands.run(f"echo more >> {to}/a; mkdir old; echo y > old/y; ls old").stdout == "y\n"
    forked = sb.fork()
    assert not isinstance(forked, list)
    assert forked.commands.run(f"ls -A old; tail -n 1 {to}/a").stdout == "y\nmore\n"
    sb.restore(saved)
    assert sb.commands.run(LOOK % "old").stdout == before
    sb.files.move("old", to)
    assert sb.commands.run(LOOK % to).stdout == before


@pytest.mark.parametrize("busy", [False, True])
def test_what_is_half_written_is_in_no_save(make: Make, busy: bool) -> None:
    """A file that is being sent lies beside its target under another name."""
    sb = make()
    if busy:
        sb.commands.run("sleep 1000", background=True)
    sb.files.write("/tmp/d/old", "old")
    fresh, go_on = Event(), Event()

    def pieces() -> Iterator[bytes]:
        yield b"half"
        fresh.set()
        go_on.wait(120)
        yield b"whole"

    link = sb._machine.link

    def send() -> None:
        with link.stream("file_write", {"path": "/tmp/d/new"}, body=pieces()) as events:
            list(events)

    sender = Thread(target=send)
    sender.start()
    try:
        assert fresh.wait(120)
        until(lambda: len(sb.files.list("/tmp/d")) == 2, "the first half to arrive")
        saved = sb.snapshot()
    finally:
        go_on.set()
        sender.join()
    forked = sb.fork()
    assert not isinstance(forked, list)
    assert [entry.name for entry in forked.files.list("/tmp/d")] == ["new", "old"]
    sb.restore(saved)
    assert [entry.name for entry in sb.files.list("/tmp/d")] == ["old"]
