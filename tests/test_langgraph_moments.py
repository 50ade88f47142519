"""The snapshot of a checkpoint is of the moment between two steps, however a graph runs.

Nodes leave their names in a machine of one list and in the graph's state, so the two must agree at every checkpoint. Saving is
held back until the last node ran, as a slow disk would, where LangGraph does not wait for it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, interrupt

from langgraph_kit import at
from sandkeep.errors import BadArgument, SnapshotNotFound
from sandkeep.langgraph import SNAPSHOT_KEY, CheckpointSaver


@dataclass
class Snapshot:
    id: str


class Machine:
    def __init__(self) -> None:
        self.files: list[str] = []
        self.saved: dict[str, list[str]] = {}
        self.taken = 0

    def snapshot(self, comment: str) -> Snapshot:
        self.taken += 1
        self.saved[f"snap-{self.taken}"] = [*self.files]
        return Snapshot(f"snap-{self.taken}")

    def restore(self, id: str) -> None:
        self.files = [*self.saved[id]]

    def delete_snapshot(self, id: str) -> None:
        if self.saved.pop(id, None) is None:
            raise SnapshotNotFound(id)


class Slow(CheckpointSaver):
    """Saves nothing until the gate opens. (The end of a graph inside waits for its own saves.)"""

    gate: threading.Event | None = None

    def put(self, config: Any, *given: Any) -> Any:
        if self.gate is not None and not config["configurable"].get("checkpoint_ns"):
            assert self.gate.wait(60)
        return super().put(config, *given)


def union(old: list[str], new: list[str]) -> list[str]:
    return [*old, *(name for name in new if name not in old)]


class Done(TypedDict):
    done: Annotated[list[str], union]


class World:
    def __init__(self, where: Path) -> None:
        self.machine = Machine()
        self.saver = Slow(where, sandbox=self.machine)
        self.fails: set[str] = set()
        self.last = "h"
        self.undone = 0  # checkpoints that a rewind took back; their snapshots stay with the machine

    def node(self, name: str, asks: bool = False) -> Callable[[Done], dict[str, list[str]]]:
        def run(state: Done) -> dict[str, list[str]]:
            if asks:
                interrupt("go on?")
            if name in self.fails:
                self.machine.files.append(f"half of {name}")
                self.open()
                raise RuntimeError(f"{name} fails")
            self.machine.files.append(name)
            if name == self.last:
                self.open()
            return {"done": [name]}

        return run

    def open(self) -> None:
        if self.saver.gate is not None:
            self.saver.gate.set()

    def close_gate(self) -> None:
        self.saver.gate = threading.Event()

    def graph(self, inner: Any = None, asks: bool = False) -> Any:
        """f; then g1 and g2 (or a graph inside) side by side; then h."""
        graph = StateGraph(Done)
        graph.add_node("f", self.node("f"))
        graph.add_node("g1", inner or self.node("g1"))
        graph.add_node("h", self.node("h"))
        graph.add_edge(START, "f")
        graph.add_edge("f", "g1")
        if inner is None:
            graph.add_node("g2", self.node("g2", asks))
            graph.add_edge("f", "g2")
            graph.add_edge(["g1", "g2"], "h")
        else:
            graph.add_edge("g1", "h")
        graph.add_edge("h", END)
        return graph.compile(checkpointer=self.saver)

    def inner(self, asks: bool = False) -> Any:
        graph = StateGraph(Done)
        graph.add_node("s1", self.node("s1"))
        graph.add_node("s2", self.node("s2", asks))
        graph.add_edge(START, "s1")
        graph.add_edge("s1", "s2")
        return graph.compile()

    def check(self) -> int:
        """Every checkpoint agrees with its snapshot, and there is no other snapshot."""
        named = []
        for each in self.saver.list({"configurable": {"thread_id": "t"}}):
            values = each.checkpoint["channel_values"]
            done = values.get("done") or values.get("__start__", {}).get("done", [])
            named.append(each.metadata[SNAPSHOT_KEY])  # type: ignore[literal-required]
            assert sorted(self.machine.saved[named[-1]]) == sorted(done), each.metadata
        return len(named)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "threads")
    yield made
    named = {each.metadata[SNAPSHOT_KEY] for each in made.saver.list(None)}  # type: ignore[literal-required]
    made.saver.close()
    assert named <= set(made.machine.saved)
    assert len(made.machine.saved) == len(named) + made.undone


T: Any = at("t")


def invoke(graph: Any, given: Any, config: Any = T, **more: Any) -> None:
    graph.invoke(given, config, **more)


def ainvoke(graph: Any, given: Any, config: Any = T, **more: Any) -> None:
    asyncio.run(graph.ainvoke(given, config, **more))


def stream(graph: Any, given: Any, config: Any = T, **more: Any) -> None:
    assert [*graph.stream(given, config, **more)]


def stream_from_threads(graph: Any, given: Any, config: Any = T, **more: Any) -> None:
    """As web servers go through a generator: each step in a thread with a context of its own."""

    async def drain() -> None:
        chunks = graph.stream(given, config, **more)
        while await asyncio.to_thread(next, chunks, None) is not None:
            pass

    asyncio.run(drain())


def astream(graph: Any, given: Any, config: Any = T, **more: Any) -> None:
    async def drain() -> None:
        assert [chunk async for chunk in graph.astream(given, config, **more)]

    asyncio.run(drain())


WAYS = [invoke, ainvoke, stream, stream_from_threads, astream]
DURABILITIES: list[dict[str, str]] = [{}, {"durability": "async"}, {"durability": "sync"}]


def hold(world: World, more: dict[str, str]) -> None:
    if more.get("durability") != "sync":
        world.close_gate()


@pytest.mark.parametrize("more", DURABILITIES, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_every_checkpoint_has_the_snapshot_of_its_own_moment(way: Any, more: dict[str, str], world: World) -> None:
    hold(world, more)
    way(world.graph(), {"done": []}, **more)
    assert world.check() == 5
    assert world.saver.rewind(at("t"))
    assert sorted(world.machine.files) == ["f", "g1", "g2", "h"]


@pytest.mark.parametrize("more", DURABILITIES, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_graphs_inside_graphs_too(way: Any, more: dict[str, str], world: World) -> None:
    hold(world, more)
    way(world.graph(world.inner()), {"done": []}, **more)
    assert world.check() == 9


@pytest.mark.parametrize("more", DURABILITIES, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_a_failed_step_leaves_the_moment_before_it(way: Any, more: dict[str, str], world: World) -> None:
    hold(world, more)
    world.fails = {"h"}
    graph = world.graph()
    with pytest.raises(RuntimeError, match="h fails"):
        way(graph, {"done": []}, **more)
    assert "half of h" in world.machine.files
    assert world.check() == 4
    world.saver.rewind(at("t"))
    world.fails = set()
    way(graph, None, **more)
    assert sorted(world.machine.files) == ["f", "g1", "g2", "h"]
    assert world.check() == 5


@pytest.mark.parametrize("way", WAYS)
def test_going_back_in_time_begins_with_the_machine_of_that_time(way: Any, world: World) -> None:
    graph = world.graph()
    graph.invoke({"done": []}, at("t"))
    (after_f,) = [state for state in graph.get_state_history(at("t")) if state.values.get("done") == ["f"]]
    config = world.saver.rewind(after_f.config)
    world.close_gate()
    way(graph, None, config)
    assert sorted(world.machine.files) == ["f", "g1", "g2", "h"]
    assert world.check() == 8


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("way", [invoke, ainvoke])
def test_after_an_interrupt_what_was_undone_runs_again(way: Any, named: bool, world: World) -> None:
    """g1 had finished beside the interrupted g2: rewound, its work is gone from the machine, so the thread must not keep it."""
    graph = world.graph(asks=True)
    way(graph, {"done": []})
    assert world.machine.files == ["f", "g1"]
    config = world.saver.rewind(at("t"))
    assert world.machine.files == ["f"]
    assert [task.name for task in graph.get_state(at("t")).tasks if task.interrupts] == ["g2"]
    graph.invoke(Command(resume="yes"), config if named else at("t"))
    assert sorted(world.machine.files) == ["f", "g1", "g2", "h"]
    assert world.check() >= 5


@pytest.mark.parametrize("way", [invoke, ainvoke])
def test_without_a_rewind_what_was_done_is_not_done_again(way: Any, world: World) -> None:
    graph = world.graph(asks=True)
    way(graph, {"done": []})
    way(graph, Command(resume="yes"))
    assert sorted(world.machine.files) == ["f", "g1", "g2", "h"]
    world.check()


@pytest.mark.parametrize("named", [True, False])
def test_a_graph_inside_that_was_undone_runs_again(named: bool, world: World) -> None:
    graph = world.graph(world.inner(asks=True))
    graph.invoke({"done": []}, at("t"))
    assert world.machine.files == ["f", "s1"]
    config = world.saver.rewind(at("t"))
    world.undone = 3
    assert world.machine.files == ["f"]
    graph.invoke(Command(resume="yes"), config if named else at("t"))
    assert world.machine.files == ["f", "s1", "s2", "h"]
    world.check()


def test_states_that_are_changed_by_hand(world: World) -> None:
    graph = world.graph()
    graph.invoke({"done": []}, at("t"))
    world.machine.files.append("by hand")
    config = graph.update_state(at("t"), {"done": ["by hand"]}, as_node="h")
    copied = graph.update_state(config, None, as_node="__copy__")
    world.machine.files.append("later")
    assert world.saver.rewind(copied)
    assert world.machine.files[-1] == "by hand"
    world.check()


def test_saving_at_the_end_only_is_refused_before_anything_runs(world: World) -> None:
    for way in WAYS:
        with pytest.raises(BadArgument, match="durability='exit'"):
            way(world.graph(), {"done": []}, durability="exit")
    assert world.machine.files == []
    assert list(world.saver.list(None)) == []


def test_a_machine_that_can_not_be_saved_stops_the_run_at_that_step(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = world.machine.snapshot

    def snapshot(comment: str) -> Snapshot:
        if world.machine.files:
            raise RuntimeError("no snapshot today")
        return take(comment)

    monkeypatch.setattr(world.machine, "snapshot", snapshot)
    with pytest.raises(RuntimeError, match="no snapshot today"):
        world.graph().invoke({"done": []}, at("t"))
    assert world.machine.files == ["f"]


def test_what_only_looks_leaves_no_snapshot(world: World) -> None:
    graph = world.graph()
    graph.invoke({"done": []}, at("t"))
    graph.get_graph()
    graph.get_state(at("t"))
    graph.invoke({"done": []}, at("u"))
    world.check()
