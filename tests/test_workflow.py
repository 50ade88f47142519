"""Workflow state: what JSON can't hold is refused, what was saved stays, and no crash, clock, neighbour or name can change that."""

from __future__ import annotations

import enum
import json
import math
import os
import signal
import stat
import subprocess
import sys
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandkeep.errors import (
    BadArgument,
    Busy,
    CheckpointNotFound,
    Corrupt,
    SandkeepError,
    Unsupported,
)
from sandkeep.workflow import BoundState, StateManager, WorkflowState, files
from sandkeep.workflow import manager as manager_module
from sandkeep.workflow.manager import file_name

OWN_MOUNTS = ("unshare", "--mount") if os.geteuid() == 0 else ("unshare", "--user", "--map-root-user", "--mount")
SOURCE = str(Path(__file__).resolve().parent.parent / "src")


class Colour(enum.IntEnum):
    RED = 1


def cycle() -> list[Any]:
    ring: list[Any] = []
    ring.append({"again": ring})
    return ring


def deep(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


REFUSED: dict[str, tuple[Any, str]] = {
    "nan": ({"cost": math.nan}, "plan.cost"),
    "infinity": ([1.0, math.inf], "plan[1]"),
    "tuple": ({"size": (1, 2)}, "plan.size"),
    "integer key": ({"inner": {1: "one"}}, "plan.inner"),
    "bytes": ([b"raw"], "plan[0]"),
    "set": ({"tags": {"a"}}, "plan.tags"),
    "enum": (Colour.RED, "plan"),
    "dict subclass": (OrderedDict(a=1), "plan"),
    "object": (object(), "plan"),
    "lone surrogate": ("\ud800", "plan"),
    "surrogate in a key": ({"\udc00": 1}, "plan"),
    "cycle": (cycle(), "plan[0].again"),
    "too deep": (deep(200), "plan"),
    "huge integer": (10**5000, "plan"),
}

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "sessions"


def run(script: str, *arguments: str, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*prefix, sys.executable, "-c", script, *arguments],
        env={**os.environ, "PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


# --- the variables


@pytest.mark.parametrize("case", REFUSED)
def test_what_json_would_change_is_refused_with_its_place_and_nothing_changes(case: str, folder: Path) -> None:
    value, place = REFUSED[case]
    manager, bound = StateManager("s", folder), BoundState(folder / "bound.json")
    manager.set_state("kept", 1)
    bound.set_state("kept", 1)
    before = (folder / "bound.json").read_bytes()
    for holder in (manager, bound):
        with pytest.raises(BadArgument) as caught:
            holder.update({"fine": 1, "plan": value})
        assert caught.value.details["key"].startswith(place)
        assert caught.value.code == "BAD_ARGUMENT"
        assert holder.state == {"kept": 1}
    assert (folder / "bound.json").read_bytes() == before


@pytest.mark.parametrize("name", [1, None, b"k", ("a",), "\ud800"])
def test_a_variable_is_named_by_a_text(name: Any, folder: Path) -> None:
    manager = StateManager("s", folder)
    with pytest.raises(BadArgument):
        manager.set_state(name, 1)
    with pytest.raises(BadArgument):
        manager.update([("a", 1)])  # type: ignore[arg-type]
    assert manager.state == {}
    assert not folder.exists()


@given(st.dictionaries(st.text(), json_values, max_size=5))
@settings(max_examples=60)
def test_what_goes_in_comes_out_with_the_same_types(variables: dict[str, Any]) -> None:
    state = WorkflowState(variables)
    again = WorkflowState.from_json(state.to_json()).variables()
    assert repr(sorted(again.items())) == repr(sorted(_sorted(variables).items()))


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(each) for each in value] if isinstance(value, list) else value


def test_values_are_copied_in_and_out(folder: Path) -> None:
    manager = StateManager("s", folder)
    mine = {"steps": [1]}
    manager.set_state("plan", mine)
    mine["steps"].append(math.nan)  # type: ignore[arg-type]
    manager.get_state("plan")["steps"].append(2)
    manager.state["plan"]["steps"].append(3)
    assert manager.get_state("plan") == {"steps": [1]}
    assert manager.get_state("absent", "default") == "default"
    shared = [1]
    manager.set_state("twice", [shared, shared])
    assert manager.delete_state("twice")
    assert not manager.delete_state("twice")


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": NaN}', '{"a": 1} x', "[" * 100_000])
def test_text_that_is_no_json_object_is_corrupt(text: str) -> None:
    with pytest.raises(Corrupt):
        WorkflowState.from_json(text)


# --- checkpoints


def test_a_checkpoint_says_when_why_where_and_from_what(folder: Path) -> None:
    manager = StateManager("session_12345", folder)
    manager.update({"current_stage": "image_processing", "progress": 0.75, "parent_session": "before"})
    first = manager.checkpoint("workflow_transition")
    manager.set_state("current_stage", "done")
    second = manager.checkpoint()
    assert (first.reason, first.stage, first.parent, first.parent_session) == (
        "workflow_transition",
        "image_processing",
        None,
        "before",
    )
    assert (second.reason, second.stage, second.parent) == ("manual", "done", first.id)
    assert first.timestamp.endswith("+00:00")
    assert first.path.parent == folder
    assert first.path.name == f"session_12345_checkpoint_{first.id}.json"
    assert manager.checkpoints() == [second, first]
    record = json.loads(first.path.read_text())
    assert record["session_id"] == "session_12345"
    assert record["state_info"]["progress"] == 0.75
    assert stat.S_IMODE(first.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_load_and_rollback_in_a_fresh_manager(folder: Path) -> None:
    manager = StateManager("s", folder)
    made = []
    for step in range(3):
        manager.set_state("step", step)
        made.append(manager.checkpoint(f"step {step}"))
    fresh = StateManager("s", folder)
    assert fresh.state == {}
    assert fresh.load() == made[2]
    assert fresh.state == {"step": 2}
    assert fresh.load(made[0].id) == made[0]
    assert fresh.state == {"step": 0}
    back = fresh.rollback(made[1].id)
    assert (back.parent, back.reason, fresh.state) == (made[1].id, f"rollback to {made[1].id}", {"step": 1})
    assert [each.id for each in fresh.checkpoints()] == [back.id, made[2].id, made[1].id, made[0].id]
    after_a_crash = StateManager("s", folder)
    assert after_a_crash.load() == back
    assert after_a_crash.state == {"step": 1}


@pytest.mark.parametrize("id", ["latest", "nope", "../../x", ""])
def test_a_missing_checkpoint_is_not_found_and_changes_nothing(id: str, folder: Path) -> None:
    manager = StateManager("s", folder)
    manager.set_state("a", 1)
    assert manager.checkpoints() == []
    for verb in (manager.load, manager.rollback):
        with pytest.raises(CheckpointNotFound):
            verb(id)
    assert manager.state == {"a": 1}
    assert not folder.exists()


def test_only_the_newest_are_kept(folder: Path) -> None:
    manager = StateManager("s", folder, limit=3)
    made = [manager.checkpoint(str(step)) for step in range(7)]
    assert manager.checkpoints() == made[:3:-1]
    assert [each.sequence for each in made] == list(range(1, 8))
    one = StateManager("s", folder, limit=1)
    last = one.checkpoint()
    assert one.checkpoints() == [last]
    rolled = one.rollback(last.id)
    assert one.checkpoints() == [rolled]


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, "3", None])
def test_a_limit_below_one_is_refused(limit: Any, folder: Path) -> None:
    with pytest.raises(BadArgument):
        StateManager("s", folder, limit=limit)
    assert not folder.exists()


@pytest.mark.parametrize("directory", ["", "a\0b", 5, b"x"])
def test_a_folder_without_a_name_is_refused(directory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadArgument):
        StateManager("s", directory)
    assert list(tmp_path.iterdir()) == []


def test_the_default_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDKEEP_HOME", str(tmp_path / "home"))
    manager = StateManager()
    assert manager.checkpoint().path.parent == tmp_path / "home" / "sessions"
    assert stat.S_IMODE((tmp_path / "home").stat().st_mode) == 0o700
    monkeypatch.delenv("SANDKEEP_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "person"))
    assert StateManager().checkpoint().path.parent == tmp_path / "person" / ".sandkeep" / "sessions"


def test_order_does_not_trust_the_clock(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = manager_module.datetime
    now = [real(2030, 1, 1, tzinfo=manager_module.UTC)]

    class Clock:
        @staticmethod
        def now(zone: Any) -> Any:
            return now[0]

    monkeypatch.setattr(manager_module, "datetime", Clock)
    manager = StateManager("s", folder, limit=3)
    future = manager.checkpoint("future")
    same = manager.checkpoint("same instant")
    now[0] = real(1999, 1, 1, tzinfo=manager_module.UTC)
    past = [manager.checkpoint("after the step back"), manager.checkpoint("and again")]
    assert manager.checkpoints() == [past[1], past[0], same]
    assert future.path != same.path
    assert StateManager("s", folder).load() == past[1]


# --- names


HOSTILE = [
    "../../x",
    "*",
    "a*",
    "[ab]",
    "?",
    "a/b",
    "/etc/x",
    ".",
    "..",
    "a\0b",
    "a\nb",
    "ü",
    "漢" * 300,
    "x" * 5000,
    " ",
    "-",
    "%2E",
]


def test_any_session_id_is_safe_and_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b" / "sessions"
    everyone = [*HOSTILE, "a", "ab", "x" * 5001, "a_checkpoint_", "a_checkpoint_20200101_000000_000000_000001"]
    for name in everyone:
        manager = StateManager(name, folder, limit=1)
        manager.set_state("me", name)
        manager.checkpoint("first")
        manager.checkpoint("second")
    assert len({file_name(name) for name in everyone}) == len(everyone)
    for name in everyone:
        manager = StateManager(name, folder)
        assert [each.reason for each in manager.checkpoints()] == ["second"]
        manager.load()
        assert manager.state == {"me": name}
        assert manager.problems == []
    assert [each.name for each in tmp_path.iterdir()] == ["a"]
    assert [each.name for each in (tmp_path / "a" / "b").iterdir()] == ["sessions"]
    assert all(each.is_file() for each in folder.iterdir())


@pytest.mark.parametrize("name", ["", 7, b"x", "\ud800"])
def test_a_session_id_must_be_a_text(name: Any, folder: Path) -> None:
    with pytest.raises(BadArgument):
        StateManager(name, folder)


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
            env={**os.environ, "PYTHONPATH": SOURCE},
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
    crowd = [
        subprocess.Popen([sys.executable, "-c", CROWD, str(folder), str(n)], env={**os.environ, "PYTHONPATH": SOURCE})
        for n in range(3)
    ]
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
