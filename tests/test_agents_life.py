"""What an agent refuses, where it keeps, and how it sleeps, wakes and ends: on the shell agent."""

from __future__ import annotations

from pathlib import Path

import pytest

from agents_kit import SECRET, MakeAgent, in_background
from sandkeep import Sandbox, Store
from sandkeep.agents import Agent, AgentSpec, register
from sandkeep.errors import (
    AgentMismatch,
    BadArgument,
    Busy,
    CheckpointNotFound,
    SandboxNotFound,
    SandkeepError,
    StoreUnreachable,
)
from sandkeep.model import WORKSPACE
from waiting import until

pytest_plugins = ["agents_kit"]


# refusals


def test_one_operation_at_a_time(make_agent: MakeAgent) -> None:
    with make_agent() as agent:
        agent.run("true")
        thread, got = in_background(lambda: agent.run("touch begun; until [ -e go ]; do sleep 0.05; done"))
        until(lambda: agent.sandbox.files.exists(f"{WORKSPACE}/begun"), "the run to begin")
        for act in (lambda: agent.run("true"), agent.checkpoint, agent.pause, lambda: agent.execute_command("true")):
            with pytest.raises(Busy, match="busy with a run"):
                act()
        other = make_agent(sandbox_id=agent.sandbox.id)
        with pytest.raises(Busy, match="run-"):
            other.run("true")
        agent.sandbox.files.write(f"{WORKSPACE}/go", "")
        thread.join(90)
        assert got[0].status == "completed"
        assert len(agent.list_checkpoints()) == 2


def test_type_and_mode_are_checked_before_anything_is_fetched(
    make_agent: MakeAgent, home: Path, tmp_path: Path
) -> None:
    register(AgentSpec("other-shell", script=True, network="none"))
    with make_agent() as agent:
        kept = agent.run("echo x > f").checkpoint
        slept = agent.pause()
    for pack in (tmp_path / "store" / "packs").iterdir():
        pack.unlink()
    for type, mode in (("other-shell", "knowledge"), ("shell", "swe")):
        for id in (kept.id, slept.id, "latest"):
            with pytest.raises(AgentMismatch) as refused:
                make_agent(type, workspace_mode=mode).run("true", from_checkpoint=id)
            assert refused.value.code == "AGENT_MISMATCH"
            assert refused.value.remedy
    assert Sandbox.list(home=home) == []


def test_a_checkpoint_that_no_agent_made(make_agent: MakeAgent, home: Path, tmp_path: Path) -> None:
    with Sandbox(home=home, store=str(tmp_path / "store")) as sandbox:
        sandbox.commands.run("echo plain > f")
        made = sandbox.checkpoint()
    with pytest.raises(AgentMismatch, match="not made by an agent"):
        make_agent("claude", api_key="k" * 20).run("x", from_checkpoint=made.id)
    with make_agent() as agent:
        assert agent.run("cat f", from_checkpoint=made.id).stdout == "plain\n"


def test_refusals_change_nothing(make_agent: MakeAgent, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    for options in (
        {"type": "nobody"}, {"workspace_mode": "chaos"}, {"api_key": "x"}, {"secrets": {"1BAD": "x"}}, {"nonsense": 1},
        {"files": {"../out": "x"}}, {"files": {"/abs": "x"}}, {"context": {"a": 5}}, {"skills": {"s": "x"}},
        {"mcp_servers": {"m": {"command": "x"}}}, {"files": {"a": Path("/does/not/exist")}}, {"type": "claude"},
        {"tag": "-x"}, {"files": 5}, {"context": "text"},
        {"type": "claude", "api_key": SECRET, "mcp_servers": {"m": {"command": "x", "env": {"K": SECRET}}}},
    ):  # fmt: skip
        with pytest.raises(BadArgument):
            make_agent(**options)
    agent = make_agent()
    for call in (
        {"prompt": ""}, {"prompt": "a\0b"}, {"prompt": "x" * 130_000}, {"prompt": "x", "timeout": 0},
        {"prompt": "x", "background": True, "timeout": 5.0}, {"prompt": "x", "schema": {"type": "thing"}},
        {"prompt": "x", "schema": {"oneOf": []}}, {"prompt": "x", "checkpoint_comment": 5}, {"prompt": "x", "timeout": "soon"},
    ):  # fmt: skip
        with pytest.raises(BadArgument):
            agent.run(**call)
    with pytest.raises(BadArgument):
        agent.on("noise", print)  # type: ignore[arg-type]
    with pytest.raises(CheckpointNotFound):
        agent.run("x", from_checkpoint="latest")
    with pytest.raises(CheckpointNotFound):
        agent.run("x", from_checkpoint="no-such-name")
    with pytest.raises(BadArgument, match="sandbox_id"):
        make_agent(sandbox_id="sb-000000000000").run("x", from_checkpoint="latest")
    with pytest.raises(SandboxNotFound):
        agent.checkpoint()
    with pytest.raises(SandboxNotFound):
        agent.pause()
    assert agent.status().state == "none"
    assert Sandbox.list(home=home) == []


def test_without_storage_nothing_is_kept_and_asking_says_so(make_agent: MakeAgent) -> None:
    with make_agent(storage=False) as agent:
        assert agent.run("echo x").checkpoint is None
        for act in (
            agent.checkpoint,
            agent.pause,
            agent.list_checkpoints,
            lambda: agent.run("x", from_checkpoint="latest"),
        ):
            with pytest.raises(BadArgument, match="without storage"):
                act()


def test_storage_by_default_is_the_homes_own(home: Path) -> None:
    with Agent("shell", home=home) as agent:
        kept = agent.run("true").checkpoint
        with Store(home=home) as store:
            assert store.latest().id == kept.id


NOWHERE = {"url": "s3://b/p", "endpoint": "http://127.0.0.1:9", "access_key": "a", "secret_key": "b"}


def test_a_storage_that_is_not_there_is_refused_before_a_sandbox_exists(make_agent: MakeAgent, home: Path) -> None:
    with pytest.raises(StoreUnreachable):
        make_agent(storage=NOWHERE).run("true", from_checkpoint="latest")
    with pytest.raises(BadArgument):
        make_agent(storage="s4://b").run("true")
    assert Sandbox.list(home=home) == []


def test_a_storage_that_is_not_there_does_not_fail_a_run(
    make_agent: MakeAgent, home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make_agent(storage=NOWHERE) as agent, caplog.at_level("WARNING", "sandkeep.agents"):
        got = agent.run("echo done > f; cat f")
        assert (got.status, got.stdout, got.checkpoint) == ("completed", "done\n", None)
        assert got.checkpoint_error
        assert got.checkpoint_error in caplog.text
        with pytest.raises(StoreUnreachable):
            agent.pause()
        assert agent.status().state == "idle"
        agent._options.storage = tmp_path / "store"  # it can be reached now
        again = agent.run("cat f")
        assert (again.stdout, again.checkpoint_error) == ("done\n", None)
        with Store(tmp_path / "store", home=home) as store:
            assert store.read(again.checkpoint.id, f"{WORKSPACE}/f") == b"done\n"
    with Store(home=home) as store:
        assert store.checkpoints() == []


# life


def test_another_object_goes_on_in_the_same_sandbox(make_agent: MakeAgent) -> None:
    agent = make_agent()
    first = agent.run("echo a > f; echo $TOKEN")
    other = make_agent(sandbox_id=first.sandbox_id, secrets={"TOKEN": SECRET})
    second = other.run("cat f; echo $TOKEN")
    assert second.stdout == f"a\n{SECRET}\n"
    assert (second.sandbox_id, second.checkpoint.parent_id) == (first.sandbox_id, first.checkpoint.id)
    register(AgentSpec("third-shell", script=True, network="none"))
    with pytest.raises(AgentMismatch):
        make_agent("third-shell", sandbox_id=first.sandbox_id).run("true")
    other.kill()
    assert agent.status().state == "dead"


def test_pause_frees_it_and_a_run_or_resume_wakes_it(make_agent: MakeAgent) -> None:
    with make_agent(secrets={"TOKEN": SECRET}) as agent:
        agent.run("echo kept > f")
        agent.pause("nap")
        assert agent.status().state == "paused"
        assert agent.run("cat f; echo $TOKEN").stdout == f"kept\n{SECRET}\n"
        agent.pause()
        assert agent.resume().level in ("files", "relaunched", "memory")
        assert agent.status().state == "idle"


def test_kill_in_the_middle_of_a_run_ends_both(make_agent: MakeAgent, home: Path) -> None:
    agent = make_agent()
    agent.run("true")
    thread, got = in_background(lambda: agent.run("touch begun; sleep 600"))
    until(lambda: agent.sandbox.files.exists(f"{WORKSPACE}/begun"), "the run to begin")
    agent.kill()
    thread.join(90)
    assert not thread.is_alive()
    assert isinstance(got[0], SandkeepError)
    assert Sandbox.list(home=home) == []
    assert agent.run("echo anew").stdout == "anew\n"
    agent.kill()
