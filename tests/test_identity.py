"""A pid that was told means that process for as long as the sandbox lives, whatever is done to the sandbox meanwhile."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from conftest import Make
from e2b_kit import Client, start, stream
from guest_box import Box, guest
from sandkeep import Sandbox
from sandkeep.errors import BadArgument, Busy, ProcessNotFound
from serving import Served, served  # noqa: F401
from waiting import until

PIDS = 1 << 22
RUNTIMES = ("runc", "crun", "runsc")


def argv(sb: Sandbox) -> dict[int, list[str]]:
    return {one.pid: one.argv for one in sb.commands.list() if one.running}


def begin(sb: Sandbox, *words: str, **fields: Any) -> int:
    """As E2B's and the WebSocket protocol's processes are begun: a program, not a line for the shell."""
    pid: int = sb._machine.link.call("start", argv=list(words), **fields)["pid"]
    return pid


def again(sb: Sandbox, **options: Any) -> Sandbox:
    """Paused, and connected to as by another process."""
    sb.pause(**options)
    return Sandbox.connect(sb.id, home=sb._home.path)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_pid_is_nobody_elses_after_a_pause(make: Make, runtime: str) -> None:
    options = {"memory": False} if runtime == "runsc" else {}
    with make(runtime=runtime) as sb:
        told = [begin(sb, "sleep", "1001", stdin=False), sb.commands.run("exec sleep 1002", background=True).pid]
        told += [begin(sb, "sh", "-c", "exec sleep 1003")]
        sb.commands.connect(told[0]).kill()
        shown = {pid: words for pid, words in argv(sb).items() if pid != told[0]}
        for _ in range(2):
            sb = again(sb, **options)
            assert sb.restore_report is not None
            assert sb.restore_report.lost == []
            assert argv(sb) == shown
            with pytest.raises(ProcessNotFound):
                sb.commands.connect(told[0])
        fresh = [sb.commands.run("exec sleep 1004", background=True).pid for _ in range(3)]
        assert not set(fresh) & set(told)
        sb.commands.connect(told[1]).kill()
        until(lambda: set(argv(sb)) == {told[2], *fresh}, "that one to have ended, and nobody else")


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_what_runs_is_shown_as_it_was_begun(make: Make, runtime: str) -> None:
    options = {"memory": False} if runtime == "runsc" else {}
    with make(runtime=runtime) as sb:
        want = {
            begin(sb, "sleep", "1001", stdin=False): ["sleep", "1001"],
            begin(sb, "sh", "-c", "echo 'a b'; exec sleep 1002"): ["sh", "-c", "echo 'a b'; exec sleep 1002"],
        }
        sb = again(sb, **options)
        assert sb.restore_report is not None
        assert argv(sb) == want
        assert sorted(sb.restore_report.relaunched) == [
            "'sh' '-c' 'echo '\\''a b'\\''; exec sleep 1002'",
            "'sleep' '1001'",
        ]
        assert sb._machine.link.call("process", pid=min(want))["user"] == "user"


def test_who_was_killed_is_not_started_again_however_long_it_takes_to_die(make: Make) -> None:
    with make() as sb:
        pid = begin(sb, "sleep", "1000")
        timed = begin(sb, "sleep", "1000", timeout=0.01)
        until(lambda: sb._machine.link.call("process", pid=timed)["doomed"], "its time to be over")
        sb.commands.connect(pid).kill()
        assert sb._machine.link.call("process", pid=pid)["doomed"]
        sb = again(sb)
        assert argv(sb) == {}
        assert sb.restore_report is not None
        assert (sb.restore_report.relaunched, sb.restore_report.lost) == ([], [])


def test_a_process_starts_again_as_its_user_and_without_input(make: Make) -> None:
    with make() as sb:
        pid = begin(sb, "sh", "-c", "id -un > /tmp/who; cat >> /tmp/who; exec sleep 1000", stdin=False, user="root")
        until(lambda: sb.commands.run("cat /tmp/who").stdout == "root\n", "it to say who it is")
        sb.files.write("/tmp/who", "")
        sb = again(sb)
        until(lambda: sb.commands.run("cat /tmp/who").stdout == "root\n", "it to say it again")
        assert argv(sb)[pid][0] == "sh"


@pytest.mark.parametrize("runtime", ["runc", "runsc"])
def test_numbers_go_on_over_restores_and_forks(make: Make, home: Path, runtime: str) -> None:
    with make(runtime=runtime) as sb:
        kept = sb.commands.run("exec sleep 1001", background=True).pid
        snapshot = sb.snapshot()
        saved = sb.checkpoint()
        told = {kept, *(sb.commands.run("true", background=True).pid for _ in range(5))}
        for to in (snapshot, saved):
            sb.restore(to, require="relaunched")
            assert set(argv(sb)) == {kept}
            new = {sb.commands.run("true", background=True).pid for _ in range(5)}
            assert not new & told
            told |= new
        until(lambda: set(argv(sb)) == {kept}, "the others to have ended")
        before = sb.checkpoint()
        child = sb.fork()
        made = Sandbox(from_checkpoint=before, home=home, runtime="runc")
        try:
            assert set(argv(made)) == {kept}
            assert argv(child) == {}
            for other in (child, made):
                assert not {other.commands.run("true", background=True).pid for _ in range(3)} & told
        finally:
            child.kill()
            made.kill()


def test_numbers_go_on_when_memory_goes_back(make: Make) -> None:
    with make(runtime="runsc") as sb:
        kept = sb.commands.run("exec sleep 1001", background=True).pid
        saved = sb.checkpoint(memory=True)
        told = {sb.commands.run("true", background=True).pid for _ in range(4)}
        assert sb.restore(saved, require="memory").level == "memory"
        assert set(argv(sb)) == {kept}
        assert not {sb.commands.run("true", background=True).pid for _ in range(4)} & {kept, *told}


@pytest.mark.parametrize("runtime", ["runc", "runsc"])
def test_numbers_go_on_after_process_1_has_died(make: Make, runtime: str) -> None:
    with make(runtime=runtime) as sb:
        before = sb.snapshot()
        told = {sb.commands.run("true", background=True).pid for _ in range(4)}
        with sb._machine.held() as record:
            sb._machine.stop(record)
        sb.restore(before)
        assert not {sb.commands.run("true", background=True).pid for _ in range(4)} & told


def test_a_number_is_the_pid_where_it_can_be(box: Box) -> None:
    pids = [box.link.call("start", argv=["sleep", "600"])["pid"] for _ in range(3)]
    until(lambda: all(Path(f"/proc/{pid}/comm").read_text() == "sleep\n" for pid in pids), "all of them to be in /proc")
    with box.link.stream("run", {"code": "echo $$"}, timeout=60) as events:
        assert int(b"".join(data for kind, data in events if kind == "stdout")) == events.result["pid"]


def test_what_has_been_a_number_is_none_for_another(tmp_path: Path) -> None:
    """A guest that has, by its note, given every pid there can be."""
    (tmp_path / "numbers").write_bytes(b"\xff" * (1 << 13))
    with guest(tmp_path) as box:
        first, second = (box.link.call("start", argv=["sleep", "600"])["pid"] for _ in range(2))
        if first > PIDS:  # a machine may have larger pids than these
            assert (first, second) == (PIDS + 1, PIDS + 2)
        assert {one["pid"] for one in box.link.call("list")["processes"]} == {first, second}
        box.link.call("signal", pid=first, signal=9)
        assert box.link.call("wait", pid=first, timeout=60)["signal"] == "SIGKILL"
        assert box.link.call("process", pid=second)["running"]


def test_the_note_survives_what_a_crash_leaves_of_it(tmp_path: Path) -> None:
    (tmp_path / "numbers").write_bytes(random.Random(7).randbytes(PIDS // 8 + 100))
    with guest(tmp_path) as box:
        pids = [box.link.call("start", argv=["true"])["pid"] for _ in range(3)]
        assert len(set(pids)) == 3
        session = box.link.call("session_get")["numbers"]
    with guest(tmp_path) as box:
        assert box.link.call("session_get")["numbers"] == session
        for wrong in (
            {},
            {"pids": "zz", "own": PIDS},
            {**session, "own": 3},
            {**session, "own": "x"},
            {"pids": "78da", "own": PIDS},
        ):
            with pytest.raises(BadArgument):
                box.link.call("session_set", numbers=wrong)
        assert box.link.call("session_get")["numbers"] == session


def test_when_all_numbers_are_given_what_is_saved_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "numbers").write_bytes(bytes(PIDS // 8) + ((1 << 31) - 1).to_bytes(8, "little"))
    with guest(tmp_path) as box:
        session = box.link.call("session_get")["numbers"]
        assert session["own"] == (1 << 31) - 1
        box.link.call("session_set", numbers=session)


def test_nobody_is_started_with_the_number_of_one_that_runs(box: Box) -> None:
    pid = box.link.call("start", argv=["sleep", "600"])["pid"]
    with pytest.raises(Busy):
        box.link.call("relaunch", number=pid, argv=["true"])
    for wrong in ({}, {"argv": ["true"], "code": "true"}):
        with pytest.raises(BadArgument):
            box.link.call("relaunch", number=pid + 1, **wrong)
    assert box.link.call("process", pid=pid)["running"]
    box.link.call("signal", pid=pid, signal=9)
    box.link.call("wait", pid=pid, timeout=60)
    box.link.call("relaunch", number=pid, code="echo again", user=None)
    done = box.attach(pid)
    assert (done.stdout, done.exit_code, done.result["pid"]) == (b"again\n", 0, pid)


def test_numbers_are_one_for_e2b_and_rest(served: Served) -> None:  # noqa: F811
    """Told by one API, killed by the other, after a sleep."""
    client = Client(served)
    made = client.create(timeout=900)
    id, box = made["sandboxID"], client.box(made)
    commands = f"/sandboxes/{id}/commands"

    def running() -> dict[int, list[str]]:
        found = box.post("/process.Process/List", json={}).json().get("processes", [])
        return {one["pid"]: [one["config"]["cmd"], *one["config"]["args"]] for one in found}

    pids = [
        client.rest.post(commands, json={"command": f"exec sleep {seconds}", "background": True}).json()["pid"]
        for seconds in (1001, 1002, 1003)
    ]
    events = stream(box, "/process.Process/Start", start("true"))
    pids.append(events[0][1]["event"]["start"]["pid"])
    kill = {"process": {"pid": pids[0]}, "signal": "SIGNAL_SIGKILL"}
    assert box.post("/process.Process/SendSignal", json=kill).status_code == 200
    until(lambda: set(running()) == set(pids[1:3]), "the first to have ended")
    before = running()
    listed = client.rest.get(commands).json()["commands"]
    assert {one["pid"]: one["argv"] for one in listed if one["running"]} == before
    assert client.control.post(f"/sandboxes/{id}/pause").status_code == 204
    assert client.control.post(f"/v2/sandboxes/{id}/connect", json={"timeout": 900}).status_code in (200, 201)
    assert running() == before
    assert box.post("/process.Process/SendSignal", json=kill).json()["code"] == "not_found"
    assert client.rest.post(f"{commands}/{pids[0]}/signal").status_code == 404
    new = client.rest.post(commands, json={"command": "exec sleep 1004", "background": True}).json()["pid"]
    assert new not in pids
    assert client.rest.post(f"{commands}/{pids[1]}/signal", json={"signal": 9}).status_code == 204
    until(lambda: set(running()) == {pids[2], new}, "that one to have ended, and nobody else")
