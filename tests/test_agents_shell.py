"""The rules of an agent, on the shell agent: its story, which runs are kept and how they are marked. Real sandboxes."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from agents_kit import MakeAgent, home_at, in_background
from sandkeep import Sandbox, list_checkpoints
from sandkeep.agents import AsyncAgent
from sandkeep.errors import Busy
from sandkeep.model import WORKSPACE
from waiting import until

pytest_plugins = ["agents_kit"]


# the story of the seed


def test_a_report_is_written_reviewed_killed_and_read_again_as_it_first_was(
    make_agent: MakeAgent, tmp_path: Path
) -> None:
    agent = make_agent()
    r1 = agent.run("echo 'Draft v1' > report.txt; export STEP=1", checkpoint_comment="initial draft")
    r2 = agent.run("echo reviewed >> report.txt; cat report.txt; echo step $STEP", checkpoint_comment="reviewed")
    assert (r1.exit_code, r1.status, r2.stdout) == (0, "completed", "Draft v1\nreviewed\nstep 1\n")
    agent.kill()
    with make_agent() as second:
        branch = second.run("cat report.txt; echo step $STEP", from_checkpoint=r1.checkpoint.id)
        assert branch.stdout == "Draft v1\nstep 1\n"
        assert branch.sandbox_id not in (r1.sandbox_id, "")
    assert (r1.checkpoint.comment, r1.checkpoint.parent_id) == ("initial draft", None)
    assert r2.checkpoint.parent_id == branch.checkpoint.parent_id == r1.checkpoint.id
    found = list_checkpoints(tmp_path / "store", home=tmp_path / "home")
    assert [one.id for one in found] == [branch.checkpoint.id, r2.checkpoint.id, r1.checkpoint.id]
    assert agent.list_checkpoints(limit=1, tag=r1.session_id)[0].id == r2.checkpoint.id
    assert r1.run_id != r2.run_id
    assert r1.session_id == r2.session_id != branch.session_id


def test_parents_are_right_in_every_order_of_calls(make_agent: MakeAgent) -> None:
    with make_agent() as agent:
        r1 = agent.run("echo 1 > n")
        explicit = agent.checkpoint("before refactor")
        r2 = agent.run("echo 2 > n")
        back = agent.run("cat n", from_checkpoint=r1.checkpoint.id)
        again = agent.run("echo 3 > n")
        slept = agent.pause()
        woken = agent.run("cat n")
        newest = agent.run("cat n", from_checkpoint="latest")
        agent.kill()
        fresh = agent.run("echo anew; ls")
        line = [one.checkpoint for one in (r1, r2, back, again, woken, newest, fresh)]
        ids = [one.id for one in line]
        parents = [one.parent_id for one in line]
        assert parents == [None, explicit.id, ids[0], ids[2], slept.id, ids[4], None]
        assert (explicit.parent_id, slept.parent_id) == (ids[0], ids[3])
        assert (back.stdout, woken.stdout, newest.stdout) == ("1\n", "3\n", "3\n")
        assert [info.id for info in Sandbox.list(home=agent._options.place.path)] == [fresh.sandbox_id]


def test_from_checkpoint_on_another_home_brings_all_of_it(make_agent: MakeAgent, tmp_path: Path) -> None:
    with make_agent(workspace_mode="swe") as agent:
        first = agent.run(
            "mkdir -p venv deep/er; echo a > venv/kept; rm -r temp; cd deep; echo b > er/b; ls -d ../repo"
        )
    assert first.stdout == "../repo\n"
    with home_at(tmp_path / "elsewhere") as other, make_agent(workspace_mode="swe", home=other) as agent:
        got = agent.run("pwd; cat ../venv/kept er/b; ls ..", from_checkpoint=first.checkpoint.id)
        assert got.stdout.split() == [
            f"{WORKSPACE}/deep",
            "a",
            "b",
            "context",
            "deep",
            "output",
            "repo",
            "scripts",
            "venv",
        ]


# what is kept, and marked


def test_failed_and_timed_out_runs_are_kept_and_marked(make_agent: MakeAgent) -> None:
    with make_agent() as agent:
        failed = agent.run("echo half > work; echo oops >&2; exit 3")
        assert (failed.status, failed.exit_code, failed.stderr) == ("failed", 3, "oops\n")
        assert failed.checkpoint.metadata["agent"]["status"] == "failed"
        late = agent.run("echo more >> work; sleep 600", timeout=6)
        assert late.status == late.checkpoint.metadata["agent"]["status"] == "timed_out"
        assert agent.run("cat work").stdout == "half\nmore\n"
        assert [event.text for event in failed.events if event.kind == "error"] == ["oops"]


def test_failed_runs_are_not_kept_where_turned_off(make_agent: MakeAgent) -> None:
    with make_agent(keep_failed=False) as agent:
        assert agent.run("false").checkpoint is None
        assert agent.run("true").checkpoint.parent_id is None


def test_an_interrupted_run_is_kept_and_marked(make_agent: MakeAgent) -> None:
    with make_agent() as agent:
        agent.run("true")
        assert agent.interrupt() is False
        thread, got = in_background(lambda: agent.run("echo begun > work; echo begun; sleep 600"))
        until(lambda: agent.sandbox.files.exists(f"{WORKSPACE}/work"), "the run to begin")
        assert agent.status().state == "busy"
        assert agent.interrupt() is True
        thread.join(90)
        assert got[0].status == got[0].checkpoint.metadata["agent"]["status"] == "interrupted"
        assert agent.run("cat work").stdout == "begun\n"


def test_a_run_that_ignores_the_request_to_end_is_killed(make_agent: MakeAgent) -> None:
    with make_agent() as agent:
        thread, got = in_background(lambda: agent.run("trap '' INT; touch deaf; while :; do sleep 0.1; done"))
        until(
            lambda: agent._sandbox is not None and agent.sandbox.files.exists(f"{WORKSPACE}/deaf"), "the run to begin"
        )
        agent.interrupt()
        thread.join(90)
        assert got[0].status == "interrupted"


def test_a_run_can_be_interrupted_before_it_begins(make_agent: MakeAgent) -> None:
    with make_agent() as agent:
        asked: list[threading.Thread] = []

        def ask(event: dict[str, Any]) -> None:
            if event["event"] == "sandbox ready":
                asked.append(in_background(agent.interrupt)[0])
                until(lambda: agent._asked, "the request to be heard")

        agent.on("lifecycle", ask)
        got = agent.run("sleep 600")
        asked[0].join(90)
        assert got.status == "interrupted"
        assert got.checkpoint.metadata["agent"]["status"] == "interrupted"


def test_a_listener_can_interrupt(make_agent: MakeAgent) -> None:
    with make_agent() as agent:
        agent.on("content", lambda event: agent.interrupt() if event.text == "enough" else None)
        assert agent.run("echo enough; sleep 600").status == "interrupted"


def test_events_that_can_not_be_written_are_noted(make_agent: MakeAgent) -> None:
    with make_agent() as agent:
        got = agent.run("mkdir -p ~/.sandkeep; touch ~/.sandkeep/events")
        assert got.status == "completed"
        assert got.checkpoint is not None
        assert "events are not in the sandbox" in got.notes[0]
        assert agent.log()[0].events == []


async def _cancelled(home: Path, store: Path) -> tuple[Any, str]:
    async with AsyncAgent("shell", home=home, storage=store) as agent:
        await agent.run("true")
        task = asyncio.create_task(agent.run("echo begun > work; sleep 600"))
        deadline = time.monotonic() + 90
        while not await agent.sandbox.files.exists(f"{WORKSPACE}/work"):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        kept = (await agent.list_checkpoints(limit=1))[0]
        return kept.metadata["agent"], (await agent.run("cat work")).stdout


def test_a_cancelled_task_ends_its_run_and_keeps_it(home: Path, tmp_path: Path) -> None:
    about, work = asyncio.run(_cancelled(home, tmp_path / "store"))
    assert (about["status"], work) == ("interrupted", "begun\n")


def test_background_runs_are_not_checkpointed_and_can_be_waited_for(make_agent: MakeAgent) -> None:
    with make_agent() as agent:
        begun = agent.run("until [ -e go ]; do sleep 0.05; done; echo done", background=True)
        assert (begun.status, begun.exit_code, begun.checkpoint) == ("running", None, None)
        assert (agent.status().state, agent.status().run_id) == ("running", begun.run_id)
        with pytest.raises(Busy, match=begun.run_id):
            agent.run("true")
        with pytest.raises(Busy):
            agent.checkpoint()
        agent.sandbox.files.write(f"{WORKSPACE}/go", "")
        ended = agent.wait()
        assert (ended.run_id, ended.status, ended.stdout, ended.checkpoint) == (
            begun.run_id,
            "completed",
            "done\n",
            None,
        )
        assert agent.list_checkpoints() == []
        assert agent.checkpoint().parent_id is None


def test_a_failing_checkpoint_never_fails_the_run(
    make_agent: MakeAgent, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make_agent() as agent:
        first = agent.run("true")
        packs = tmp_path / "store"
        moved = packs.rename(tmp_path / "moved")
        packs.write_text("not a folder any more")
        told: list[Any] = []
        agent.on("lifecycle", told.append)
        with caplog.at_level(logging.WARNING, "sandkeep.agents"):
            lost = agent.run("echo worked | tee work")
        assert (lost.status, lost.stdout, lost.checkpoint) == ("completed", "worked\n", None)
        assert lost.checkpoint_error
        assert lost.run_id in caplog.text
        assert "checkpoint failed" in [one["event"] for one in told]
        packs.unlink()
        moved.rename(packs)
        assert agent.run("cat work").checkpoint.parent_id == first.checkpoint.id
