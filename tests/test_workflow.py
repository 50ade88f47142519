"""Workflow state: what JSON can't hold is refused, what was saved is found again, whatever its name and the clock say."""

from __future__ import annotations

import enum
import json
import math
import stat
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandkeep.errors import BadArgument, CheckpointNotFound, Corrupt
from sandkeep.workflow import BoundState, StateManager, WorkflowState
from sandkeep.workflow import manager as manager_module
from sandkeep.workflow.manager import file_name

pytest_plugins = ["workflow_kit"]


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
