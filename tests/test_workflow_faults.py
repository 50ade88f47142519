"""Workflow state under damage, full disks, crashes, threads and other processes; and bound to a sandbox."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from apart import ENV, OWN_MOUNTS, run
from sandkeep.errors import BadArgument, Busy, CheckpointNotFound, Corrupt, SandkeepError, Unsupported
from sandkeep.workflow import BoundState, StateManager, files

pytest_plugins = ["workflow_kit"]


# --- damage


DAMAGE = {
    "empty": lambda data: b"",
    "cut short": lambda data: data[: len(data) // 2],
    "not text": lambda data: b"\xff\xfe" + data,
    "a changed value": lambda data: data.replace(b'"step": 2', b'"step": 3'),
    "no object": lambda data: b"[]",
    "no format": lambda data: data.replace(b'"format": 1', b'"format": null'),
    "a lone surrogate": lambda data: data.replace(b'"reason": "r"', b'"reason": "\\ud800"'),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_corrupt_file_is_passed_over_reported_and_kept_aside(how: str, folder: Path) -> None:
    manager = StateManager("s", folder, limit=2)
    made = []
    for step in (1, 2):
        manager.set_state("step", step)
        made.append(manager.checkpoint("r"))
    broken = DAMAGE[how](made[1].path.read_bytes())
    made[1].path.write_bytes(broken)

    fresh = StateManager("s", folder, limit=2)
    assert fresh.load() == made[0]
    assert fresh.state == {"step": 1}
    aside = Path(f"{made[1].path}.corrupt")
    assert [each.path for each in fresh.problems] == [aside]
    assert fresh.problems[0].reason
    assert aside.read_bytes() == broken
    assert not made[1].path.exists()

    later = fresh.checkpoint()
    assert later.sequence == 3
    assert fresh.checkpoints() == [later, made[0]]
    newest = fresh.checkpoint()
    assert fresh.checkpoints() == [newest, later]
    assert aside.read_bytes() == broken


def test_a_corrupt_checkpoint_asked_for_by_name_is_an_error(folder: Path) -> None:
    manager = StateManager("s", folder)
    manager.set_state("a", 1)
    made = manager.checkpoint()
    made.path.write_bytes(b"{")
    for _ in range(2):
        with pytest.raises((Corrupt, CheckpointNotFound)):
            StateManager("s", folder).load(made.id)
    with pytest.raises(CheckpointNotFound):
        manager.load()
    assert manager.state == {"a": 1}


def test_a_file_under_another_name_is_not_believed(folder: Path) -> None:
    made = StateManager("a", folder).checkpoint()
    posing = folder / made.path.name.replace("a_checkpoint", "b_checkpoint")
    posing.write_bytes(made.path.read_bytes())
    other = StateManager("b", folder)
    assert other.checkpoints() == []
    assert len(other.problems) == 1


def test_a_newer_format_is_refused_and_never_touched(folder: Path) -> None:
    manager = StateManager("s", folder, limit=2)
    manager.set_state("a", 1)
    made = manager.checkpoint()
    newer = made.path.read_bytes().replace(b'"format": 1', b'"format": 2')
    made.path.write_bytes(newer)
    for id in ("latest", made.id):
        with pytest.raises(Unsupported, match="upgrade"):
            StateManager("s", folder).load(id)
    for _ in range(4):
        manager.checkpoint()
    assert made.path.read_bytes() == newer
    assert len(manager.checkpoints()) == 2
    assert [each.path for each in manager.problems] == [made.path]


# --- failures and crashes


def test_failed_saves_and_their_leftovers_never_push_out_a_good_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = StateManager("s", folder, limit=3)
    good = [manager.checkpoint() for _ in range(3)]

    def fails(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fails)
        for _ in range(12):
            with pytest.raises(SandkeepError):
                manager.checkpoint()
    assert list(folder.glob("*.tmp")) == []
    (folder / ".s.tmp").write_text('{"half": ' * 10_000)
    assert manager.checkpoints() == good[::-1]
    newest = manager.checkpoint()
    assert manager.checkpoints() == [newest, good[2], good[1]]
    assert manager.problems == []
    assert sorted(each.name for each in folder.iterdir()) == [
        ".s.lock",
        *(each.path.name for each in (good[1], good[2], newest)),
    ]


def test_file_and_folder_are_synced_before_a_checkpoint_is_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = StateManager("s", folder)
    manager.checkpoint()
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def watched_fsync(descriptor: int) -> None:
        events.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def watched_rename(source: Any, target: Any) -> None:
        events.append("rename")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "rename", watched_rename)
    manager.checkpoint()
    assert events == ["file", "rename", "folder"]


FULL_DISK = """
import subprocess, sys
from sandkeep.errors import SandkeepError
from sandkeep.workflow import BoundState, StateManager
folder, = sys.argv[1:]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", folder], check=True)
manager, bound = StateManager("s", folder + "/sessions"), BoundState(folder + "/bound.json")
manager.set_state("a", 1); bound.set_state("a", 1)
made = manager.checkpoint()
big = "x" * 200_000
for save in (lambda: manager.checkpoint(big), lambda: bound.set_state("big", big)):
    try:
        save(); print("saved")
    except SandkeepError as error:
        print(error.code)
subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
for save in (manager.checkpoint, lambda: bound.set_state("b", 1)):
    try:
        save(); print("saved")
    except SandkeepError as error:
        print(error.code)
fresh = StateManager("s", folder + "/sessions")
print(fresh.load() == made, fresh.state, bound.state, fresh.problems)
import os
print(sorted(name for name in os.listdir(folder + "/sessions") if not name.endswith(".lock")) == [made.path.name])
"""


def test_a_full_or_read_only_disk_is_a_typed_error_and_what_was_saved_is_intact(tmp_path: Path) -> None:
    done = run(FULL_DISK, str(tmp_path), prefix=OWN_MOUNTS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:6] == [
        "STORE_FULL",
        "STORE_FULL",
        "STORE_DENIED",
        "STORE_DENIED",
        "True {'a': 1} {'a': 1} []",
        "True",
    ]


UNREADABLE = """
import os, sys
from sandkeep.errors import SandkeepError
from sandkeep.workflow import StateManager
os.chdir(sys.argv[1])
manager = StateManager("s", ".")
made = [manager.checkpoint(), manager.checkpoint()]
os.chmod(made[0].path, 0o644)
os.chmod(made[1].path, 0)
os.chmod(".", 0o755)
if os.geteuid() == 0:
    os.setegid(65534)
    os.seteuid(65534)
fresh = StateManager("s", ".")
try:
    fresh.load(); print("loaded")
except SandkeepError as error:
    print(error.code)
print([each.sequence for each in fresh.checkpoints()], [str(each.path) == made[1].path.name for each in fresh.problems])
"""


KILLED = """
import os, sys
from sandkeep.workflow import BoundState, StateManager
folder, = sys.argv[1:]
manager, bound = StateManager("s", folder, limit=5), BoundState(folder + "/bound.json")
step = 0
while True:
    manager.set_state("step", step); manager.set_state("twin", step); manager.checkpoint()
    bound.update({"step": step, "twin": step})
    os.write(1, b"%d\\n" % step)
    step += 1
"""


def test_an_unreadable_newest_checkpoint_is_never_taken_for_an_absent_one(tmp_path: Path) -> None:
    done = run(UNREADABLE, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["STORE_DENIED", "[1] [True]"]


def test_kill_9_at_any_moment_loses_nothing_that_was_reported(folder: Path) -> None:
    for round in range(4):
        child = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(folder)],
            env=ENV,
            stdout=subprocess.PIPE,
        )
        assert child.stdout is not None
        try:
            for _ in range(5 + round):
                last = int(child.stdout.readline())
        finally:
            child.send_signal(signal.SIGKILL)
            rest = child.stdout.read()
            child.stdout.close()
            child.wait(timeout=60)
        whole = [int(line) for line in rest.split(b"\n")[:-1]]
        last = whole[-1] if whole else last
        manager = StateManager("s", folder, limit=5)
        manager.load()
        assert manager.problems == []
        for state in (manager.state, BoundState(folder / "bound.json").state):
            assert state["step"] == state["twin"]
            assert state["step"] in (last, last + 1)


# --- threads and processes


def test_threads_share_one_manager(folder: Path) -> None:
    manager = StateManager("s", folder, limit=4)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for step in range(40):
                manager.set_state(f"{number}-{step}", {"n": [step]})
                manager.state  # noqa: B018
                if step % 20 == 0:
                    manager.checkpoint(f"{number}-{step}")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert errors == []
    assert len(manager.state) == 240
    assert [each.sequence for each in manager.checkpoints()] == [12, 11, 10, 9]


CROWD = """
import sys
from sandkeep.workflow import BoundState, StateManager
folder, me = sys.argv[1:]
manager, bound = StateManager("s", folder, limit=7), BoundState(folder + "/bound.json")
for step in range(15):
    manager.set_state("who", [me, step])
    manager.checkpoint()
    bound.set_state(f"{me}-{step}", step)
"""


def test_processes_share_a_session_and_a_bound_state(folder: Path) -> None:
    crowd = [subprocess.Popen([sys.executable, "-c", CROWD, str(folder), str(n)], env=ENV) for n in range(3)]
    assert [each.wait(timeout=150) for each in crowd] == [0, 0, 0]
    manager = StateManager("s", folder)
    assert [each.sequence for each in manager.checkpoints()] == list(range(45, 38, -1))
    assert manager.problems == []
    assert len(BoundState(folder / "bound.json").state) == 45


def test_a_lock_that_is_never_given_back_is_busy_in_the_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = BoundState(folder / "bound.json")
    bound.set_state("a", 1)
    monkeypatch.setattr(files, "LOCK_PATIENCE", 0.05)
    with files.locked(folder / ".bound.json.lock"):
        with pytest.raises(Busy):
            bound.set_state("a", 2)
        assert bound.state == {"a": 1}
    bound.set_state("a", 3)
    assert bound.state == {"a": 3}


# --- bound to a sandbox


def test_bound_state_is_shared_exported_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "sandbox" / "workflow.json"
    bound = BoundState(path)
    assert bound.state == {}
    assert not path.parent.exists()
    bound.update({"step": 1, "plan": ["a"]})
    other = BoundState(path)
    assert other.get_state("plan") == ["a"]
    assert other.get_state("none", 5) == 5
    saved = bound.export()
    other.set_state("step", 2)
    assert other.delete_state("plan")
    assert not other.delete_state("plan")
    assert bound.state == {"step": 2}
    bound.replace(saved)
    assert other.state == {"step": 1, "plan": ["a"]}
    with pytest.raises(BadArgument):
        bound.replace({"bad": (1,)})
    assert bound.state == saved
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("find", "put", "error"),
    [(b'"step": 1', b'"step": 2', Corrupt), (b'"format": 1', b'"format": 9', Unsupported), (b"}", b"", Corrupt)],
)
def test_a_damaged_bound_state_is_refused_until_it_is_replaced(
    tmp_path: Path, find: bytes, put: bytes, error: type[SandkeepError]
) -> None:
    bound = BoundState(tmp_path / "workflow.json")
    bound.set_state("step", 1)
    damaged = bound.path.read_bytes().replace(find, put)
    bound.path.write_bytes(damaged)
    for use in (lambda: bound.state, lambda: bound.set_state("b", 1), lambda: bound.get_state("step")):
        with pytest.raises(error):
            use()
    assert bound.path.read_bytes() == damaged
    bound.replace({"step": 7})
    assert bound.state == {"step": 7}
