"""The shell that waits for the next call: used when it fits, never seen, gone when it must be."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from conftest import Make
from guest_box import Box, children, gone, guest, until
from sandkeep import Limits
from sandkeep.model import WORKSPACE


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


def test_nothing_waits_while_the_guest_sleeps(box: Box) -> None:
    box.link.call("secrets_set", secrets={"KEY": "hidden-secret"})
    pid = waiting(box)
    box.link.call("sleep")
    until(lambda: not (box.run_dir / "guest.sock").exists(), "the guest sleeps")
    assert gone(pid)
    assert children(box.process.pid) == []
    (box.run_dir / "wake").write_bytes(b"1")
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
