"""Drivers that die and go on: the example, and a LangGraph thread that rewinds a real machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, TypedDict

from langgraph.graph import END, START, StateGraph

from conftest import Make
from sandkeep import Sandbox
from sandkeep.langgraph import CheckpointSaver

EXAMPLE = Path(__file__).resolve().parent.parent / "examples/resumable.py"


def drive(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, str(EXAMPLE), str(home.parent / "store"), *arguments]
    return subprocess.run(
        argv, capture_output=True, text=True, timeout=170, env={**os.environ, "SANDKEEP_HOME": str(home)}
    )


def test_a_killed_driver_goes_on_at_the_very_step(home: Path) -> None:
    between = drive(home, "--die-after", "2")
    assert between.returncode == -signal.SIGKILL, between.stderr
    assert between.stdout.splitlines()[0] == "begins at step 1"
    assert len(Sandbox.list(home=home)) == 1
    within = drive(home, "--die-in", "4")
    assert within.returncode == -signal.SIGKILL, within.stderr
    assert within.stdout.splitlines()[0] == "begins at step 3"
    last = drive(home)
    assert last.returncode == 0, last.stderr
    told = last.stdout.splitlines()
    assert told[0] == "begins at step 4"
    assert told[-7:] == [
        "1 collect", "2 clean", "3 count", "4 compare", "5 conclude", "last: conclude", "variables: 5 conclude",
    ]  # fmt: skip
    assert Sandbox.list(home=home) == []


class Count(TypedDict):
    step: int


def test_rewinding_a_graph_rewinds_the_machine(make: Make, tmp_path: Path) -> None:
    sb = make()

    def work(state: Count) -> dict[str, Any]:
        sb.commands.run(f"echo {state['step']} >> log; export STEP={state['step']}")
        return {"step": state["step"] + 1}

    with CheckpointSaver(tmp_path / "threads", sandbox=sb) as saver:
        graph = StateGraph(Count)
        graph.add_node("one", work)
        graph.add_node("two", work)
        graph.add_edge(START, "one")
        graph.add_edge("one", "two")
        graph.add_edge("two", END)
        app = graph.compile(checkpointer=saver)
        config: Any = {"configurable": {"thread_id": "t"}}
        assert app.invoke({"step": 1}, config, durability="sync") == {"step": 3}
        assert sb.commands.run("cat log; echo $STEP").stdout == "1\n2\n2\n"
        middle = next(one for one in app.get_state_history(config) if one.values.get("step") == 2)
        back = saver.rewind(middle.config)
        assert sb.commands.run("cat log; echo $STEP").stdout == "1\n1\n"
        assert app.invoke(None, back, durability="sync") == {"step": 3}
        assert sb.commands.run("cat log; echo $STEP").stdout == "1\n2\n2\n"
