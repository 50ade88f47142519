"""The process table: replay, back-pressure, trees, terminals, and a guest that outlives its clients."""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from guest_box import Box, children, gone
from sandkeep.errors import BadArgument, FileMissing, ProcessNotFound, SandboxDead
from sandkeep.runtime.link import Link, door
from sandkeep.runtime.link.door import listening
from waiting import PATIENCE, until

MIB = 1 << 20


def sockets(pid: int) -> list[str]:
    held = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    return [what for what in held if what.startswith("socket:")]


def start(box: Box, **fields: object) -> int:
    pid: int = box.link.call("start", **fields)["pid"]
    return pid


def test_output_is_replayed_to_whoever_comes_later(box: Box) -> None:
    pid = start(box, argv=["sh", "-c", "printf out; printf err >&2; exit 5"])
    for _ in range(2):
        done = box.attach(pid)
        assert (done.stdout, done.stderr, done.exit_code) == (b"out", b"err", 5)
    later = box.attach(pid, positions={"stdout": 1, "stderr": 3})
    assert (later.stdout, later.stderr) == (b"ut", b"")
    with pytest.raises(BadArgument):
        box.attach(pid, positions={"stdout": 4})


def test_a_process_that_nobody_follows_never_blocks_and_its_loss_is_counted(box: Box) -> None:
    pid = start(box, code=f"head -c {3 * MIB} /dev/zero; printf end")
    assert box.link.call("wait", pid=pid, timeout=60)["exit_code"] == 0
    done = box.attach(pid)
    assert len(done.stdout) == MIB
    assert done.stdout.endswith(b"\0end")
    assert done.result["dropped"] == {"stdout": 2 * MIB + 3}
    assert done.result["positions"] == {"stdout": 3 * MIB + 3, "stderr": 0}


def test_a_follower_that_reads_slowly_loses_nothing(box: Box) -> None:
    size = 20 * MIB
    with box.link.stream("run", {"code": f"head -c {size} /dev/zero"}, timeout=PATIENCE) as events:
        pid = events.first_json()["started"]
        until(lambda: ring_end(box, pid) >= MIB, "the ring is full")
        assert ring_end(box, pid) < size
        assert box.text("echo others go on") == "others go on\n"
        assert sum(len(data) for kind, data in events if kind == "stdout") == size
        assert events.result["dropped"] == {}


def test_of_two_followers_the_slow_one_loses_nothing_either(box: Box) -> None:
    code = f"echo begun; read go; head -c {8 * MIB} /dev/zero"
    with box.link.stream("start", {"argv": ["sh", "-c", code], "follow": True}, timeout=PATIENCE) as slow:
        pid = slow.first_json()["started"]
        with box.link.stream("attach", {"pid": pid}, timeout=PATIENCE) as fast, ThreadPoolExecutor() as threads:
            assert next(fast) == ("stdout", b"begun\n")
            box.stdin(pid, b"go\n")
            read = threads.submit(lambda: sum(len(data) for _, data in fast))
            until(lambda: ring_end(box, pid) >= MIB, "the ring is full")
            until(lambda: stands(box, pid), "the fast one has all that it gets before the slow one reads")
            assert sum(len(data) for _, data in slow) == 6 + 8 * MIB
            assert read.result(PATIENCE) == 8 * MIB
            assert slow.result["dropped"] == fast.result["dropped"] == {}


def stands(box: Box, pid: int) -> bool:
    """No output for a while."""
    ends = set()
    for _ in range(10):
        ends.add(ring_end(box, pid))
        time.sleep(0.02)
    return len(ends) == 1


def ring_end(box: Box, pid: int) -> int:
    end: int = box.link.call("process", pid=pid)["positions"]["stdout"]["end"]
    return end


def test_a_background_command_outlives_its_client_and_can_be_found_again(box: Box, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    pid = box.link.call("run", code=f"echo before; read line <{gate}; echo after", background=True)["pid"]
    with box.link.stream("attach", {"pid": pid}, timeout=PATIENCE) as events:
        assert next(events) == ("stdout", b"before\n")
    gate.write_text("go\n")
    done = box.attach(pid)
    assert (done.stdout, done.exit_code) == (b"before\nafter\n", 0)


@pytest.mark.parametrize("escape", ["{} &", "(env -i setsid {} &);"])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("fields", [{}, {"stdin": True}])
def test_a_command_ends_with_its_client_and_leaves_the_session_as_it_was(
    box: Box, escape: str, warm: bool, fields: dict[str, object]
) -> None:
    nap = f"sleep 600.{uuid.uuid4().int}"
    for _ in range(3 if warm else 0):
        box.run("true", **({"body": [b""]} if fields else {}))
    with box.link.stream(
        "run",
        {"code": f"v=1; {escape.replace('{}', nap)} trap '' TERM INT; echo $$; sleep 600", **fields},
        timeout=PATIENCE,
    ) as events:
        pid = events.first_json()["started"]
        assert next(events)[0] == "stdout"
        until(lambda: nap.split()[1] in box.text("ps -eo args"), "the tree is there")
        [told] = [
            one
            for one in box.link.call("list")["processes"]
            if one["running"] and not one["background"] and one["pid"] == pid
        ]
        assert nap in told["code"]
    until(lambda: nap.split()[1] not in box.text("ps -eo args"), "all of the tree to end")
    assert box.attach(pid).exit_code == 137
    assert box.text("echo $v") == "\n"


def test_a_command_that_stays_ends_when_its_client_says_so(box: Box) -> None:
    box.link.stays = True
    naps = [f"sleep 600.{uuid.uuid4().int}" for _ in range(2)]
    with box.link.stream("run", {"code": naps[0]}, timeout=PATIENCE) as events:
        events.first_json()
        assert events._wire is not None
        events._wire.close()
        events._wire = None
    with box.link.stream("run", {"code": naps[1]}, timeout=PATIENCE) as events:
        pid = events.first_json()["started"]
    assert box.attach(pid).exit_code == 137
    box.link.stays = False
    assert naps[0].split()[1] in box.text("ps -eo args")
    assert naps[1].split()[1] not in box.text("ps -eo args")


def test_a_command_that_stays_ends_with_whoever_has_not_given_it_all_of_its_input(box: Box) -> None:
    """Nobody else could; and its client may have no room for a last word."""
    box.link.stays = True
    nap = f"sleep 600.{uuid.uuid4().int}"
    with box.link.stream("run", {"code": nap}, body=[b"x" * (4 << 20)], timeout=PATIENCE) as events:
        pid = events.first_json()["started"]
        assert events._wire is not None
        assert events._wire.receive(0.2) is None
    assert box.attach(pid).exit_code == 137
    assert nap.split()[1] not in box.text("ps -eo args")


def test_what_a_command_left_behind_stays_though_its_client_has_gone(box: Box) -> None:
    nap = f"sleep 600.{uuid.uuid4().int}"
    with box.link.stream("run", {"code": f"{nap} & echo $!"}, timeout=PATIENCE) as events:
        pid = events.first_json()["started"]
        _, said = next(events)
        until(lambda: box.link.call("process", pid=pid)["exit_code"] == 0, "its shell to end")
    assert nap.split()[1] in box.text("ps -eo args")
    os.kill(int(said), 9)


@pytest.mark.parametrize(
    "escape",
    [
        "{} &",
        "setsid {} &",
        "(setsid {} &);",
        "(env -i setsid {} &);",
        "(env -i setsid sh -c '{} & {}' </dev/null >/dev/null 2>&1 &);",
        "nohup sh -c 'trap \"\" TERM; {}' &",
    ],
)
def test_a_timeout_ends_the_whole_tree(box: Box, escape: str) -> None:
    nap = f"sleep 600.{uuid.uuid4().int}"
    done = box.run(f"{escape.replace('{}', nap)} trap '' TERM INT; echo $$; sleep 600", timeout=4)
    assert (done.exit_code, done.result["timed_out"]) == (124, True)
    assert gone(int(done.stdout))
    until(lambda: not called(nap), "nothing of the tree is left")


def test_also_one_of_a_shell_that_waited_or_of_no_shell(box: Box) -> None:
    nap = f"sleep 600.{uuid.uuid4().int}"
    for _ in range(2):
        box.run("true")
    assert box.run(f"(env -i setsid {nap} &); sleep 600", timeout=2).exit_code == 124
    until(lambda: not called(nap), "nothing of the first tree is left")
    pid = start(box, argv=["sh", "-c", f"(env -i setsid {nap} &); sleep 600"])
    until(lambda: called(nap), "it runs")
    box.link.call("signal", pid=pid, signal=9)
    until(lambda: not called(nap), "nothing of the second tree is left")


def called(command: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "cmdline").read_bytes() == command.replace(" ", "\0").encode() + b"\0":
                found.append(int(entry.name))
    return found


def test_signals_go_to_the_tree_or_to_one(box: Box) -> None:
    pid = start(box, code="trap 'echo caught; exit 7' USR1; while :; do sleep 0.05; done")
    pid2 = start(box, code="sleep 600 & sleep 600")
    assert box.link.call("signal", pid=pid2, signal="KILL")["signalled"] >= 1
    assert box.link.call("wait", pid=pid2, timeout=60)["signal"] == "SIGKILL"
    until(lambda: caught(box, pid), "the trap was set and the signal came")
    with pytest.raises(ProcessNotFound):
        box.link.call("signal", pid=pid, signal=15)


def caught(box: Box, pid: int) -> bool:
    try:
        box.link.call("signal", pid=pid, signal=int(signal.SIGUSR1), tree=False)
    except ProcessNotFound:
        return True
    return bool(box.link.call("process", pid=pid)["exit_code"] is not None)


def test_input_goes_in_piece_by_piece(box: Box) -> None:
    pid = start(box, argv=["cat"])
    box.stdin(pid, b"one ")
    box.stdin(pid, b"two", b"x" * (MIB // 2))
    box.link.call("close_stdin", pid=pid)
    assert box.attach(pid).stdout == b"one two" + b"x" * (MIB // 2)
    with pytest.raises(ProcessNotFound):
        box.stdin(pid, b"late")


def test_a_process_is_followed_from_its_first_byte_by_the_request_that_starts_it(box: Box) -> None:
    size = 5 * MIB
    code = f"head -c {size} /dev/zero; printf err >&2; exit 6"
    with box.link.stream("start", {"argv": ["sh", "-c", code], "follow": True}, timeout=PATIENCE) as events:
        pid = events.first_json()["started"]
        until(lambda: ring_end(box, pid) >= MIB, "the ring is full")
        assert ring_end(box, pid) < size
        out = {"stdout": 0, "stderr": 0}
        for kind, data in events:
            out[kind] += len(data)
    assert out == {"stdout": size, "stderr": 3}
    assert (events.result["pid"], events.result["exit_code"], events.result["signal"]) == (pid, 6, None)
    assert (events.result["dropped"], events.result["positions"]) == ({}, out)
    again = box.attach(pid)
    assert (again.stderr, again.exit_code, again.result["duration_ms"]) == (b"err", 6, events.result["duration_ms"])


@pytest.mark.parametrize("fields", [{"code": "v=1; echo $v; read x; echo $x"}, {"argv": ["sh", "-c", "echo 1; read x; echo $x"]},
                                    {"argv": ["sh", "-c", "stty -echo -onlcr; echo 1; read x; echo $x"], "pty": True}])  # fmt: skip
def test_a_follower_that_leaves_takes_neither_the_process_nor_its_output_nor_its_input(
    box: Box, fields: dict[str, object]
) -> None:
    with box.link.stream("start", {**fields, "follow": True}, timeout=PATIENCE) as events:
        pid = events.first_json()["started"]
        assert next(events) == ("stdout", b"1\n")
    box.stdin(pid, b"on\n")
    done = box.attach(pid)
    assert (done.stdout, done.exit_code) == (b"1\non\n", 0)
    with box.link.stream("attach", {"pid": pid}, timeout=PATIENCE) as late:
        assert b"".join(data for _, data in late) == b"1\non\n"


def test_a_process_without_input_has_an_empty_one(box: Box) -> None:
    for fields in ({"argv": ["cat"]}, {"code": "cat"}):
        with box.link.stream("start", {**fields, "stdin": False, "follow": True}, timeout=PATIENCE) as events:
            pid = events.first_json()["started"]
            assert list(events) == []
        assert events.result["exit_code"] == 0
        with pytest.raises(ProcessNotFound):
            box.stdin(pid, b"x")
        again = box.link.call("process", pid=pid)["again"]
        box.link.call("relaunch", number=pid, **again)
        assert box.link.call("wait", pid=pid, timeout=60)["exit_code"] == 0, "started again it has none either"
    with pytest.raises(BadArgument):
        start(box, pty=True, stdin=False)
    for wrong in ({"stdin": 1}, {"follow": "yes"}):
        with pytest.raises(BadArgument):
            start(box, argv=["true"], **wrong)
    with pytest.raises(FileMissing), box.link.stream("start", {"argv": ["no-such-program"], "follow": True}) as events:
        events.first_json()
    assert box.text("echo the connection is whole") == "the connection is whole\n"


def test_a_terminal_is_a_real_one(box: Box) -> None:
    pid = start(box, pty=True, cols=100, rows=30, argv=["sh"])
    box.stdin(pid, b"stty size; test -t 0 && echo is-$((40+2)); tty\n")
    until(lambda: b"30 100" in seen(box, pid) and b"is-42" in seen(box, pid), "the terminal tells its size")
    box.link.call("resize", pid=pid, cols=81, rows=25)
    box.stdin(pid, b"stty size\n")
    until(lambda: b"25 81" in seen(box, pid), "the new size is told")
    box.stdin(pid, b"sleep 600\n")
    until(lambda: "sleep" in map(program, children(pid)), "the job has the terminal: a shell sees to that before exec")
    box.stdin(pid, b"\x03echo broke-$((1+1))\n")
    until(lambda: b"broke-2" in seen(box, pid), "control-C ends the job")
    box.link.call("close_stdin", pid=pid)
    assert box.link.call("wait", pid=pid, timeout=60)["running"] is False


def program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def seen(box: Box, pid: int) -> bytes:
    """What a terminal shows so far."""
    end = ring_end(box, pid)
    out = bytearray()
    with box.link.stream("attach", {"pid": pid}, timeout=PATIENCE) as events:
        while len(out) < end:
            out += next(events)[1]
    return bytes(out)


def test_a_shell_on_a_terminal_is_interactive(box: Box) -> None:
    pid = start(box, pty=True)
    box.stdin(pid, b"case $- in *i*) echo inter-$((1+1));; esac; exit 3\n")
    done = box.attach(pid)
    assert b"inter-2" in done.stdout
    assert done.exit_code == 3


def test_the_list_tells_what_runs_and_what_ran(box: Box) -> None:
    box.text("export S=1; cd /usr")
    server = "import socket,time; s=socket.socket(); s.bind(('127.0.0.1',0)); s.listen(); print(s.getsockname()[1],flush=True); time.sleep(600)"
    pid = box.link.call("run", code=f'exec python3 -c "{server}"', background=True, tag="web", env={"E": "2"})["pid"]
    with box.link.stream("attach", {"pid": pid}, timeout=PATIENCE) as events:
        port = int(next(events)[1])
    ended = start(box, argv=["sh", "-c", "exit 9"])
    box.link.call("wait", pid=ended, timeout=60)
    told = {one["pid"]: one for one in box.link.call("list")["processes"]}
    web = told[pid]
    assert (web["running"], web["exit_code"], web["tag"], web["cwd"], web["env"], web["pty"]) == (
        True,
        None,
        "web",
        "/usr",
        {"E": "2"},
        False,
    )
    assert web["background"] is True
    assert web["ports"] == [port]
    assert web["argv"][1] == "-c"
    assert "SANDKEEP_RUN_ID" not in repr(told)
    assert (told[ended]["running"], told[ended]["exit_code"]) == (False, 9)
    assert port in box.link.call("ports")["ports"]


def test_a_background_command_starts_from_the_session_and_gives_nothing_back(box: Box) -> None:
    box.text("v=here; f() { echo f-$v; }")
    pid = box.link.call("run", code="f; v=changed; cd /usr", background=True)["pid"]
    assert box.attach(pid).stdout == b"f-here\n"
    assert box.text("printf %s $v") == "here"


def test_what_can_not_be_started_is_an_error_and_changes_nothing(box: Box) -> None:
    with pytest.raises(FileMissing, match="no-such-program"):
        start(box, argv=["no-such-program"])
    with pytest.raises(FileMissing, match="/nowhere"):
        box.run("true", cwd="/nowhere")
    with pytest.raises(BadArgument):
        box.run("true", user="nobody-of-this-name")
    with pytest.raises(BadArgument):
        start(box, argv=["true"], code="true")
    assert box.link.call("history_list")["history"] == []
    assert box.link.call("list")["processes"] == []


def test_processes_stop_and_go_on(box: Box) -> None:
    pid = start(box, code="while :; do echo tick; sleep 0.01; done")
    until(lambda: ring_end(box, pid) > 0, "it ticks")
    assert box.link.call("stop_all")["stopped"] >= 1
    assert "T" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    box.link.call("cont_all")
    end = ring_end(box, pid)
    until(lambda: ring_end(box, pid) > end, "it ticks again")
    assert box.link.call("kill_all")["killed"] >= 1
    assert box.link.call("wait", pid=pid, timeout=60)["signal"] == "SIGKILL"


def test_while_held_nothing_new_begins(box: Box) -> None:
    with box.link.stream("hold", timeout=PATIENCE) as hold:
        facts = hold.first_json()
        assert facts["idle"] is True
        assert facts["shared_maps"] is False
        assert set(facts["session"]) == {"env", "cwd", "shell", "history", "user", "numbers"}
        sock = listening(box.dir)
        assert sock is not None
        request = b'{"op":"run","code":"true"}'
        sock.sendall(struct.pack("!IB", len(request) + 1, 0) + request)
        assert box.link.call("history_list")["history"] == []
    sock.settimeout(PATIENCE)
    heard = b""
    while b'"ok"' not in heard:
        data = sock.recv(65536)
        assert data, heard
        heard += data
    sock.close()
    assert [one["command"] for one in box.link.call("history_list")["history"]] == ["true"]
    pid = start(box, argv=["sleep", "600"])
    with box.link.stream("hold", timeout=PATIENCE) as hold:
        facts = hold.first_json()
        assert facts["idle"] is False
        assert [one["pid"] for one in facts["processes"] if one["running"]] == [pid]


def test_asleep_it_has_no_connection_and_comes_when_it_is_woken(called: Box) -> None:
    box = called
    box.text("x=1")
    box.link.call("secrets_set", secrets={"K": "secret-value"})
    box.text("copy=$K")
    pid = start(box, argv=["cat"])
    other = Link(box.dir)
    other.call("hello")
    with box.link.stream("sleep", timeout=PATIENCE) as answer:
        list(answer)
        answer.end()
    assert answer.result["session"]["shell"]["variables"].keys() == {"x"}
    assert sockets(box.process.pid) == []
    with pytest.raises(SandboxDead):
        with other.stream("hello", timeout=0.2):
            pass
    door.wake(box.dir)
    box.link.ready(PATIENCE, lambda: True)
    assert other.call("hello")["version"] == 1
    other.close()
    assert box.text("printf %s $x${K-}${copy-}") == "1"
    box.stdin(pid, b"still here")
    box.link.call("close_stdin", pid=pid)
    assert box.attach(pid).stdout == b"still here"


def test_signals_and_shutdown(box: Box) -> None:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGPIPE):
        box.process.send_signal(number)
    assert box.text("echo alive") == "alive\n"
    pid = start(box, argv=["sleep", "600"])
    box.link.call("shutdown")
    assert box.process.wait(PATIENCE) == 0
    until(lambda: gone(pid), "its children are gone")
    with pytest.raises(SandboxDead):
        box.link.call("hello")


def test_usage_and_reseed(box: Box) -> None:
    told = box.link.call("usage")
    assert told["pids"] >= 1
    assert told["rss_bytes"] > MIB
    assert told["disk_total"] >= told["disk_free"] > 0
    assert box.link.call("reseed", seed="ab" * 32)["urandom"] is True


def test_python_3_8_can_read_every_module() -> None:
    import ast

    from sandkeep.runtime.link import guest_source

    modules = sorted(guest_source().glob("*.py"))
    assert len(modules) > 10
    for module in modules:
        ast.parse(module.read_text(), feature_version=(3, 8))
