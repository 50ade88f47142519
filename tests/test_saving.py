"""Snapshots, restores and forks: exact, repeatable, independent; with processes running too."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from conftest import Make
from sandkeep import Sandbox
from sandkeep.errors import BadArgument, SandkeepError, SnapshotNotFound
from sandkeep.model import WORKSPACE
from sandkeep.sandbox import saving, squashing
from sandkeep.sandbox.home import Home
from sandkeep.sandbox.machine import Machine
from sandkeep.sandbox.record import Record
from sandkeep.sandbox.sweeping import discard_unused
from waiting import until

ODD = r"""
cd ~/workspace
ln -s target link; ln -s /etc/hosts abs; echo one > hard1; ln hard1 hard2; mkfifo pipe; mkdir -p deep/er; echo x > 'na me'
printf y > "$(printf 'b\xff\n')"; truncate -s 1G sparse; chmod 4711 hard1; touch -d '2001-02-03 04:05:06.789012345' hard1
setfattr -n user.mark -v val 'na me' 2>/dev/null; rm -rf /etc/apt /usr/share/doc; mkdir /usr/share/doc; echo z > /usr/share/doc/new
"""
LOOK = r"""
cd ~/workspace; find . -printf '%p %y %m %U %s %T@ %l %n\n' | grep -v '^\. ' | sort | sha256sum
cat hard2 'na me'; ls /usr/share/doc; ls -d /etc/apt 2>&1; readlink abs
"""


@pytest.mark.parametrize("how", ["rotated", "copied for its links", "copied, busy"])
def test_restore_is_exact_and_can_be_repeated(make: Make, how: str) -> None:
    sb = make()
    if "busy" in how:
        sb.commands.run("sleep 1000", background=True)
    odd = ODD.replace("ln hard1", "cp -p hard1") if how == "rotated" else ODD
    assert sb.commands.run(odd, user="root").exit_code == 0
    before = sb.commands.run(LOOK, user="root").stdout
    saved = sb.snapshot("odd")
    assert saved.how == how[: len(saved.how)]
    for _ in range(2):
        sb.commands.run("rm -rf ~/workspace/* /usr/share/doc; touch /etc/apt ~/workspace/more; X=1", user="root")
        report = sb.restore(saved)
        assert sb.commands.run(LOOK, user="root").stdout == before
        assert not sb.files.exists(f"{WORKSPACE}/more")
        assert report.level == "files"
    assert [one.running for one in sb.commands.list() if one.argv and "sleep 1000" in " ".join(one.argv)] in (
        [],
        [False],
    )


def test_calls_that_come_during_a_restore_find_what_was_restored(sb: Sandbox, home: Path) -> None:
    sb.commands.run("echo old > file")
    saved = sb.snapshot()
    over, told = threading.Event(), list[str]()

    def ask() -> None:
        other = Sandbox.attach(sb.id, home=home)
        while not over.is_set():
            result = other.commands.run("cat file && echo more >> file")
            if result.exit_code == 0:  # the restore ends what runs
                told.append(result.stdout.partition("more")[0])

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for _ in range(4):
            sb.restore(saved)
    finally:
        over.set()
        asking.join()
    assert set(told) <= {"old\n"}
    sb.restore(saved)
    assert sb.commands.run("cat file").stdout == "old\n"


def test_what_a_running_writer_does_after_the_snapshot_is_not_in_it(sb: Sandbox) -> None:
    sb.commands.run("exec 3>log; while :; do echo line >&3; done", background=True)

    def beyond(size: int) -> None:
        until(lambda: sb.files.exists("log") and sb.files.stat("log").size > size, "the writer to go on")

    beyond(0)
    saved = sb.snapshot()
    size = sb._home.layers.tree(saved.layers[0]).joinpath(WORKSPACE.lstrip("/"), "log").stat().st_size
    beyond(size)
    again = sb.snapshot()
    assert sb._home.layers.tree(saved.layers[0]).joinpath(WORKSPACE.lstrip("/"), "log").stat().st_size == size
    sb.restore(saved)
    assert sb.files.stat(f"{WORKSPACE}/log").size == size
    sb.restore(again)
    assert sb.files.stat(f"{WORKSPACE}/log").size > size


def test_snapshots_are_listed_and_deleted_with_their_layers(sb: Sandbox) -> None:
    sb.files.write("/tmp/a", "1")
    one = sb.snapshot("one")
    sb.files.write("/tmp/a", "2")
    two = sb.snapshot("two")
    assert [s.comment for s in sb.snapshots()] == ["one", "two"]
    sb.restore(one)
    sb.delete_snapshot(two)
    assert [s.id for s in sb.snapshots()] == [one.id]
    assert set(sb._home.layers.ids()) == set(one.layers)
    for bad in (two, "sn_0", "nonsense", "../../x"):
        with pytest.raises((SnapshotNotFound, SandkeepError)):
            sb.restore(bad)
    with pytest.raises(BadArgument):
        sb.restore(3)  # type: ignore[arg-type]
    assert sb.commands.run("cat /tmp/a").stdout == "1"


def test_nothing_changed_needs_no_layer(sb: Sandbox) -> None:
    sb.files.write("/tmp/a", "1")
    one = sb.snapshot()
    two = sb.snapshot()
    assert (two.how, two.layers) == ("unchanged", one.layers)


def test_env_shell_and_history_come_back(sb: Sandbox) -> None:
    sb.commands.run(
        "export E=1; v=plain; arr=(a b 'c d'); greet() { echo hello $1; }; shopt -s extglob; cd /var; alias ll=ls"
    )
    saved = sb.snapshot()
    count = len(sb.history.list())
    sb.commands.run("unset E v arr; unset -f greet; cd /; export N=1")
    sb.restore(saved)
    assert sb.commands.run('echo $E $v "${arr[2]}" $(greet you) $PWD $N').stdout == "1 plain c d hello you /var\n"
    assert len(sb.history.list()) == count + 1


def test_workflow_state_is_part_of_it(sb: Sandbox) -> None:
    sb.workflow.set_state("step", 1)
    saved = sb.snapshot()
    sb.workflow.set_state("step", 2)
    other = sb.fork()
    assert other.workflow.get_state("step") == 2
    other.workflow.set_state("step", 9)
    sb.restore(saved)
    assert sb.workflow.get_state("step") == 1
    kept = sb.checkpoint()
    again = Sandbox(home=sb._home.path, runtime="runc", from_checkpoint=kept.id)
    assert again.workflow.get_state("step") == 1


def test_forks_are_independent_at_once(sb: Sandbox, home: Path) -> None:
    sb.commands.run("echo base > f; export V=1")
    forks = sb.fork(4)
    assert all(isinstance(one, Sandbox) for one in forks)
    made = [one for one in forks if isinstance(one, Sandbox)]
    for number, one in enumerate(made):
        one.commands.run(f"echo {number} >> f; export V={number}")
    sb.commands.run("echo parent >> f")
    assert [one.commands.run("cat f; echo $V").stdout for one in made] == [f"base\n{i}\n{i}\n" for i in range(4)]
    assert sb.commands.run("cat f; echo $V").stdout == "base\nparent\n1\n"
    assert len({one.id for one in made}) == 4
    randoms = {
        one.commands.run("python3 -c 'import random; print(random.random())'; cat /proc/sys/kernel/random/uuid").stdout
        for one in made
    }
    assert len(randoms) == 4
    grandchild = made[0].fork().fork()
    assert grandchild.commands.run("cat f").stdout == "base\n0\n"
    made[1].kill()
    sb.kill()
    assert made[0].commands.run("cat f").stdout == "base\n0\n"
    assert grandchild.commands.run("cat f").stdout == "base\n0\n"
    assert grandchild.info().forked_from is not None
    for bad in (0, -1, True, 5000):
        with pytest.raises(BadArgument):
            made[0].fork(bad)


def squashed(home: Home, stack: list[str]) -> None:
    """Here or by the process in the background, whichever is first."""

    def done() -> object:
        squashing.squash_now(home, "host", stack[squashing.KEEP :])
        return squashing.known(home)

    until(done, "the stack to be squashed")


def test_long_stacks_are_squashed_without_a_trace(sb: Sandbox, home: Path) -> None:
    for number in range(squashing.LONG + 4):
        sb.commands.run(
            f"echo {number} > f{number}; rm -f f{number - 3}; mkdir -p d; echo {number} > d/f{number}; rm -f d/f{number - 1}"
        )
        sb.snapshot()
    record = Machine(Home(home), sb.id).record()
    squashed(Home(home), record.stack)
    before = sb.commands.run("ls . d; cat f*").stdout
    sb.commands.run("echo more > more")
    sb.snapshot()
    record = Machine(Home(home), sb.id).record()
    assert len(record.stack) < squashing.LONG
    assert sb.commands.run("rm more; ls . d; cat f*").stdout == before
    kept = sb.checkpoint()
    again = Sandbox(home=home, runtime="runc", from_checkpoint=kept.id)
    assert again.commands.run("ls . d; cat f*").stdout == before
    for one in (sb, again):
        assert one.commands.run("ls -la d | grep -c f; cp -a d copy && rm -r d copy && ls -d d").stdout == "1\n"


def test_snapshots_from_many_threads_are_one_after_another(sb: Sandbox) -> None:
    sb.commands.run("for i in 1 2 3; do echo $i > $i; done")
    errors: list[BaseException] = []

    def act() -> None:
        try:
            sb.snapshot()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=act) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert sb.commands.run("cat 1 2 3").stdout == "1\n2\n3\n"
    assert errors == []
    assert len(sb.snapshots()) == 4


def test_background_processes_start_again_on_request(sb: Sandbox) -> None:
    sb.commands.run("exec python3 -m http.server 8200", background=True, tag="web")
    sb.commands.run(
        "for i in $(seq 600); do python3 - <<< 'import socket; socket.create_connection((\"127.0.0.1\", 8200))' 2>/dev/null && break; sleep 0.1; done"
    )
    saved = sb.snapshot()
    report = sb.restore(saved, keep=True)
    assert report.level == "relaunched"
    assert report.relaunched == ["exec python3 -m http.server 8200"]
    assert 8200 in sb.ports()


def test_mmapped_writes_are_not_missed(sb: Sandbox) -> None:
    code = (
        "import mmap,time,sys\n"
        "f=open('map','w+b'); f.truncate(4096); m=mmap.mmap(f.fileno(),4096)\n"
        "n=0\n"
        "while True:\n"
        "    n+=1; m[0:8]=b'%8d'%n; time.sleep(0.001)\n"
    )
    sb.files.write(f"{WORKSPACE}/w.py", code)
    sb.commands.run("exec python3 w.py", background=True)
    seen = [0]
    while len(seen) < 5:
        until(
            lambda: sb.files.exists("map") and int(sb.files.read("map", 0, 8) or b"0") > seen[-1], "the writer to go on"
        )
        saved = sb.snapshot()
        for layer in saved.layers:
            path = sb._home.layers.tree(layer) / WORKSPACE.lstrip("/") / "map"
            if path.exists() and os.path.getsize(path):
                seen.append(int(path.read_bytes()[:8] or b"0"))
                break
        else:
            pytest.fail("the file is in no layer")
    assert seen == sorted(set(seen))


def test_many_snapshots_of_a_busy_sandbox_keep_stacks_short(sb: Sandbox, home: Path) -> None:
    sb.commands.run("sleep 1000", background=True)
    for number in range(squashing.LONG + 3):
        sb.commands.run(f"echo {number} > f{number}; rm -f f{number - 3}")
        sb.snapshot()
    machine = Machine(Home(home), sb.id)
    squashed(Home(home), machine.record().copied)
    sb.commands.run("echo last > last")
    saved = sb.snapshot()
    assert len(saved.layers) < squashing.LONG
    before = sb.commands.run("ls; cat f*").stdout
    sb.commands.run("rm -rf *")
    sb.restore(saved)
    assert sb.commands.run("ls; cat f*").stdout == before


def test_snapshots_stay_in_the_order_of_their_making_when_the_clock_jumps(
    sb: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter((3e9, 1e9, 2e9, 5e8))
    monkeypatch.setattr(saving, "time", SimpleNamespace(time=lambda: next(now)))
    made = [sb.snapshot().id for _ in range(3)]
    monkeypatch.setattr(saving, "boot", lambda: "another")
    made.append(sb.snapshot().id)
    assert [info.id for info in sb.snapshots()] == made


def test_a_restore_while_somebody_discards_layers_keeps_its_own(
    make: Make, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sb = make()
    empty = sb.snapshot()
    sb.commands.run("echo one > f")
    one = sb.snapshot()
    sb.restore(empty)
    load, begun = Record.load, list[threading.Thread]()

    def back() -> None:
        sb.restore(one)
        (sb._held.folder / "snapshots" / f"{one.id}.json").unlink()

    def slow(folder: Path) -> Record:
        found = load(folder)
        if not begun:
            begun.append(threading.Thread(target=back))
            begun[0].start()
            begun[0].join(1)
        return found

    monkeypatch.setattr(Record, "load", slow)
    assert discard_unused(Home(home)) == []
    begun[0].join()
    assert sb.commands.run("cat f").stdout == "one\n"


def test_a_squashed_layer_is_on_disk_before_it_stands_for_others(
    make: Make, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sb = make()
    for name in "ab":
        sb.commands.run(f"echo {name} > {name}")
        stack = sb.snapshot().layers
    known: list[int] = []
    monkeypatch.setattr(squashing.os, "sync", lambda: known.append(len(squashing.known(Home(home)))))
    assert squashing.squash_now(Home(home), "host", stack)
    assert (known, len(squashing.known(Home(home)))) == ([0], 1)
