"""The LangGraph saver bound to a sandbox.

The sandbox here is a stand-in with `snapshot` and `restore`: what is tested is when the saver calls them and what it records.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import pytest
from langgraph.graph import END, START, StateGraph

from langgraph_kit import at, put
from sandkeep.errors import BadArgument, CheckpointNotFound, SnapshotNotFound
from sandkeep.langgraph import SNAPSHOT_KEY, CheckpointSaver

pytest_plugins = ["langgraph_kit"]


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

    def delete_snapshot(self, id: str) -> None:
        del self.saved[id]


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
        assert all("langgraph" in comment for comment in sandbox.comments)
        config = saver.rewind(seen[1])
        assert graph.invoke(None, config, durability="sync") == {"step": 2}
        assert sandbox.file == 20
        sandbox.file = 99
        assert asyncio.run(saver.arewind(at("t")))["configurable"]["checkpoint_id"]
        assert sandbox.file == 20


def test_a_bound_graph_must_save_at_each_step(tmp_path: Path) -> None:
    sandbox = StandIn()
    with CheckpointSaver(tmp_path, sandbox=sandbox) as saver:
        with pytest.raises(BadArgument, match="durability='exit'"):
            stepping(saver, sandbox).invoke({"step": 0}, at("t"), durability="exit")
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
