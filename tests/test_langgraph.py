"""The LangGraph saver: the published conformance suite, then what that suite does not ask of what is stored."""

from __future__ import annotations

import asyncio
import operator
import stat
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from langgraph.channels.delta import DeltaChannel
from langgraph.checkpoint.conformance import checkpointer_test, validate
from langgraph.checkpoint.conformance.capabilities import Capability
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, interrupt

from langgraph_kit import at, put
from sandkeep.errors import BadArgument, CheckpointNotFound, StateConflict
from sandkeep.langgraph import CheckpointSaver

pytest_plugins = ["langgraph_kit"]


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
