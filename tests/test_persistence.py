"""Persistence modes: what is saved, when, by whom; what a crash, a full disk or damage leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import Make
from sandkeep import AsyncSandbox, Persistence, Sandbox, Store
from sandkeep.errors import BadArgument, CheckpointNotFound, Corrupt, NotFound, StateConflict, StoreError, Unsupported
from sandkeep.sandbox.home import Home
from sandkeep.sandbox.machine import Machine
from sandkeep.sandbox.namespaces import KEPT, MOST, Namespace
from sandkeep.sandbox.rhythm import REASSURE, REASSURE_MOST, Rhythm
from sandkeep.sandbox.sweeping import gc
from waiting import until

QUICK = {"debounce": 0.1, "max_wait": 0.5}


def persistent(namespace: str = "agent", **options: object) -> Persistence:
    return Persistence(**{"mode": "persistent", "namespace": namespace, **QUICK, **options})  # type: ignore[arg-type]


def ids(home: Path, namespace: str = "agent") -> list[str]:
    return [one.id for one in Namespace(Home(home), namespace).load().generations]


# when to look


@pytest.fixture
def at() -> Iterator[Callable[[float, object], bool]]:
    rhythm = Rhythm(1.0, 5.0, now=0.0)
    rhythm.looked(0.0, "start", saved=False)
    yield rhythm.due
    rhythm.looked(100.0, "later", saved=True)
    assert not rhythm.due(100.5, "later")
    assert rhythm.due(101.0, "later")  # what came during the save is looked for once more
    rhythm.looked(101.0, "later", saved=False)
    assert not rhythm.due(101.0 + REASSURE - 1, "later")


def test_a_burst_is_saved_when_it_is_over(at: Callable[[float, object], bool]) -> None:
    assert not at(1.0, "a")
    assert not at(1.9, "b")
    assert not at(2.8, "b")
    assert at(2.9, "b")


def test_a_steady_stream_is_saved_all_the_same(at: Callable[[float, object], bool]) -> None:
    assert [at(1 + n / 2, n) for n in range(12)] == [False] * 10 + [True] * 2


def test_nothing_moves_nothing_is_looked_at(at: Callable[[float, object], bool]) -> None:
    assert not any(at(n / 10, "start") for n in range(10 * int(REASSURE)))


def test_looks_to_be_sure_become_rare() -> None:
    rhythm = Rhythm(1.0, 5.0, now=0.0)
    now, looks = 0.0, []
    while now < 20_000:
        now += 1
        if rhythm.due(now, "same"):
            looks.append(now)
            rhythm.looked(now, "same", saved=False)
    assert looks[-1] - looks[-2] == REASSURE_MOST
    assert len(looks) < 45


def test_where_nothing_is_known_it_looks_now_and_then() -> None:
    rhythm = Rhythm(1.0, 5.0, now=0.0)
    assert [rhythm.due(now, None) for now in (1, 4, 5)] == [False, False, True]


# modes


def test_words_are_checked_and_ephemeral_has_no_state(make: Make, home: Path) -> None:
    for words in (
        {"mode": "forever"}, {"mode": "session"}, {"mode": "persistent", "namespace": ""},
        {"mode": "session", "namespace": "a", "debounce": 0}, {"mode": "session", "namespace": "a", "debounce": 9},
    ):  # fmt: skip
        with pytest.raises(BadArgument):
            Persistence(**words)  # type: ignore[arg-type]
    with pytest.raises(BadArgument):
        make(persistence=persistent(), from_checkpoint="latest")
    sb = make()
    for verb in (sb.save_state, sb.load_state, sb.clear_persisted_state):
        with pytest.raises(Unsupported, match="ephemeral"):
            verb()
    assert not (home / "namespaces").exists()


def test_session_saves_and_loads_when_told(make: Make, home: Path) -> None:
    how = Persistence(mode="session", namespace="mine")
    with make(persistence=how) as sb:
        with pytest.raises(NotFound, match="no state"):
            sb.load_state()
        sb.commands.run("echo one > f; export A=1; ln -s f link")
        sb.workflow.set_state("n", 1)
        saved = sb.save_state()
        assert saved is not None
        assert sb.save_state() is None
        sb.commands.run("echo never-saved > f; rm link")
    assert ids(home, "mine") == [saved.id]
    with make(persistence=how) as sb:
        assert sb.commands.run("ls").stdout == ""
        sb.load_state()
        assert sb.commands.run("cat f; readlink link; echo $A").stdout == "one\nf\n1\n"
        assert sb.workflow.state == {"n": 1}
        assert sb.history.list()[0].command.startswith("echo one")
        sb.clear_persisted_state()
        with pytest.raises(NotFound):
            sb.load_state()
        with pytest.raises(CheckpointNotFound):
            Store(home=home).get(saved.id)
    assert ids(home, "mine") == []


CHANGES = {
    "a command": lambda sb: sb.commands.run("echo x > f"),
    "a file": lambda sb: sb.files.write("/tmp/f", "x"),
    "a background process": lambda sb: sb.commands.run("sleep 1; echo x > f", background=True),
    "the environment": lambda sb: sb.env.set("A", "1"),
    "history alone": lambda sb: sb.commands.run("true"),
    "the workflow": lambda sb: sb.workflow.set_state("n", 1),
}


def test_every_kind_of_change_is_saved_and_there_again(make: Make, home: Path) -> None:
    with make(persistence=persistent()) as sb:
        until(lambda: len(ids(home)) == 1, "the first save")
        for what, change in CHANGES.items():
            before = ids(home)[0]
            change(sb)
            until(lambda: ids(home)[0] != before, f"{what} to be saved")  # noqa: B023
        assert len(ids(home)) <= MOST
    with make(persistence=persistent()) as sb:
        assert sb.commands.run("cat f /tmp/f; echo $A").stdout == "x\nx1\n"
        assert sb.workflow.state == {"n": 1}
        assert len(sb.history.list()) == 4


def test_leaving_at_once_loses_nothing_and_idleness_saves_nothing(make: Make, home: Path) -> None:
    slow = {"debounce": 3000.0, "max_wait": 3000.0}
    for n in range(3):
        with make(persistence=persistent(**slow)) as sb:
            assert sb.commands.run("cat f 2>/dev/null | wc -l").stdout.strip() == str(n)
            sb.commands.run("echo x >> f")
    before = ids(home)
    with make(persistence=persistent(**slow)) as sb:
        looked = sb._keeper._saver  # type: ignore[union-attr]
        assert looked.save("again") is None or ids(home)[0] != before[0]
        assert looked.save("again") is None


def test_old_generations_go_and_at_least_three_stay(make: Make, home: Path) -> None:
    with make(persistence=Persistence(mode="session", namespace="agent")) as sb:
        saved = []
        for n in range(MOST + 2):
            sb.commands.run(f"echo {n} > f")
            info = sb.save_state()
            assert info is not None
            saved.append(info.id)
        assert ids(home) == saved[: -(KEPT + 2) : -1]
        assert len(ids(home)) >= 3
        store = Store(home=home)
        assert {one.id for one in store.checkpoints()} == set(ids(home))
        sb.load_state(saved[-3])
        assert sb.commands.run("cat f").stdout == f"{MOST - 1}\n"
        assert ids(home)[0] == saved[-3]
        sb.load_state(saved[-1])
        assert sb.commands.run("cat f").stdout == f"{MOST + 1}\n"


def test_namespaces_never_collide(make: Make, home: Path) -> None:
    names = ["a/b", "a_b", "a%2Fb", "../a", "A", "a", "ä", "x" * 300, "x" * 299 + "y"]
    folders = {Namespace(Home(home), name).folder for name in names}
    assert len(folders) == len(names)
    assert {folder.parent for folder in folders} == {home / "namespaces"}
    for name in names[:2]:
        with make(persistence=persistent(name)) as sb:
            sb.files.write("/tmp/name", name)
    for name in names[:2]:
        with make(persistence=persistent(name)) as sb:
            assert sb.files.read("/tmp/name") in (name, name.encode())


def test_two_on_one_namespace(make: Make, home: Path) -> None:
    first = make(persistence=persistent())
    first.commands.run("echo first > f")
    before = len(Sandbox.list(home=home))
    with pytest.raises(StateConflict, match=first.id):
        make(persistence=persistent())
    assert len(Sandbox.list(home=home)) == before
    second = make(persistence=persistent(takeover=True))
    assert second.commands.run("cat f").stdout == "first\n"
    second.commands.run("echo second > f")
    with pytest.raises(StateConflict, match="taken over"):
        first._keeper.save()  # type: ignore[union-attr]

    for act in (
        lambda: first.commands.run("echo again >> f"),
        lambda: first.files.write("/tmp/x", "x"),
        first.snapshot,
    ):
        with pytest.raises(StateConflict):
            act()
    with pytest.raises(StateConflict):
        first.kill()
    first.kill(save=False)
    second.kill()
    with make(persistence=persistent()) as third:
        assert third.commands.run("cat f").stdout == "second\n"


KILLED = """
import os, signal, sys, time
from sandkeep import Persistence, Sandbox
sb = Sandbox(home=sys.argv[1], runtime="runc", persistence=Persistence(mode="persistent", namespace="agent", debounce=3000, max_wait=3000))
sb.commands.run("echo unsaved > f; export LATE=1")
sb.workflow.set_state("n", 7)
print(sb.id, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_owner_left_is_saved_and_replaced(make: Make, home: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(home)], capture_output=True, text=True, timeout=170)
    assert done.returncode == -signal.SIGKILL, done.stderr
    orphan = done.stdout.strip()
    assert [one.id for one in Sandbox.list(home=home)] == [orphan]
    with make(persistence=persistent()) as sb:
        assert sb.commands.run("cat f; echo $LATE").stdout == "unsaved\n1\n"
        assert sb.workflow.state == {"n": 7}
        assert [one.id for one in Sandbox.list(home=home)] == [sb.id]
    assert Sandbox.list(home=home) == []


def test_a_dead_orphan_keeps_its_files(make: Make, home: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(home)], capture_output=True, text=True, timeout=170)
    machine = Machine(Home(home), done.stdout.strip())
    pid = machine.driver(machine.record()).pid(machine.id, machine.folder)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    until(lambda: not machine.alive(machine.record()), "it to end")
    with make(persistence=persistent()) as sb:
        assert sb.commands.run("cat f").stdout == "unsaved\n"
        assert sb.workflow.state == {"n": 7}
        assert [one.id for one in Sandbox.list(home=home)] == [sb.id]


def test_a_create_that_fails_leaves_the_orphan_to_the_next(make: Make, home: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(home)], capture_output=True, text=True, timeout=170)
    orphan = done.stdout.strip()
    (tmp_path / "no-store").write_text("a file")
    with pytest.raises((StoreError, OSError)):
        make(persistence=persistent(), store=tmp_path / "no-store")
    with pytest.raises(BadArgument):
        make(persistence=persistent(), runtime="none-such")
    with make(persistence=persistent()) as sb:
        assert sb.commands.run("cat f").stdout == "unsaved\n"
        assert [one.id for one in Sandbox.list(home=home)] == [sb.id] != [orphan]


def test_on_runsc_too(make: Make, home: Path) -> None:
    with make(persistence=persistent(), runtime="runsc") as sb:
        sb.commands.run("while :; do date > /tmp/now; sleep 0.2; done", background=True)
        sb.commands.run("echo x > f")
        until(lambda: len(ids(home)) > 1, "two saves")
    with make(persistence=persistent(), runtime="runsc") as sb:
        assert sb.commands.run("cat f").stdout == "x\n"
        assert sb.restore_report is not None
        assert sb.restore_report.level == "relaunched"


def damage(home: Path, checkpoint: str) -> None:
    """The checkpoint's record is not what it was, and nothing of it is cached."""
    gc(Home(home), cache=True)
    found = [path for path in (home / "store").rglob("*") if path.is_file() and path.name == checkpoint]
    assert found
    for path in found:
        path.chmod(0o600)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0xFF
        path.write_bytes(data)
    for cache in (home / "cache").glob("*"):
        subprocess.run(["rm", "-rf", str(cache)], check=True)


def test_a_damaged_state_is_refused_and_the_one_before_is_offered(make: Make, home: Path) -> None:
    for n in range(2):
        with make(persistence=persistent(debounce=3000.0, max_wait=3000.0)) as sb:
            sb.commands.run(f"echo {n} > f")
    newest, before = ids(home)
    damage(home, newest)
    for _ in range(2):
        with pytest.raises(Corrupt, match=before) as caught:
            make(persistence=persistent())
        assert caught.value.details == {"generation": newest, "before": before}
        assert ids(home) == [newest, before]
    assert Sandbox.list(home=home) == []
    with make(persistence=persistent(generation=before)) as sb:
        assert sb.commands.run("cat f").stdout == "0\n"
        sb.commands.run("echo mended > f")
    state = Namespace(Home(home), "agent").load()
    assert [one.id for one in state.aside] == [newest]
    with make(persistence=persistent()) as sb:
        assert sb.commands.run("cat f").stdout == "mended\n"


def test_a_failed_save_is_raised_and_nothing_is_lost(make: Make, home: Path, tmp_path: Path) -> None:
    store = tmp_path / "elsewhere"
    sb = make(persistence=persistent(), store=store)
    until(lambda: ids(home), "the first save")
    os.rename(store, tmp_path / "away")
    store.write_text("a file where the store was")

    def raised() -> bool:
        try:
            sb.commands.run("echo x >> f")
        except StoreError:
            return True
        return False

    until(raised, "the error to be raised")
    with pytest.raises(StoreError):
        sb.__exit__(None, None, None)
    assert [one.id for one in Sandbox.list(home=home)] == [sb.id]
    store.unlink()
    os.rename(tmp_path / "away", store)
    lines = Sandbox.connect(sb.id, home=home).commands.run("cat f").stdout
    with make(persistence=persistent(), store=store) as again:
        assert again.commands.run("cat f").stdout == lines
        assert [one.id for one in Sandbox.list(home=home)] == [again.id]


def test_a_paused_one_is_kept_as_it_sleeps(make: Make, home: Path) -> None:
    with make(persistence=persistent()) as sb:
        sb.commands.run("echo asleep > f")
        paused = sb.pause()
    assert ids(home)[0] == paused.id
    with make(persistence=persistent()) as sb:
        assert sb.commands.run("cat f").stdout == "asleep\n"


def test_idle_costs_no_processor_time_and_no_look(make: Make, home: Path) -> None:
    sb = make(persistence=persistent())
    sb.commands.run("echo x > f")
    until(lambda: len(ids(home)) >= 1, "the save")
    keeper = sb._keeper
    assert keeper is not None

    def still() -> bool:
        first = keeper._moved()
        time.sleep(1.5)
        return keeper._moved() == first

    until(still, "it to come to rest")
    newest = ids(home)
    assert still() or ids(home) == newest
    sb.kill()


async def _async(home: Path) -> None:
    how = persistent(debounce=3000.0, max_wait=3000.0)
    async with AsyncSandbox(home=home, runtime="runc", persistence=how) as sb:
        await sb.commands.run("echo x > f")
        assert await sb.save_state() is not None
        await sb.commands.run("echo y > f")
    async with AsyncSandbox(home=home, runtime="runc", persistence=how) as sb:
        assert (await sb.commands.run("cat f")).stdout == "y\n"
        await sb.clear_persisted_state()


def test_async_is_the_same(home: Path) -> None:
    import asyncio

    asyncio.run(_async(home))
    assert ids(home) == []


def test_state_files_are_whole_and_private(make: Make, home: Path) -> None:
    with make(persistence=persistent()) as sb:
        until(lambda: ids(home), "the save")
        folder = Namespace(Home(home), "agent").folder
        assert json.loads((folder / "owner.json").read_text())["sandbox"] == sb.id
        assert folder.stat().st_mode & 0o777 == 0o700
        assert (folder / "state.json").stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in folder.iterdir()) == ["lock", "state.json"]
