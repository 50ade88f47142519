"""The shell that waits for the next call: used when it fits, never seen, gone when it must be."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import Make
from guest_box import Box, children, gone, guest, until
from sandkeep import Limits
from sandkeep.model import WORKSPACE
from sandkeep.runtime.link import door


def waiting(box: Box, **fields: object) -> int:
    """Two calls alike, and the shell that then waits."""
    box.run("true", **fields)
    box.run("true", **fields)
    return int(until(lambda: children(box.process.pid), "a shell waits")[0])


def none_waits(box: Box) -> bool:
    box.link.call("hello")  # whatever was to be started after an answer has been
    return children(box.process.pid) == []


def test_the_call_after_two_alike_is_answered_by_the_shell_that_waits(box: Box) -> None:
    box.run("true")
    assert none_waits(box)
    pid = waiting(box)
    assert box.text("echo $$; x=1; f() { echo f$x; }; cd /usr; export E=2; umask 027; set -o noglob") == f"{pid}\n"
    second = int(until(lambda: children(box.process.pid), "the next one waits")[0])
    assert second != pid
    assert box.text("echo $$ $x $(f) $PWD $E $(umask) *") == f"{second} 1 f1 /usr 2 0027 *\n"


def test_it_is_like_any_other_shell(box: Box) -> None:
    own = "BASHPID|BASH_COMMAND|EPOCH|PPID|RANDOM|SRANDOM|SANDKEEP_RUN_ID|LINENO|__sk|BASH_ARG"
    look = f"declare -p | grep -vE ' ({own})'; set -o; shopt; ulimit -a; umask; trap; jobs; echo $# $0 $- $! $? $_ $SHLVL $SECONDS; readlink /proc/self/fd/0; ls /proc/$$/fd; history"  # fmt: skip
    fresh = box.run(look, record=False)
    box.run("true", record=False)
    pid = waiting(box, record=False)
    time.sleep(1.2)
    assert box.text("echo $$ $SECONDS", record=False) == f"{pid} 0\n"
    until(lambda: children(box.process.pid), "the next one waits")
    again = box.run(look, record=False)
    assert (again.stdout, again.stderr, again.exit_code) == (fresh.stdout, fresh.stderr, fresh.exit_code)


def test_numbers_and_ids_are_never_the_same_twice(box: Box) -> None:
    waiting(box)
    drawn = [box.text("echo $$ $RANDOM$RANDOM$RANDOM $SANDKEEP_RUN_ID").split() for _ in range(6)]
    assert all(len(set(column)) == 6 for column in zip(*drawn, strict=True))


def test_it_is_in_no_list_and_no_count_and_holds_no_save_point_up(box: Box) -> None:
    pid = waiting(box)
    assert box.link.call("list")["processes"] == []
    with box.link.stream("hold") as held:
        facts = held.first_json()
        assert (facts["idle"], facts["processes"]) == (True, [])
        assert gone(pid)
        assert none_waits(box)
    waiting(box)
    assert box.link.call("kill_all")["killed"] == 0
    assert none_waits(box)
    waiting(box)
    assert box.link.call("stop_all")["stopped"] == 0
    box.link.call("cont_all")


@pytest.mark.parametrize(
    ("op", "fields"),
    [
        ("env_set", {"env": {"N": "1"}}),
        ("env_unset", {"names": ["N"]}),
        ("secrets_set", {"secrets": {"KEY": "new-secret"}}),
        ("session_set", {"cwd": "/usr"}),
        ("user_default", {"user": "root"}),
        ("reseed", {"seed": "00"}),
    ],
)
def test_it_does_not_outlive_what_it_began_with(box: Box, op: str, fields: dict[str, object]) -> None:
    pid = waiting(box)
    box.link.call(op, **fields)
    assert gone(pid)
    assert none_waits(box)
    assert box.text("printf %s ${KEY-}") == ("new-secret" if op == "secrets_set" else "")


def test_nothing_waits_while_the_guest_sleeps(called: Box) -> None:
    box = called
    box.link.call("secrets_set", secrets={"KEY": "hidden-secret"})
    pid = waiting(box)
    with box.link.stream("sleep", timeout=60) as answer:
        list(answer)
        answer.end()
    assert gone(pid)
    assert children(box.process.pid) == []
    door.wake(box.dir)
    box.link.ready(60, lambda: box.process.poll() is None)
    assert box.text("printf %s ${KEY-none}") == "none"


@pytest.mark.parametrize(
    "options", [{"cwd": "/usr"}, {"env": {"A": "b"}}, {"user": 65534}, {"body": [b"in"]}, {"env": {"TMOUT": "1"}}]
)
def test_a_call_with_options_of_its_own_gets_them(box: Box, options: dict[str, object]) -> None:
    look = 'echo "$$ $PWD ${A-} $(id -u) ${TMOUT-}"; cat'
    plain = waiting(box)
    first = box.run(look, **options)  # type: ignore[arg-type]
    assert int(first.stdout.split()[0]) != plain
    assert gone(plain)
    said = [box.run(look, **options).stdout.split(b" ", 1)[1] for _ in range(3)]  # type: ignore[arg-type]
    assert said == [first.stdout.split(b" ", 1)[1]] * 3
    assert box.text("pwd; id -u") == f"{box.link.call('env_get')['cwd']}\n0\n"


def test_a_folder_that_was_replaced_is_not_worked_in(box: Box, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    box.text(f"cd {folder}")
    waiting(box)
    folder.rename(tmp_path / "old")
    folder.mkdir()
    box.text("echo new > file")
    assert (folder / "file").read_text() == "new\n"


def test_one_that_was_killed_is_not_missed(box: Box) -> None:
    for _ in range(3):
        pid = waiting(box)
        os.kill(pid, signal.SIGKILL)
        until(lambda pid=pid: gone(pid), "it has ended")  # type: ignore[misc]
        assert box.text("echo on") == "on\n"


# what is killed at the moment of hand-over: the shell is stopped at its gate, so that moment lasts


def stopped(box: Box, body: list[bytes] | None = None) -> int:
    for _ in range(2):
        box.run("true", body)
    pid = int(until(lambda: children(box.process.pid), "a shell waits")[0])
    until(lambda: "bash" in os.readlink(f"/proc/{pid}/exe"), "it is a shell")  # before that the guest waits for it
    os.kill(pid, signal.SIGSTOP)
    return pid


def test_a_call_whose_shell_is_killed_before_it_begins_is_begun_by_another(box: Box, tmp_path: Path) -> None:
    box.text("x=7; f() { echo f$x; }; cd /usr")
    pid = stopped(box)
    code = f"f; echo $$ $PWD; echo . >> {tmp_path}/times; y=1"
    with box.link.stream("run", {"code": code}, timeout=60) as events:
        assert events.first_json() == {"started": pid}
        os.kill(pid, signal.SIGKILL)
        said = b"".join(data for kind, data in events if kind == "stdout").decode().split()
        assert (events.result["pid"], events.result["exit_code"], events.result["session_saved"]) == (pid, 0, True)
    assert (said[0], said[2]) == ("f7", "/usr")
    assert int(said[1]) != pid
    assert (tmp_path / "times").read_text() == ".\n"
    assert box.text("echo $y") == "1\n"
    assert [one["command"] for one in box.link.call("history_list")["history"]].count(code) == 1


def test_its_input_is_not_lost_with_the_shell(box: Box) -> None:
    pid = stopped(box, [])
    sent = [b"x" * 50_000] * 3

    def body() -> Iterator[bytes]:
        yield from sent
        os.kill(pid, signal.SIGKILL)
        yield b"end"

    with box.link.stream("run", {"code": "cat"}, body=body(), timeout=60) as events:
        assert b"".join(data for kind, data in events if kind == "stdout") == b"".join(sent) + b"end"


def test_in_the_background_it_keeps_the_number_that_was_told(box: Box) -> None:
    pid = stopped(box, [])
    assert box.link.call("run", code="echo $$; exec sleep 600", background=True)["pid"] == pid
    os.kill(pid, signal.SIGKILL)
    until(lambda: box.link.call("process", pid=pid)["positions"]["stdout"]["end"], "it has begun")
    box.link.call("signal", pid=pid, signal=9)
    done = box.attach(pid)
    assert (done.exit_code, done.result["signal"]) == (137, "SIGKILL")
    assert gone(int(done.stdout))
    assert int(done.stdout) != pid


def test_a_command_that_has_begun_is_never_begun_again(box: Box, tmp_path: Path) -> None:
    for _ in range(3):
        waiting(box)
        assert box.run(f"echo . >> {tmp_path}/times; kill -9 $$").exit_code == 137
    assert (tmp_path / "times").read_text() == ".\n" * 3


@pytest.mark.parametrize("how", ["signal", "kill_all", "timeout"])
def test_who_wants_it_dead_gets_that(box: Box, tmp_path: Path, how: str) -> None:
    pid = stopped(box)
    limit = {"timeout": 1.0} if how == "timeout" else {}
    with box.link.stream("run", {"code": f"touch {tmp_path}/ran", **limit}, timeout=60) as events:
        assert events.first_json() == {"started": pid}
        if how == "signal":
            box.link.call("signal", pid=pid, signal=9)
        elif how == "kill_all":
            box.link.call("kill_all")
        list(events)
        assert events.result["exit_code"] == (124 if how == "timeout" else 137)
    assert box.text("echo on") == "on\n"
    assert not (tmp_path / "ran").exists()


def test_it_ends_when_no_call_comes(tmp_path: Path) -> None:
    with guest(tmp_path, before="import guest.starting as s\ns._IDLE = 0.2") as box:
        pid = until(lambda: box.run("true") and children(box.process.pid), "a shell waits")[0]
        until(lambda: gone(pid), "it has ended")
        assert box.text("echo on") == "on\n"


def test_calls_at_once_have_a_shell_each(box: Box, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    pid = waiting(box)
    with box.link.stream("run", {"code": f"echo $$; read x <{gate}; echo $x"}, timeout=60) as first:
        assert first.first_json() == {"started": pid}
        assert int(box.text("echo $$")) != pid
        gate.write_text("go\n")
        assert b"".join(data for kind, data in first if kind == "stdout") == b"%d\ngo\n" % pid


def test_code_outside_the_session_knows_nothing_of_it(box: Box) -> None:
    box.text("x=1; f() { :; }; export E=2; set -f; cd /usr")
    asked = {"code": "echo ${x-no} $(type -t f) $E $- $PWD; read y; echo $y; x=3", "session": False, "follow": True}
    for _ in range(3):
        with box.link.stream("start", asked, timeout=60) as events:
            pid = events.first_json()["started"]
            box.stdin(pid, b"in\n")
            assert b"".join(data for kind, data in events if kind == "stdout") == b"no 2 hBc /usr\nin\n"
    assert box.text("echo $x $-") == "1 fhBc\n"
    assert box.link.call("process", pid=pid)["code"].startswith(f"'{box.link.call('hello')['shell']}' '-c' 'echo ")


def test_a_bound_on_processes_is_the_same_with_it(make: Make) -> None:
    fill = "import os, time\nn = 0\ntry:\n while True:\n  if not os.fork(): time.sleep(600)\n  n += 1\nexcept OSError: print(n)"
    with make(runtime="runc", limits=Limits(pids=24)) as sb:
        first = sb.commands.run(f"python3 -c '{fill}'").stdout
        sb._machine.link.call("kill_all")
        for _ in range(3):
            sb.commands.run("true")
        assert sb.commands.run(f"python3 -c '{fill}'").stdout == first


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_a_sandbox_with_one_is_saved_and_restored_as_if_it_had_none(make: Make, runtime: str) -> None:
    with make(runtime=runtime) as sb:
        for number in range(4):
            sb.commands.run(f"echo {number} > file")
        saved = sb.snapshot()
        assert saved.how == "rotated"
        for _ in range(4):
            sb.commands.run("mkdir -p d; cd d; echo lost > ../file")
        report = sb.restore(saved)
        assert (report.lost, report.why) == ([], "")
        assert sb.commands.run("pwd -P; cat file; ls").stdout == f"{WORKSPACE}\n3\nfile\n"
