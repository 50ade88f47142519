"""Kill works whatever the guest does and whoever else is at work; listings ask no guest."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from conftest import Make
from sandkeep import Sandbox
from sandkeep.errors import Busy, SandboxNotFound
from sandkeep.model import State
from sandkeep.runtime import cgroup, process
from sandkeep.runtime.link import Link
from sandkeep.sandbox import journal, killing
from sandkeep.sandbox.home import Home, lock
from sandkeep.sandbox.machine import Machine
from waiting import until

HOSTILE = {
    "a folder where the host calls": "rm -rf wake; mkdir wake",
    "a link for the socket": "rm -f guest.sock; ln -s ../../../../etc/passwd guest.sock",
    "no socket": "rm -f guest.sock wake",
    "a folder for the socket": "rm -f guest.sock; mkdir -p guest.sock/deep",
}


@contextmanager
def deaf(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whoever asks a guest here has made a mistake."""

    def asked(_: Link, *how: object) -> None:
        raise AssertionError("a guest was asked")

    with monkeypatch.context() as patched:
        patched.setattr(Link, "acquire", asked)
        yield


def process_1(sb: Sandbox) -> process.Process:
    machine = sb._held
    pid = machine.driver(machine.record()).pid(sb.id, machine.folder)
    assert pid is not None
    found = process.find(pid)
    assert found is not None
    return found


def gone(sb: Sandbox, one: process.Process) -> None:
    assert not one.alive()
    assert not sb._held.folder.exists()
    assert cgroup.groups(cgroup.name_of(sb.id, sb._held.folder)) == []
    assert sb.id not in Home(sb._home.path).ids()


@pytest.mark.parametrize("runtime", ["runc", "runsc"])
def test_what_a_guest_does_to_its_folder_does_not_keep_it_alive(
    make: Make, runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a pause that was cut short, too: its recovery asks the guest, kill never does."""
    for trick in HOSTILE.values():
        sb = make(runtime=runtime)
        one = process_1(sb)
        sb.commands.run(f"cd /.sandkeep/run && {trick}", user="root")
        journal.begin(sb._held.folder, "pause", layer="ly_0")
        with deaf(monkeypatch):
            sb.kill()
        gone(sb, one)
        sb.kill()


def test_one_that_a_dead_process_froze(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    sb = make()
    machine, one = sb._held, process_1(sb)
    journal.begin(machine.folder, "copy", layer="ly_0")
    cgroup.freeze(cgroup.name_of(sb.id, machine.folder))
    with deaf(monkeypatch):
        sb.kill()
    gone(sb, one)


def test_a_damaged_record_keeps_nothing_alive(make: Make) -> None:
    sb = make()
    one = process_1(sb)
    (sb._held.folder / "record.json").write_bytes(b'{"id"')
    sb.kill()
    gone(sb, one)


def test_while_another_operation_holds_it_its_processes_end_at_once(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(killing, "PATIENCE", 0.1)
    sb = make()
    one, begun, end = process_1(sb), threading.Event(), threading.Event()

    def hold() -> None:
        with Machine(Home(sb._home.path), sb.id).held():
            begun.set()
            assert end.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert begun.wait(60)
    with pytest.raises(Busy, match="another operation holds"):
        sb.kill()
    until(lambda: not one.alive(), "its process 1 to end")
    end.set()
    holder.join()
    gone(sb, one)
    with pytest.raises(SandboxNotFound):
        Sandbox.connect(sb.id, home=sb._home.path)


def test_a_short_operation_is_waited_for(make: Make) -> None:
    sb = make()
    one, begun = process_1(sb), threading.Event()

    def hold() -> None:
        with lock(sb._held.folder / "lock"):
            begun.set()
            until(lambda: killing.killed(sb._held.folder), "the kill")

    holder = threading.Thread(target=hold)
    holder.start()
    assert begun.wait(60)
    try:
        sb.kill()
    except Busy:  # a machine so busy that 5 s are nothing
        holder.join()
        sb.kill()
    holder.join()
    gone(sb, one)


def test_what_a_killer_left_that_died_is_finished_by_the_next(make: Make) -> None:
    sb = make()
    one = process_1(sb)
    (sb._held.folder / killing.MARK).touch()
    with pytest.raises(SandboxNotFound):
        Sandbox.connect(sb.id, home=sb._home.path)
    gone(sb, one)


def test_many_are_killed_at_once_and_whoever_can_not_be_is_named(
    make: Make, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(killing, "PATIENCE", 0.1)
    made = [make() for _ in range(4)]
    with lock(made[0]._held.folder / "lock"):
        left = killing.kill_all(Home(home), [one.id for one in made])
    assert list(left) == [made[0].id]
    assert isinstance(left[made[0].id], Busy)
    assert killing.kill_all(Home(home), Home(home).ids()) == {}
    assert Home(home).ids() == []


def test_listings_ask_no_guest(make: Make, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sb = make(env={"A": "1"}, metadata={"k": "v"})
    cgroup.freeze(cgroup.name_of(sb.id, sb._held.folder))
    with deaf(monkeypatch):
        [told] = Sandbox.list(home=home)
    cgroup.thaw(cgroup.name_of(sb.id, sb._held.folder))
    assert (told.id, told.state, told.metadata, told.env, told.cwd) == (sb.id, State.RUNNING, {"k": "v"}, {}, "")
    assert sb.info().env["A"] == "1"
