"""The LangGraph saver: the published conformance suite, then what that suite does not ask.

The sandbox here is a stand-in with `snapshot` and `restore`: what is tested is when the saver calls them and what it records.
"""

from __future__ import annotations

import asyncio
import operator
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from langgraph.channels.delta import DeltaChannel
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.checkpoint.conformance import checkpointer_test, validate
from langgraph.checkpoint.conformance.capabilities import Capability
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, interrupt

from sandkeep.errors import (
    BadArgument,
    CheckpointNotFound,
    Corrupt,
    SnapshotNotFound,
    StateConflict,
    StoreError,
    Unsupported,
)
from sandkeep.langgraph import SNAPSHOT_KEY, CheckpointSaver

OWN_MOUNTS = ("unshare", "--mount") if os.geteuid() == 0 else ("unshare", "--user", "--map-root-user", "--mount")
SOURCE = str(Path(__file__).resolve().parent.parent / "src")


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[CheckpointSaver]:
    with CheckpointSaver(tmp_path / "threads") as made:
        yield made


def at(thread: str, id: str | None = None, namespace: str = "") -> Any:
    return {"configurable": {"thread_id": thread, "checkpoint_ns": namespace, **({"checkpoint_id": id} if id else {})}}


def put(
    saver: CheckpointSaver,
    thread: str,
    values: dict[str, Any] | None = None,
    parent: str | None = None,
    id: str = "",
    **about: Any,
) -> Any:
    """A checkpoint whose channels are all at version 1, as the crudest caller would write it."""
    checkpoint = empty_checkpoint()
    checkpoint["id"] = id or checkpoint["id"]
    checkpoint["channel_values"] = values or {}
    checkpoint["channel_versions"] = dict.fromkeys(values or {}, 1)
    return saver.put(
        at(thread, parent), checkpoint, {"source": "loop", "step": 0, **about}, checkpoint["channel_versions"]
    )  # type: ignore[typeddict-item]


# --- the published suite


@pytest.mark.parametrize("capability", [each.value for each in Capability])
def test_conformance(capability: str, tmp_path: Path) -> None:
    @checkpointer_test(name=f"sandkeep-{capability}")
    async def ours() -> AsyncIterator[CheckpointSaver]:
        with CheckpointSaver(tmp_path / "threads") as saver:
            yield saver

    report = asyncio.run(validate(ours, capabilities={capability}))
    result = report.results[capability]
    assert result.detected
    assert result.failures == []
    assert result.tests_passed > 4


# --- real graphs


class Count(TypedDict):
    total: Annotated[int, operator.add]
    log: Annotated[list[str], operator.add]


def counting(saver: CheckpointSaver) -> Any:
    def one(state: Count) -> dict[str, Any]:
        return {"total": 1, "log": ["one"]}

    def ask(state: Count) -> dict[str, Any]:
        return {"log": [interrupt("go on?")]}

    graph = StateGraph(Count)
    graph.add_node("one", one)
    graph.add_node("ask", ask)
    graph.add_edge(START, "one")
    graph.add_edge("one", "ask")
    graph.add_edge("ask", END)
    return graph.compile(checkpointer=saver)


def test_a_graph_is_interrupted_and_goes_on_in_another_process(tmp_path: Path) -> None:
    with CheckpointSaver(tmp_path / "t.sqlite") as saver:
        assert "__interrupt__" in counting(saver).invoke({"total": 0, "log": []}, at("a"))
    with CheckpointSaver(tmp_path / "t.sqlite") as saver:
        done = counting(saver).invoke(Command(resume="yes"), at("a"))
        assert done == {"total": 1, "log": ["one", "yes"]}
        history = list(counting(saver).get_state_history(at("a")))
        assert [each.metadata["step"] for each in history] == [2, 1, 0, -1]
    assert stat.S_IMODE((tmp_path / "t.sqlite").stat().st_mode) == 0o600


def test_async_graphs(saver: CheckpointSaver) -> None:
    async def both() -> Any:
        graph = counting(saver)
        await graph.ainvoke({"total": 0, "log": []}, at("a"))
        done = await graph.ainvoke(Command(resume="yes"), at("a"))
        return done, [each async for each in saver.alist(at("a"), limit=2)], await saver.aget_tuple(at("a"))

    done, two, latest = asyncio.run(both())
    assert done == {"total": 1, "log": ["one", "yes"]}
    assert [each.metadata["step"] for each in two] == [2, 1]
    assert latest.checkpoint["id"] == two[0].checkpoint["id"]


class Talk(TypedDict):
    words: Annotated[
        list[str],
        DeltaChannel(lambda words, writes: [*words, *(w for each in writes for w in each)], snapshot_frequency=4),
    ]
    turn: int


def talking(saver: CheckpointSaver) -> Any:
    graph = StateGraph(Talk)
    for name in ("a", "b"):
        graph.add_node(name, lambda state, name=name: {"words": [f"{name}{state['turn']}"]})
        graph.add_edge(START, name)
        graph.add_edge(name, END)
    return graph.compile(checkpointer=saver)


def talk(graph: Any, turns: int) -> list[str]:
    words: list[str] = []
    for turn in range(turns):
        words = graph.invoke({"words": [f"u{turn}"], "turn": turn}, {**at("t"), "run_id": None}, durability="sync")[
            "words"
        ]
    return words


def test_delta_channels_are_rebuilt_at_every_checkpoint_and_as_the_default_walk_does(saver: CheckpointSaver) -> None:
    graph = talking(saver)
    words = talk(graph, 5)
    assert words == [f"{who}{turn}" for turn in range(5) for who in "uab"]
    assert graph.get_state(at("t")).values["words"] == words
    for state in graph.get_state_history(at("t")):
        assert state.values.get("words", []) == words[: len(state.values.get("words", []))]
        walked = super(CheckpointSaver, saver).get_delta_channel_history(
            config=state.config, channels=["words", "turn"]
        )
        assert saver.get_delta_channel_history(config=state.config, channels=["words", "turn"]) == walked


@pytest.mark.parametrize("turns", [1, 2, 3, 4, 5])
def test_pruning_keeps_what_delta_channels_are_rebuilt_from(saver: CheckpointSaver, turns: int) -> None:
    graph = talking(saver)
    words = talk(graph, turns)
    before = len(list(saver.list(at("t"))))
    saver.copy_thread("t", "copy")
    saver.prune(["t"])
    assert graph.get_state(at("t")).values["words"] == words
    assert len(list(saver.list(at("t")))) <= min(before, 8)
    assert graph.get_state(at("copy")).values["words"] == words
    assert len(list(saver.list(at("copy")))) == before


def test_runs_that_delta_channels_live_on_are_not_deleted(saver: CheckpointSaver) -> None:
    graph = talking(saver)
    for turn in range(2):
        graph.invoke(
            {"words": ["u"], "turn": turn}, {**at("t"), "metadata": {"run_id": f"run{turn}"}}, durability="sync"
        )
    before = [each.config for each in saver.list(at("t"))]
    with pytest.raises(StateConflict):
        saver.delete_for_runs(["run0"])
    assert [each.config for each in saver.list(at("t"))] == before
    saver.delete_for_runs(["run1"])
    assert graph.get_state(at("t")).values["words"] == ["u", "a0", "b0"]
    saver.delete_for_runs(["run0"])
    assert list(saver.list(at("t"))) == []


# --- what is stored


def test_branches_with_equal_versions_do_not_overwrite_each_other(saver: CheckpointSaver) -> None:
    root = put(saver, "t", {"x": "root"})["configurable"]["checkpoint_id"]
    left, right = put(saver, "t", {"x": "left"}, root), put(saver, "t", {"x": "right"}, root)
    values = [saver.get_tuple(each).checkpoint["channel_values"]["x"] for each in (left, right, at("t", root))]  # type: ignore[union-attr]
    assert values == ["left", "right", "root"]


def test_an_unchanged_channel_is_stored_once_and_gone_with_its_last_user(saver: CheckpointSaver) -> None:
    big = {"n": "x" * 100_000}
    for _ in range(5):
        put(saver, "t", {"big": big, "small": 1})
    count = "SELECT count(*), coalesce(sum(length(data)), 0) FROM content"
    with saver.database.reading() as connection:
        assert connection.execute(count).fetchone()[0] == 2
    saver.prune(["t"])
    assert saver.get_tuple(at("t")).checkpoint["channel_values"] == {"big": big, "small": 1}  # type: ignore[union-attr]
    put(saver, "t", {"small": 1}, run_id="r")
    saver.prune(["t"])
    with saver.database.reading() as connection:
        assert connection.execute(count).fetchone()[0] == 1
    saver.delete_for_runs(["r"])
    with saver.database.reading() as connection:
        assert connection.execute(count).fetchone() == (0, 0)


def test_the_latest_is_the_last_to_arrive_whatever_the_clock_said(saver: CheckpointSaver) -> None:
    ids = ["9-from-the-future", "1-after-the-step-back", "5-then"]
    for id in ids:
        put(saver, "t", id=id)
    assert saver.get_tuple(at("t")).checkpoint["id"] == "5-then"  # type: ignore[union-attr]
    assert [each.checkpoint["id"] for each in saver.list(at("t"))] == ids[::-1]
    assert [each.checkpoint["id"] for each in saver.list(at("t"), before=at("t", ids[1]))] == [ids[0]]
    saver.prune(["t"])
    assert [each.checkpoint["id"] for each in saver.list(None)] == ["5-then"]


def test_the_same_checkpoint_put_twice_is_one(saver: CheckpointSaver) -> None:
    put(saver, "t", {"x": 1}, id="a", step=1)
    put(saver, "t", {"y": 2}, id="a", step=2)
    (only,) = saver.list(at("t"))
    assert only.checkpoint["channel_values"] == {"y": 2}
    assert only.metadata["step"] == 2


def test_writes_come_back_in_the_order_of_a_live_run(saver: CheckpointSaver) -> None:
    config = put(saver, "t")
    saver.put_writes(config, [("c", 1), ("c", 2)], "task-a", "path-2")
    saver.put_writes(config, [("c", 3)], "task-b", "path-1")
    saver.put_writes(config, [("c", 9)], "task-b", "path-1")
    saver.put_writes(config, [("__error__", "first")], "task-c")
    saver.put_writes(config, [("__error__", "second")], "task-c")
    found = saver.get_tuple(config)
    assert found is not None
    assert found.pending_writes == [
        ("task-c", "__error__", "second"),
        ("task-b", "c", 3),
        ("task-a", "c", 1),
        ("task-a", "c", 2),
    ]


def test_a_filter_for_none_matches_only_what_is_there(saver: CheckpointSaver) -> None:
    put(saver, "t", note=None, id="with")
    put(saver, "t", id="without")
    assert [each.checkpoint["id"] for each in saver.list(at("t"), filter={"note": None})] == ["with"]
    assert list(saver.list(at("t"), limit=0)) == []


@pytest.mark.parametrize("thread", ["", None, "\ud800"])
def test_a_config_must_name_a_thread(saver: CheckpointSaver, thread: Any) -> None:
    with pytest.raises(BadArgument):
        saver.get_tuple({"configurable": {"thread_id": thread}})
    with pytest.raises(BadArgument):
        list(saver.list({"configurable": {"thread_id": thread}}))


def test_bad_calls_change_nothing(saver: CheckpointSaver) -> None:
    config = put(saver, "t", {"x": 1})
    put(saver, "u")
    before = list(saver.list(None))
    with pytest.raises(BadArgument):
        put(saver, "t", {"x": 2, "lock": threading.Lock()})
    with pytest.raises(BadArgument):
        saver.put_writes(config, [("x", 1), ("lock", threading.Lock())], "task")
    with pytest.raises(BadArgument):
        saver.put_writes(at("t"), [("x", 1)], "task")
    with pytest.raises(BadArgument):
        saver.prune(["t"], strategy="keep_some")
    with pytest.raises(StateConflict):
        saver.copy_thread("t", "u")
    with pytest.raises(StateConflict):
        saver.copy_thread("t", "t")
    with pytest.raises(CheckpointNotFound):
        saver.copy_thread("absent", "new")
    assert list(saver.list(None)) == before


# --- the file


def test_a_value_that_changed_on_disk_is_not_returned(saver: CheckpointSaver) -> None:
    old = put(saver, "t", {"x": "old"})
    put(saver, "t", {"x": "new"})
    with saver.database.transaction() as connection:
        connection.execute("UPDATE content SET data = CAST(replace(data, 'new', 'bad') AS BLOB)")
    with pytest.raises(Corrupt, match="'x'"):
        saver.get_tuple(at("t"))
    assert saver.get_tuple(old) is not None


def test_files_that_are_not_ours_are_refused_untouched(tmp_path: Path) -> None:
    text = tmp_path / "text.db"
    text.write_bytes(b"not a database, but long enough to look like one" * 100)
    with pytest.raises(Corrupt):
        CheckpointSaver(text)
    assert text.read_bytes().startswith(b"not a database")
    for name, statement, error in [
        ("other.db", "CREATE TABLE theirs (x)", Corrupt),
        ("newer.db", "PRAGMA user_version = 99", Unsupported),
    ]:
        theirs = sqlite3.connect(tmp_path / name)
        theirs.execute(statement)
        theirs.commit()
        theirs.close()
        with pytest.raises(error):
            CheckpointSaver(tmp_path / name)


def test_a_folder_that_can_not_be_made_is_an_error_and_one_that_is_made_is_private(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError):
        CheckpointSaver(tmp_path / "file" / "threads")
    folder = tmp_path / "a" / "b"
    CheckpointSaver(folder).close()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


FULL = """
import subprocess, sys
sys.path[:0] = sys.argv[2:]
from langgraph.checkpoint.base import empty_checkpoint
from sandkeep.errors import SandkeepError
from sandkeep.langgraph import CheckpointSaver
folder = sys.argv[1]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=True)
saver = CheckpointSaver(folder)
config = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
def put(text):
    checkpoint = empty_checkpoint()
    checkpoint["channel_values"] = {"x": text}
    return saver.put(config, checkpoint, {}, {})
put("small")
try:
    put("x" * 3_000_000)
except SandkeepError as error:
    print(error.code)
print([each.checkpoint["channel_values"] for each in saver.list(config)])
put("goes on")
print(len(list(saver.list(config))))
saver.close()
"""


def test_a_full_disk_is_a_typed_error_and_what_was_saved_is_intact(tmp_path: Path) -> None:
    done = subprocess.run(
        [*OWN_MOUNTS, sys.executable, "-c", FULL, str(tmp_path), SOURCE],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["STORE_FULL", "[{'x': 'small'}]", "2"]


WRITER = """
import os, sys
sys.path[:0] = sys.argv[3:]
from langgraph.checkpoint.base import empty_checkpoint
from sandkeep.langgraph import CheckpointSaver
folder, me = sys.argv[1:3]
saver = CheckpointSaver(folder)
step = 0
while me == "endless" or step < 15:
    checkpoint = empty_checkpoint()
    checkpoint["channel_values"] = {"step": step}
    config = saver.put({"configurable": {"thread_id": me, "checkpoint_ns": ""}}, checkpoint, {"step": step}, {"step": step})
    saver.put_writes(config, [("w", step)], "task")
    os.write(1, b"%d\\n" % step)
    step += 1
saver.close()
"""


def writer(folder: Path, me: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), me, SOURCE], stdout=subprocess.PIPE, env=dict(os.environ)
    )


def test_processes_share_a_new_file(tmp_path: Path) -> None:
    crowd = [writer(tmp_path / "threads", f"t{number}") for number in range(3)]
    for each in crowd:
        each.communicate(timeout=150)
    assert [each.returncode for each in crowd] == [0, 0, 0]
    with CheckpointSaver(tmp_path / "threads") as saver:
        for number in range(3):
            assert [each.metadata["step"] for each in saver.list(at(f"t{number}"))] == list(range(14, -1, -1))


def test_kill_9_loses_nothing_that_was_reported(tmp_path: Path) -> None:
    child = writer(tmp_path / "threads", "endless")
    assert child.stdout is not None
    try:
        for _ in range(8):
            last = int(child.stdout.readline())
    finally:
        child.send_signal(signal.SIGKILL)
        rest = [int(line) for line in child.stdout.read().split(b"\n")[:-1]]
        child.stdout.close()
        child.wait(timeout=60)
    last = rest[-1] if rest else last
    with CheckpointSaver(tmp_path / "threads") as saver:
        found = list(saver.list(at("endless")))
        assert [each.checkpoint["channel_values"]["step"] for each in found] == list(range(len(found) - 1, -1, -1))
        assert len(found) in (last + 1, last + 2)
        assert found[-1 - last].pending_writes == [("task", "w", last)]


def test_threads_share_one_saver(saver: CheckpointSaver) -> None:
    errors: list[BaseException] = []

    def work(name: str) -> None:
        try:
            for step in range(10):
                put(saver, name, {"step": step}, step=step)
                assert next(saver.list(at(name))).metadata["step"] == step
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(f"t{number}",)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert errors == []
    assert len(list(saver.list(None))) == 40


# --- bound to a sandbox


@dataclass
class Snapshot:
    id: str


class StandIn:
    """A machine of one file."""

    def __init__(self) -> None:
        self.file = 0
        self.saved: dict[str, int] = {}
        self.comments: list[str] = []
        self.broken = False

    def snapshot(self, comment: str) -> Snapshot:
        if self.broken:
            raise RuntimeError("no snapshot today")
        self.comments.append(comment)
        self.saved[f"snap-{len(self.saved)}"] = self.file
        return Snapshot(f"snap-{len(self.saved) - 1}")

    def restore(self, id: str) -> None:
        self.file = self.saved[id]


class Steps(TypedDict):
    step: int


def stepping(saver: CheckpointSaver, sandbox: StandIn) -> Any:
    def work(state: Steps) -> dict[str, int]:
        sandbox.file += 10
        return {"step": state["step"] + 1}

    graph = StateGraph(Steps)
    graph.add_node("first", work)
    graph.add_node("second", work)
    graph.add_edge(START, "first")
    graph.add_edge("first", "second")
    graph.add_edge("second", END)
    return graph.compile(checkpointer=saver)


def test_rewinding_a_thread_rewinds_its_sandbox(tmp_path: Path) -> None:
    sandbox = StandIn()
    with CheckpointSaver(tmp_path, sandbox=sandbox) as saver:
        graph = stepping(saver, sandbox)
        assert graph.invoke({"step": 0}, at("t"), durability="sync") == {"step": 2}
        assert sandbox.file == 20
        seen = {}
        for state in graph.get_state_history(at("t")):
            seen[state.values.get("step")] = state.config
            saver.rewind(state.config)
            assert sandbox.file == state.values.get("step", 0) * 10
        assert all("t step" in comment for comment in sandbox.comments)
        config = saver.rewind(seen[1])
        assert graph.invoke(None, config, durability="sync") == {"step": 2}
        assert sandbox.file == 20
        sandbox.file = 99
        assert asyncio.run(saver.arewind(at("t")))["configurable"]["checkpoint_id"]
        assert sandbox.file == 20


@pytest.mark.parametrize("durability", ["async", "exit"])
def test_a_bound_graph_must_save_before_it_goes_on(tmp_path: Path, durability: str) -> None:
    sandbox = StandIn()
    with CheckpointSaver(tmp_path, sandbox=sandbox) as saver:
        with pytest.raises(BadArgument, match="durability='sync'"):
            stepping(saver, sandbox).invoke({"step": 0}, at("t"), durability=durability)
        assert list(saver.list(None)) == []


def test_no_checkpoint_without_its_snapshot(tmp_path: Path) -> None:
    sandbox = StandIn()
    with CheckpointSaver(tmp_path, sandbox=sandbox) as saver:
        sandbox.broken = True
        with pytest.raises(RuntimeError):
            put(saver, "t")
        assert list(saver.list(None)) == []
        with pytest.raises(CheckpointNotFound):
            saver.rewind(at("t"))


def test_a_snapshot_id_is_never_inherited(tmp_path: Path) -> None:
    with CheckpointSaver(tmp_path) as saver:
        config = put(saver, "t", **{SNAPSHOT_KEY: "of another checkpoint"})
        with pytest.raises(BadArgument):
            saver.rewind(config)
        saver.sandbox = StandIn()
        with pytest.raises(SnapshotNotFound):
            saver.rewind(config)
