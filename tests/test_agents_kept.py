"""What an agent's checkpoints keep and leave out, by default and as it is said; and that its program is there again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agents_kit import SECRET, MakeAgent, holds, home_at
from sandkeep import Sandbox, Store
from sandkeep.agents import AgentSpec, register
from sandkeep.checkpoints.filters import KEY_FILES
from sandkeep.errors import BadArgument
from sandkeep.model import HOME, WORKSPACE, CheckpointInfo

pytest_plugins = ["agents_kit"]

FILL = f"""
mkdir -p node_modules/m .venv src/venv temp/t a/__pycache__ .cache ~/.claude ~/.cache ~/.npm /var/tmp/far
for f in node_modules/m/i .venv/pyvenv.cfg src/venv/k temp/t/x a/__pycache__/m.pyc a/m.py .cache/c ~/.claude/s ~/.cache/c ~/.npm/n /var/tmp/far/f
do echo $f > $f; done
for f in {" ".join(KEY_FILES)}; do mkdir -p $(dirname $f); echo {SECRET[:8]}''{SECRET[8:]} > $f; done
"""


def files(store: Store, kept: CheckpointInfo) -> set[str]:
    found = (one.path for one in store.find(kept.id, "/**") if one.kind == "file")
    return {path for path in found if not path.startswith(f"{HOME}/.sandkeep/")}


def test_the_workspace_and_the_agents_own_folders_are_kept(make_agent: MakeAgent, home: Path, tmp_path: Path) -> None:
    with make_agent() as agent, Store(tmp_path / "store", home=home) as store:
        got = agent.run(FILL)
        kept = got.checkpoint
        assert kept.scope == "workspace"
        found = files(store, kept)
        assert {f"{WORKSPACE}/src/venv/k", f"{WORKSPACE}/a/m.py", f"{HOME}/.claude/s"} <= found
        names = ("node_modules", ".venv", "temp", "a/__pycache__", ".cache")
        left = [*(f"{WORKSPACE}/{name}" for name in names), f"{HOME}/.cache", f"{HOME}/.npm", "/var", *KEY_FILES]
        assert not [path for path in found if path.startswith(tuple(left))]
        assert {*left} <= {*store.left_out(kept)}
        assert [path for path in KEY_FILES if f"not in the checkpoint, for it may hold a key: {path}" in got.notes] == [
            *KEY_FILES
        ]
        agent.pause()
        assert not holds(tmp_path / "store", SECRET.encode())
        assert agent.run(f"cat {KEY_FILES[0]}; ls").stdout.startswith(f"{SECRET}\n")
        back = agent.run("ls -d temp a src/venv/k; ls temp", from_checkpoint=kept.id)
        assert back.stdout.split() == ["a", "src/venv/k", "temp"]


def test_everything_but_what_is_said_is_kept_where_it_is_said(
    make_agent: MakeAgent, home: Path, tmp_path: Path
) -> None:
    with make_agent(scope="all", exclude=["node_modules/"]) as agent, Store(tmp_path / "store", home=home) as store:
        got = agent.run(FILL)
        found = files(store, got.checkpoint)
        assert {f"{WORKSPACE}/.venv/pyvenv.cfg", f"{WORKSPACE}/temp/t/x", "/var/tmp/far/f", f"{HOME}/.npm/n"} <= found
        assert not [path for path in found if "node_modules" in path or path in KEY_FILES]
        again = agent.run("echo more > more").checkpoint
        assert again.new_bytes < got.checkpoint.new_bytes
        assert not holds(tmp_path / "store", SECRET.encode())


def test_what_moves_into_the_workspace_is_kept_whole(make_agent: MakeAgent, home: Path, tmp_path: Path) -> None:
    with make_agent() as agent, Store(tmp_path / "store", home=home) as store:
        agent.run("mkdir -p ~/out/deep .venv; echo 1 > ~/out/deep/f; touch .venv/pyvenv.cfg; echo 2 > .venv/f")
        moved = agent.run("mv ~/out in; rm .venv/pyvenv.cfg").checkpoint
        assert {f"{WORKSPACE}/in/deep/f", f"{WORKSPACE}/.venv/f"} <= files(store, moved)


@pytest.mark.parametrize("wrong", [{"scope": "some"}, {"exclude": "*.log"}, {"exclude": [5]}, {"exclude": ["!"]}])
def test_what_makes_no_sense_is_refused_at_once(make_agent: MakeAgent, wrong: dict[str, Any]) -> None:
    with pytest.raises(BadArgument):
        make_agent(**wrong)


def test_an_agent_of_ones_own_keeps_all_unless_it_says_where_its_state_is(make_agent: MakeAgent) -> None:
    register(AgentSpec("own", script=True, network="none", state=(".own",), conversation=".own/chats/*"))
    with make_agent("own") as agent:
        assert agent.run("mkdir ~/.own; echo s > ~/.own/s").checkpoint.scope == "all"
    with pytest.raises(BadArgument, match=r"~/\.own"):
        make_agent("own", scope="workspace")


def test_its_program_is_there_again_and_in_no_checkpoint(make_agent: MakeAgent, home: Path, tmp_path: Path) -> None:
    program = tmp_path / "packages/packed/bin/packed"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\necho "$@" >> said; cat said\n')
    program.chmod(0o755)
    register(
        AgentSpec(
            "packed", package="packed", version="1", program="bin/packed", command=("{program}", "{prompt}"), network="none",
            scope="workspace",
        )
    )  # fmt: skip
    given: dict[str, Any] = {"packages": tmp_path / "packages"}
    with make_agent("packed", **given) as agent, Store(tmp_path / "store", home=home) as store:
        first = agent.run("one").checkpoint
        assert not [path for path in files(store, first) if path.startswith("/opt")]
        agent.pause("all of it, the program too")
        second = agent.run("two").checkpoint
        assert agent.run("three", from_checkpoint=first.id).stdout == "one\nthree\n"
        assert agent.run("four", from_checkpoint=second.id).stdout == "one\ntwo\nfour\n"
        assert agent.run("five").stdout == "one\ntwo\nfour\nfive\n"
    with home_at(tmp_path / "elsewhere") as other, make_agent("packed", home=other, **given) as agent:
        assert agent.run("six", from_checkpoint=second.id).stdout == "one\ntwo\nsix\n"
    assert Sandbox.list(home=home) == []
