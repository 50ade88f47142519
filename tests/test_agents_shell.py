"""The rules of an agent, on the shell agent: checkpoints, lineage, refusals, states, files, forks. Real sandboxes and stores."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agents_kit import holds, home_at
from sandkeep import Sandbox, Store, list_checkpoints
from sandkeep.agents import Agent, AgentSpec, AsyncAgent, Event, async_best_of, best_of, register
from sandkeep.errors import (
    AgentMismatch,
    BadArgument,
    Busy,
    CheckpointNotFound,
    NotFound,
    SandboxNotFound,
    SandkeepError,
    StoreUnreachable,
)
from sandkeep.model import HOME, WORKSPACE
from waiting import until

SECRET = "correct-horse-battery-staple"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    with home_at(tmp_path / "home") as path:
        yield path


@pytest.fixture
def make(home: Path, tmp_path: Path) -> Callable[..., Agent]:
    def make(type: str = "shell", **options: Any) -> Agent:
        return Agent(type, **{"home": home, "storage": str(tmp_path / "store"), **options})

    return make


def in_background(act: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    got: list[Any] = []

    def run() -> None:
        try:
            got.append(act())
        except SandkeepError as error:
            got.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, got


# the story of the seed


def test_a_report_is_written_reviewed_killed_and_read_again_as_it_first_was(
    make: Callable[..., Agent], tmp_path: Path
) -> None:
    agent = make()
    r1 = agent.run("echo 'Draft v1' > report.txt; export STEP=1", checkpoint_comment="initial draft")
    r2 = agent.run("echo reviewed >> report.txt; cat report.txt; echo step $STEP", checkpoint_comment="reviewed")
    assert (r1.exit_code, r1.status, r2.stdout) == (0, "completed", "Draft v1\nreviewed\nstep 1\n")
    agent.kill()
    with make() as second:
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


def test_parents_are_right_in_every_order_of_calls(make: Callable[..., Agent]) -> None:
    with make() as agent:
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


def test_from_checkpoint_on_another_home_brings_all_of_it(make: Callable[..., Agent], tmp_path: Path) -> None:
    with make(workspace_mode="swe") as agent:
        first = agent.run(
            "mkdir -p venv deep/er; echo a > venv/kept; rm -r temp; cd deep; echo b > er/b; ls -d ../repo"
        )
    assert first.stdout == "../repo\n"
    with home_at(tmp_path / "elsewhere") as other, make(workspace_mode="swe", home=other) as agent:
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


def test_failed_and_timed_out_runs_are_kept_and_marked(make: Callable[..., Agent]) -> None:
    with make() as agent:
        failed = agent.run("echo half > work; echo oops >&2; exit 3")
        assert (failed.status, failed.exit_code, failed.stderr) == ("failed", 3, "oops\n")
        assert failed.checkpoint.metadata["agent"]["status"] == "failed"
        late = agent.run("echo more >> work; sleep 600", timeout=6)
        assert late.status == late.checkpoint.metadata["agent"]["status"] == "timed_out"
        assert agent.run("cat work").stdout == "half\nmore\n"
        assert [event.text for event in failed.events if event.kind == "error"] == ["oops"]


def test_failed_runs_are_not_kept_where_turned_off(make: Callable[..., Agent]) -> None:
    with make(keep_failed=False) as agent:
        assert agent.run("false").checkpoint is None
        assert agent.run("true").checkpoint.parent_id is None


def test_an_interrupted_run_is_kept_and_marked(make: Callable[..., Agent]) -> None:
    with make() as agent:
        agent.run("true")
        assert agent.interrupt() is False
        thread, got = in_background(lambda: agent.run("echo begun > work; echo begun; sleep 600"))
        until(lambda: agent.sandbox.files.exists(f"{WORKSPACE}/work"), "the run to begin")
        assert agent.status().state == "busy"
        assert agent.interrupt() is True
        thread.join(90)
        assert got[0].status == got[0].checkpoint.metadata["agent"]["status"] == "interrupted"
        assert agent.run("cat work").stdout == "begun\n"


def test_a_run_that_ignores_the_request_to_end_is_killed(make: Callable[..., Agent]) -> None:
    with make() as agent:
        thread, got = in_background(lambda: agent.run("trap '' INT; touch deaf; while :; do sleep 0.1; done"))
        until(
            lambda: agent._sandbox is not None and agent.sandbox.files.exists(f"{WORKSPACE}/deaf"), "the run to begin"
        )
        agent.interrupt()
        thread.join(90)
        assert got[0].status == "interrupted"


def test_a_run_can_be_interrupted_before_it_begins(make: Callable[..., Agent]) -> None:
    with make() as agent:
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


def test_a_listener_can_interrupt(make: Callable[..., Agent]) -> None:
    with make() as agent:
        agent.on("content", lambda event: agent.interrupt() if event.text == "enough" else None)
        assert agent.run("echo enough; sleep 600").status == "interrupted"


def test_events_that_can_not_be_written_are_noted(make: Callable[..., Agent]) -> None:
    with make() as agent:
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


def test_background_runs_are_not_checkpointed_and_can_be_waited_for(make: Callable[..., Agent]) -> None:
    with make() as agent:
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
    make: Callable[..., Agent], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make() as agent:
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


# refusals


def test_one_operation_at_a_time(make: Callable[..., Agent]) -> None:
    with make() as agent:
        agent.run("true")
        thread, got = in_background(lambda: agent.run("touch begun; until [ -e go ]; do sleep 0.05; done"))
        until(lambda: agent.sandbox.files.exists(f"{WORKSPACE}/begun"), "the run to begin")
        for act in (lambda: agent.run("true"), agent.checkpoint, agent.pause, lambda: agent.execute_command("true")):
            with pytest.raises(Busy, match="busy with a run"):
                act()
        other = make(sandbox_id=agent.sandbox.id)
        with pytest.raises(Busy, match="run-"):
            other.run("true")
        agent.sandbox.files.write(f"{WORKSPACE}/go", "")
        thread.join(90)
        assert got[0].status == "completed"
        assert len(agent.list_checkpoints()) == 2


def test_type_and_mode_are_checked_before_anything_is_fetched(
    make: Callable[..., Agent], home: Path, tmp_path: Path
) -> None:
    register(AgentSpec("other-shell", script=True, network="none"))
    with make() as agent:
        kept = agent.run("echo x > f").checkpoint
        slept = agent.pause()
    for pack in (tmp_path / "store" / "packs").iterdir():
        pack.unlink()
    for type, mode in (("other-shell", "knowledge"), ("shell", "swe")):
        for id in (kept.id, slept.id, "latest"):
            with pytest.raises(AgentMismatch) as refused:
                make(type, workspace_mode=mode).run("true", from_checkpoint=id)
            assert refused.value.code == "AGENT_MISMATCH"
            assert refused.value.remedy
    assert Sandbox.list(home=home) == []


def test_a_checkpoint_that_no_agent_made(make: Callable[..., Agent], home: Path, tmp_path: Path) -> None:
    with Sandbox(home=home, store=str(tmp_path / "store")) as sandbox:
        sandbox.commands.run("echo plain > f")
        made = sandbox.checkpoint()
    with pytest.raises(AgentMismatch, match="not made by an agent"):
        make("claude", api_key="k" * 20).run("x", from_checkpoint=made.id)
    with make() as agent:
        assert agent.run("cat f", from_checkpoint=made.id).stdout == "plain\n"


def test_refusals_change_nothing(make: Callable[..., Agent], home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    for options in (
        {"type": "nobody"}, {"workspace_mode": "chaos"}, {"api_key": "x"}, {"secrets": {"1BAD": "x"}}, {"nonsense": 1},
        {"files": {"../out": "x"}}, {"files": {"/abs": "x"}}, {"context": {"a": 5}}, {"skills": {"s": "x"}},
        {"mcp_servers": {"m": {"command": "x"}}}, {"files": {"a": Path("/does/not/exist")}}, {"type": "claude"},
        {"type": "claude", "api_key": SECRET, "mcp_servers": {"m": {"command": "x", "env": {"K": SECRET}}}},
    ):  # fmt: skip
        with pytest.raises(BadArgument):
            make(**options)
    agent = make()
    for call in (
        {"prompt": ""}, {"prompt": "a\0b"}, {"prompt": "x" * 130_000}, {"prompt": "x", "timeout": 0},
        {"prompt": "x", "background": True, "timeout": 5.0}, {"prompt": "x", "schema": {"type": "thing"}},
        {"prompt": "x", "schema": {"oneOf": []}},
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
        make(sandbox_id="sb-000000000000").run("x", from_checkpoint="latest")
    with pytest.raises(SandboxNotFound):
        agent.checkpoint()
    with pytest.raises(SandboxNotFound):
        agent.pause()
    assert agent.status().state == "none"
    assert Sandbox.list(home=home) == []


def test_without_storage_nothing_is_kept_and_asking_says_so(make: Callable[..., Agent]) -> None:
    with make(storage=False) as agent:
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


def test_a_storage_that_is_not_there_is_refused_before_a_sandbox_exists(make: Callable[..., Agent], home: Path) -> None:
    with pytest.raises(SandkeepError) as refused:
        make(storage={"url": "s3://b/p", "endpoint": "http://127.0.0.1:9", "access_key": "a", "secret_key": "b"}).run(
            "true"
        )
    assert isinstance(refused.value, StoreUnreachable)
    assert Sandbox.list(home=home) == []


# life


def test_another_object_goes_on_in_the_same_sandbox(make: Callable[..., Agent]) -> None:
    agent = make()
    first = agent.run("echo a > f; echo $TOKEN")
    other = make(sandbox_id=first.sandbox_id, secrets={"TOKEN": SECRET})
    second = other.run("cat f; echo $TOKEN")
    assert second.stdout == f"a\n{SECRET}\n"
    assert (second.sandbox_id, second.checkpoint.parent_id) == (first.sandbox_id, first.checkpoint.id)
    register(AgentSpec("third-shell", script=True, network="none"))
    with pytest.raises(AgentMismatch):
        make("third-shell", sandbox_id=first.sandbox_id).run("true")
    other.kill()
    assert agent.status().state == "dead"


def test_pause_frees_it_and_a_run_or_resume_wakes_it(make: Callable[..., Agent]) -> None:
    with make(secrets={"TOKEN": SECRET}) as agent:
        agent.run("echo kept > f")
        agent.pause("nap")
        assert agent.status().state == "paused"
        assert agent.run("cat f; echo $TOKEN").stdout == f"kept\n{SECRET}\n"
        agent.pause()
        assert agent.resume().level in ("files", "relaunched", "memory")
        assert agent.status().state == "idle"


def test_kill_in_the_middle_of_a_run_ends_both(make: Callable[..., Agent], home: Path) -> None:
    agent = make()
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


# what it is given


def test_workspace_files_prompt_and_uploads(make: Callable[..., Agent], tmp_path: Path) -> None:
    folder = tmp_path / "docs" / "sub"
    folder.mkdir(parents=True)
    (folder / "deep.md").write_text("deep")
    with make(
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


def test_structured_output(make: Callable[..., Agent]) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 3}}, "required": ["n"]}
    with make() as agent:
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


def test_events_are_live_typed_and_part_of_the_lineage(make: Callable[..., Agent]) -> None:
    with make() as agent:
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
    make: Callable[..., Agent], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: object) -> None:
        raise ValueError("listener broke")

    with make() as agent:
        agent.on("stdout", fail)
        got = agent.run("echo x")
        assert got.status == "completed"
        assert got.checkpoint is not None
        assert any("listener broke" in note for note in got.notes)
        assert "listener" in caplog.text


# secrets


def test_secrets_are_in_no_byte_of_the_store_or_the_home(
    make: Callable[..., Agent], home: Path, tmp_path: Path
) -> None:
    with make(secrets={"TOKEN": SECRET}) as agent:
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


def test_files_that_hold_keys_are_left_out_and_stay_where_they_are(make: Callable[..., Agent], tmp_path: Path) -> None:
    register(AgentSpec("keeper", script=True, network="none", key="KEEPER_KEY", private=(".keeper/auth.json",)))
    with make("keeper", api_key=SECRET) as agent:
        kept = agent.run(
            "mkdir -p ~/.keeper; echo $KEEPER_KEY > ~/.keeper/auth.json; echo plain > ~/.keeper/state"
        ).checkpoint
        assert not holds(tmp_path / "store", SECRET.encode())
        assert agent.sandbox.files.read_text(f"{HOME}/.keeper/auth.json") == f"{SECRET}\n"
        assert agent.sandbox.files.stat(f"{HOME}/.keeper/auth.json").mode & 0o777 == 0o600
        agent.pause()
        assert not holds(tmp_path / "store", SECRET.encode())
        assert agent.run("cat ~/.keeper/auth.json").stdout == f"{SECRET}\n"
    with make("keeper", api_key="another-key-entirely") as agent:
        got = agent.run("ls ~/.keeper; echo $KEEPER_KEY", from_checkpoint=kept.id)
        assert got.stdout == "state\nanother-key-entirely\n"


# the best of several


def test_best_of_keeps_the_winner(make: Callable[..., Agent], home: Path) -> None:
    with make() as agent:
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


def test_a_score_that_raises_leaves_the_agent_as_it_was(make: Callable[..., Agent], home: Path) -> None:
    def score(_: Sandbox) -> float:
        raise ZeroDivisionError("no score")

    with make() as agent:
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


def test_waiting_for_nothing_says_so(make: Callable[..., Agent]) -> None:
    with make() as agent:
        agent.run("true")
        with pytest.raises(NotFound, match="background"):
            agent.wait()
