"""What an agent is given and tells: files, answers in a shape, events, secrets; and the best of several. On the shell agent."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from agents_kit import SECRET, MakeAgent, holds
from sandkeep import Sandbox
from sandkeep.agents import Agent, AgentSpec, AsyncAgent, Event, async_best_of, best_of, register
from sandkeep.errors import BadArgument, Busy, NotFound
from sandkeep.model import HOME, WORKSPACE

pytest_plugins = ["agents_kit"]


# what it is given


def test_workspace_files_prompt_and_uploads(make_agent: MakeAgent, tmp_path: Path) -> None:
    folder = tmp_path / "docs" / "sub"
    folder.mkdir(parents=True)
    (folder / "deep.md").write_text("deep")
    with make_agent(
        system_prompt="Be brief.",
        context={"notes.md": "notes", "docs": tmp_path / "docs"},
        files={"scripts/run.sh": b"\xff"},
    ) as agent:
        got = agent.run("cat AGENTS.md context/notes.md context/docs/sub/deep.md; ls")
        assert got.stdout == "Be brief.notesdeepAGENTS.md\ncontext\noutput\nscripts\ntemp\n"
        assert agent.sandbox.files.read(f"{WORKSPACE}/scripts/run.sh") == b"\xff"
        agent.upload_context({"more.md": "more"})
        agent.upload_files({"top.txt": "top"})
        agent.run("mkdir output/in; cp context/more.md output; cp top.txt output/in")
        assert agent.get_output_files() == {"more.md": b"more"}
        assert agent.get_output_files(recursive=True) == {"more.md": b"more", "in/top.txt": b"top"}
        assert agent.execute_command("pwd").stdout == f"{WORKSPACE}\n"


def test_structured_output(make_agent: MakeAgent) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 3}}, "required": ["n"]}
    with make_agent() as agent:
        good = agent.run('echo \'{"n": 4}\' > $SANDKEEP_RESULT; echo "$SANDKEEP_SCHEMA"', schema=schema)
        assert (good.output, good.output_error, json.loads(good.stdout)) == ({"n": 4}, None, schema)
        bad = agent.run("echo '{\"n\": 2}' > $SANDKEEP_RESULT", schema=schema)
        assert bad.output is None
        assert "$.n" in str(bad.output_error)
        assert bad.checkpoint is not None
        stale = agent.run("true", schema=schema)
        assert stale.output is None
        assert "no " in str(stale.output_error)
        assert "not JSON" in str(agent.run("echo nonsense > $SANDKEEP_RESULT", schema=schema).output_error)


# events


def test_events_are_live_typed_and_part_of_the_lineage(make_agent: MakeAgent) -> None:
    with make_agent() as agent:
        live: list[Event] = []
        raw: list[str] = []
        lived: list[dict[str, Any]] = []
        agent.on("content", live.append)
        agent.on("stdout", raw.append)
        agent.on("lifecycle", lived.append)
        one = agent.run("echo first")
        two = agent.run("echo second; false", checkpoint_comment="bad")
        assert [(event.kind, event.role, event.text) for event in one.events] == [
            ("message", "user", "echo first"),
            ("message", "assistant", "first"),
        ]
        assert live == one.events + two.events
        assert "".join(raw) == "first\nsecond\n"
        assert [event["event"] for event in lived][:4] == [
            "sandbox ready",
            "run started",
            "checkpoint saved",
            "run ended",
        ]
        steps = agent.log()
        assert [step.checkpoint.id for step in steps] == [one.checkpoint.id, two.checkpoint.id]
        assert [step.events for step in steps] == [one.events, two.events]
        assert [step.agent["status"] for step in steps if step.agent] == ["completed", "failed"]
        assert (one.text, one.notes) == ("first", [])


def test_a_listener_that_fails_costs_nothing_but_a_note(
    make_agent: MakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: object) -> None:
        raise ValueError("listener broke")

    with make_agent() as agent:
        agent.on("stdout", fail)
        got = agent.run("echo x")
        assert got.status == "completed"
        assert got.checkpoint is not None
        assert any("listener broke" in note for note in got.notes)
        assert "listener" in caplog.text


# secrets


def test_secrets_are_in_no_byte_of_the_store_or_the_home(make_agent: MakeAgent, home: Path, tmp_path: Path) -> None:
    with make_agent(secrets={"TOKEN": SECRET}) as agent:
        got = agent.run(
            f"echo $TOKEN; echo {SECRET} > /dev/null; export COPY=$TOKEN; cat /proc/[0-9]*/cmdline > argv; true"
        )
        assert got.stdout == f"{SECRET}\n"
        agent.checkpoint()
        assert not holds(tmp_path / "store", SECRET.encode())
        assert not holds(home, SECRET.encode())
        agent.pause()
        assert not holds(tmp_path / "store", SECRET.encode())
        assert "[TOKEN]" in agent.log(got.checkpoint.id)[0].events[1].text
        assert holds(tmp_path / "store", b"[TOKEN]"), "the search itself finds what is there"


def test_files_that_hold_keys_are_left_out_and_stay_where_they_are(make_agent: MakeAgent, tmp_path: Path) -> None:
    register(AgentSpec("keeper", script=True, network="none", key="KEEPER_KEY", private=(".keeper/auth.json",)))
    with make_agent("keeper", api_key=SECRET) as agent:
        kept = agent.run(
            "mkdir -p ~/.keeper; echo $KEEPER_KEY > ~/.keeper/auth.json; echo plain > ~/.keeper/state"
        ).checkpoint
        assert not holds(tmp_path / "store", SECRET.encode())
        assert agent.sandbox.files.read_text(f"{HOME}/.keeper/auth.json") == f"{SECRET}\n"
        assert agent.sandbox.files.stat(f"{HOME}/.keeper/auth.json").mode & 0o777 == 0o600
        agent.pause()
        assert not holds(tmp_path / "store", SECRET.encode())
        assert agent.run("cat ~/.keeper/auth.json").stdout == f"{SECRET}\n"
    with make_agent("keeper", api_key="another-key-entirely") as agent:
        got = agent.run("ls ~/.keeper; echo $KEEPER_KEY", from_checkpoint=kept.id)
        assert got.stdout == "state\nanother-key-entirely\n"


# the best of several


def test_best_of_keeps_the_winner(make_agent: MakeAgent, home: Path) -> None:
    with make_agent() as agent:
        first = agent.run("echo start > log")
        lock = threading.Lock()
        given = iter([1, 5, 3])

        def score(sandbox: Sandbox) -> float:
            with lock:
                points = next(given)
            sandbox.files.write(f"{WORKSPACE}/points", str(points))
            return points

        best = best_of(agent, "echo try >> log; head -c 8 /dev/urandom | od -An -tx1 > random", n=3, score=score)
        assert (best.score, sorted(best.scores), len(best.responses)) == (5.0, [1.0, 3.0, 5.0], 3)
        assert best.response.checkpoint.parent_id == first.checkpoint.id
        after = agent.run("cat log points")
        assert after.stdout == "start\ntry\n5"
        assert after.checkpoint.parent_id == best.response.checkpoint.id
        assert [info.id for info in Sandbox.list(home=home)] == [best.response.sandbox_id]
        assert len(agent.list_checkpoints()) == 3


def test_a_score_that_raises_leaves_the_agent_as_it_was(make_agent: MakeAgent, home: Path) -> None:
    def score(_: Sandbox) -> float:
        raise ZeroDivisionError("no score")

    with make_agent() as agent:
        first = agent.run("echo start > log")
        with pytest.raises(ZeroDivisionError):
            best_of(agent, "echo try >> log", n=2, score=score)
        assert agent.run("cat log").stdout == "start\n"
        assert [info.id for info in Sandbox.list(home=home)] == [first.sandbox_id]
        with pytest.raises(BadArgument):
            best_of(agent, "x", n=0, score=lambda _: 1)


async def _async_story(home: Path, store: Path) -> list[str]:
    async with AsyncAgent("shell", home=home, storage=store) as agent:
        first = await agent.run("echo a > f")
        assert first.checkpoint is not None

        async def score(sandbox: Any) -> int:
            return len(await sandbox.files.read(f"{WORKSPACE}/f"))

        best = await async_best_of(agent, "echo b >> f", n=2, score=score)
        both = await asyncio.gather(agent.run("sleep 0.5"), agent.run("true"), return_exceptions=True)
        assert [isinstance(one, Busy) for one in both] == [False, True]
        back = await agent.run("cat f", from_checkpoint=first.checkpoint.id)
        return [str(best.score), back.stdout]


def test_the_async_agent_has_the_same_names(home: Path, tmp_path: Path) -> None:
    assert asyncio.run(_async_story(home, tmp_path / "store")) == ["4.0", "a\n"]
    public = {name for name in vars(AsyncAgent) if not name.startswith("_")}
    assert public == {name for name in vars(Agent) if not name.startswith("_")}


def test_waiting_for_nothing_says_so(make_agent: MakeAgent) -> None:
    with make_agent() as agent:
        agent.run("true")
        with pytest.raises(NotFound, match="background"):
            agent.wait()
