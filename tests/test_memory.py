"""Sleep and wake with memory, on runsc: processes, pipes, terminals and counters go on; elsewhere too; through crashes."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import Make
from sandkeep import Sandbox, Store
from sandkeep.checkpoints.unpack import unpack_attachment
from sandkeep.errors import BadArgument, FloorNotReached, RuntimeFailed, SandboxPaused
from sandkeep.model import Mount, State
from sandkeep.sandbox.home import Home
from sandkeep.sandbox.machine import Machine
from test_crash import crash, steps
from waiting import until

COUNT = "i=0; while :; do i=$((i+1)); echo $i >> ~/count; sleep 0.05; done"

SERVER = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    count = 0
    log = open("/tmp/log", "w")
    def do_GET(self):
        Handler.count += 1
        print(Handler.count, file=Handler.log, flush=True)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"count %d" % Handler.count)
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", 8123), Handler).serve_forever()
"""
GET = "exec 9<>/dev/tcp/127.0.0.1/8123 && printf 'GET / HTTP/1.0\\r\\n\\r\\n' >&9 && tail -n 1 <&9; exec 9>&-"

RESUMER = """
import json, sys
from sandkeep import Sandbox
sb = Sandbox.connect(sys.argv[1], home=sys.argv[2])
print(json.dumps({"level": sb.restore_report.level, "why": sb.restore_report.why, "ran": sb.commands.run("echo hi").stdout}))
"""


@pytest.fixture
def box(make: Make) -> Sandbox:
    return make(runtime="runsc")


def counted(sb: Sandbox) -> list[int]:
    """What the counter wrote; each number once and in order."""
    found = [int(line) for line in sb.commands.run("cat ~/count 2>/dev/null").stdout.splitlines()]
    assert found == list(range(1, len(found) + 1))
    return found


def goes_on(sb: Sandbox) -> None:
    before = len(counted(sb))
    until(lambda: len(counted(sb)) > before, "the counter to go on")


class Life:
    """A server, an interpreter, a sleeper, a pipe and a terminal, all in one sandbox."""

    def __init__(self, sb: Sandbox) -> None:
        sb.files.write("/tmp/server.py", SERVER)
        sb.commands.run("python3 /tmp/server.py", background=True)
        self.repl = sb.commands.run("python3 -iqu 2>/dev/null", background=True)
        self.repl.send_stdin("x = 41\nprint('ready')\n")
        self.sleeper = sb.commands.run("sleep 100000", background=True)
        sb.commands.run(
            f"({COUNT.replace('>> ~/count', '')}) | while read n; do echo $n >> ~/count; done", background=True
        )
        self.terminal = sb.pty.start()
        self.terminal.send("A=5; echo begun-$((A-1))\n")
        until(lambda: 8123 in sb.ports(), "the server")
        until(lambda: len(counted(sb)) > 2, "the pipe")
        until(lambda: "begun-4" in self.text(sb, self.terminal.pid), "the terminal")
        until(lambda: "ready" in self.text(sb, self.repl.pid), "the interpreter")
        assert [sb.commands.run(GET).stdout for _ in range(2)] == ["count 1", "count 2"]
        self.pids = {one.pid for one in sb.commands.list()}

    @staticmethod
    def text(sb: Sandbox, pid: int) -> str:
        """What it has written so far."""
        wanted = sb._held.link.call("process", pid=pid)["positions"]["stdout"]["end"]
        found = b""
        for kind, data in sb.commands.connect(pid).output() if wanted else []:
            found += data if kind == "stdout" else b""
            if len(found) >= wanted:
                break
        return found.decode()

    def check(self, sb: Sandbox, visit: int) -> None:
        assert sb.commands.run(GET).stdout == f"count {visit}"
        assert sb.commands.run("cat /tmp/log").stdout.split() == [str(n + 1) for n in range(visit)]
        assert {one.pid for one in sb.commands.list() if one.running} == self.pids
        repl, terminal = sb.commands.connect(self.repl.pid), sb.pty.connect(self.terminal.pid)
        repl.send_stdin(f"print('seen', x + {visit})\n")
        until(lambda: f"seen {41 + visit}\n" in self.text(sb, repl.pid), "the interpreter's variables")
        assert self.text(sb, repl.pid).startswith("ready")
        terminal.send(f"echo still-$((A+{visit}))\n")
        until(lambda: f"still-{5 + visit}" in self.text(sb, terminal.pid), "the terminal's shell")
        goes_on(sb)


@pytest.mark.timeout(600)
def test_everything_goes_on_in_another_process_and_in_another_home(box: Sandbox, home: Path, tmp_path: Path) -> None:
    life = Life(box)
    paused = box.pause("asleep")
    assert paused.memory
    assert box.info().state is State.PAUSED
    assert not box._held.alive(box._held.record())
    with pytest.raises(SandboxPaused):
        box.snapshot()
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(home / "store", elsewhere / "store")

    told = subprocess.run(
        [sys.executable, "-c", RESUMER, box.id, str(home)], capture_output=True, text=True, timeout=170
    )
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout) == {"level": "memory", "why": "", "ran": "hi\n"}
    life.check(box, 3)
    box.kill()

    with Sandbox(home=elsewhere, from_checkpoint=paused.id, require="memory") as other:
        assert other.restore_report is not None
        assert other.restore_report.level == "memory"
        assert other.id != box.id
        life.check(other, 3)


def cycles(sb: Sandbox, count: int) -> None:
    sb.commands.run(COUNT, background=True)
    pid = sb.commands.list()[0].pid
    for _ in range(count):
        sb.pause()
        assert sb.resume(require="memory").level == "memory"
        goes_on(sb)
        assert [one.pid for one in sb.commands.list() if one.running] == [pid]


@pytest.mark.timeout(900)
def test_fifty_times(box: Sandbox) -> None:
    cycles(box, 50)
    assert len(list((box._held.folder / "tops").iterdir())) == 1


def test_the_second_sleep_of_an_idle_sandbox_adds_little(box: Sandbox) -> None:
    hold = "import os, time; held = os.urandom(24 << 20); open('/tmp/there', 'w'); time.sleep(100000)"
    box.commands.run(f'python3 -c "{hold}"', background=True)
    until(lambda: box.commands.run("test -e /tmp/there").exit_code == 0, "the process")
    first = box.pause().new_bytes
    box.resume(require="memory")
    box.commands.run("echo a little > ~/note")
    second = box.pause().new_bytes
    assert first > 24 << 20
    assert second <= first / 10


def test_an_image_that_has_changed_since_is_fetched_again(box: Sandbox) -> None:
    box.commands.run(COUNT, background=True)
    until(lambda: len(counted(box)) > 2, "the counter")
    box.pause()
    for file in (box._held.folder / "image").iterdir():
        file.write_bytes(bytes(file.stat().st_size))
    assert box.resume(require="memory").level == "memory"
    goes_on(box)


def test_a_checkpoint_with_memory_can_be_gone_back_to(box: Sandbox) -> None:
    box.commands.run(COUNT, background=True)
    until(lambda: len(counted(box)) > 2, "the counter")
    saved = box.checkpoint("with memory", memory=True)
    assert saved.memory
    late = len(counted(box)) + 20
    until(lambda: len(counted(box)) > late, "the counter to go on")
    box.commands.run("echo gone > ~/later", env={"B": "1"})
    report = box.restore(saved, require="memory")
    assert report.level == "memory"
    assert COUNT in report.why
    assert box.commands.run("test -e ~/later").exit_code == 1
    assert len(counted(box)) < late
    goes_on(box)
    assert box.checkpoint().parent_id == saved.id


def test_live_forks_are_independent(box: Sandbox) -> None:
    box.commands.run(COUNT, background=True)
    box.workflow.set_state("step", 3)
    until(lambda: len(counted(box)) > 2, "the counter")
    forks = box.fork(2, memory=True)
    for fork in forks:
        assert isinstance(fork, Sandbox)
        assert fork.workflow.get_state("step") == 3
        goes_on(fork)
    one, two = forks
    assert isinstance(one, Sandbox)
    assert isinstance(two, Sandbox)
    draw = "head -c 16 /dev/urandom | od -An -tx1"
    assert len({sb.commands.run(draw).stdout for sb in (box, one, two)}) == 3
    one.commands.run("echo one > ~/mine")
    assert two.commands.run("test -e ~/mine").exit_code == 1
    one.kill()
    goes_on(two)
    goes_on(box)


def test_an_image_that_does_not_fit_is_refused_or_said(box: Sandbox, home: Path, tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    box.commands.run(COUNT, background=True)
    until(lambda: len(counted(box)) > 2, "the counter")
    saved = box.pause()
    before = Sandbox.list(home=home)
    mount = Mount(str(tmp_path), "/mnt")
    with pytest.raises(FloorNotReached, match=r"mounts.*/mnt"):
        make(runtime="runsc", from_checkpoint=saved.id, require="memory", mounts=[mount])
    with pytest.raises(FloorNotReached, match="runc can't restore memory"):
        make(runtime="runc", from_checkpoint=saved.id, require="memory")
    assert Sandbox.list(home=home) == before

    less = make(runtime="runc", from_checkpoint=saved.id)
    assert less.restore_report is not None
    assert less.restore_report.level == "relaunched"
    assert less.restore_report.relaunched == [COUNT]
    assert "runc can't restore memory" in less.restore_report.why

    other = tmp_path / "bin"
    other.mkdir()
    real = shutil.which("runsc")
    (other / "runsc").write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo runsc version other && exit\nexec {real} "$@"\n'
    )
    (other / "runsc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{other}:{os.environ['PATH']}")
    with pytest.raises(FloorNotReached, match=r"version.*other"):
        box.resume(require="memory")
    assert box.info().state is State.PAUSED
    report = box.resume(require="relaunched")
    assert (report.level, report.relaunched) == ("relaunched", [COUNT])
    assert "runsc version other" in report.why


def test_a_runtime_that_refuses_the_image(box: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    box.commands.run(COUNT, background=True)
    box.commands.run("export A=1; echo first > ~/f")
    saved = box.checkpoint(memory=True)
    box.commands.run("export A=2; echo second > ~/f")
    box.workflow.set_state("n", 2)
    stub = tmp_path / "bin"
    stub.mkdir()
    real = shutil.which("runsc")
    (stub / "runsc").write_text(
        f'#!/bin/sh\ncase " $* " in *" restore "*) echo no room; exit 1;; esac\nexec {real} "$@"\n'
    )
    (stub / "runsc").chmod(0o755)
    with monkeypatch.context() as patched:
        patched.setenv("PATH", f"{stub}:{os.environ['PATH']}")
        with pytest.raises(FloorNotReached, match="no room"):
            box.restore(saved, require="memory")
        assert box.commands.run("echo $A; cat ~/f").stdout == "2\nsecond\n"
        assert box.workflow.state == {"n": 2}
        box.pause()
        with pytest.raises(FloorNotReached, match="no room"):
            box.resume(require="memory")
        assert settled(box._home.path, box.id) is State.PAUSED
        with pytest.raises(FloorNotReached, match="no room"):
            box.restore(saved, require="memory")
        assert settled(box._home.path, box.id) is State.PAUSED
    report = box.restore(saved)
    assert report.level == "memory"
    assert settled(box._home.path, box.id) is State.RUNNING
    assert box.commands.run("echo $A; cat ~/f").stdout == "1\nfirst\n"
    goes_on(box)


def test_without_memory_processes_start_again(make: Make) -> None:
    for runtime, options in (("runc", {}), ("runsc", {"memory": False})):
        sb = make(runtime=runtime)
        sb.files.write("/tmp/server.py", SERVER)
        sb.commands.run("python3 /tmp/server.py", background=True)
        until(lambda: 8123 in sb.ports(), "the server")  # noqa: B023
        sb.pty.start()
        sb.commands.run("export KEPT=yes; cd /tmp")
        assert not sb.pause(**options).memory
        assert sb.info().state is State.PAUSED
        with pytest.raises(FloorNotReached):
            sb.resume(require="memory")
        with pytest.raises(FloorNotReached):
            sb.resume(require="relaunched")
        assert sb.info().state is State.PAUSED
        report = sb.resume()
        assert report.level == "relaunched"
        assert report.relaunched == ["python3 /tmp/server.py"]
        assert len(report.lost) == 1
        assert "memory" in report.why
        assert 8123 in sb.ports()
        assert sb.commands.run("echo $KEPT $PWD").stdout == "yes /tmp\n"
        sb.kill()


def test_secrets_are_not_in_the_store_and_are_bound_anew(make: Make, home: Path, tmp_path: Path) -> None:
    secret = "hush-4711-never-to-be-kept"
    sb = make(runtime="runsc", secrets={"API_KEY": secret})
    for _ in range(3):
        assert sb.commands.run("echo $API_KEY; export COPY=$API_KEY").stdout.strip() == secret
    sb.commands.run("unset COPY; cd /tmp")
    saved = sb.pause()
    with Store(home=home) as store:
        unpack_attachment(store.repo, saved.id, "memory", tmp_path / "image")
        assert secret not in json.dumps([store.session(saved.id), store.get(saved.id).metadata])
    for place in (tmp_path / "image", sb._held.folder):
        for path in place.rglob("*"):
            assert not path.is_file() or secret.encode() not in path.read_bytes(), path
    sb.resume(secrets={"API_KEY": "another"})
    assert sb.commands.run("echo $API_KEY").stdout == "another\n"


def test_secrets_stay_through_a_checkpoint_and_a_failed_pause(make: Make) -> None:
    sb = make(runtime="runsc", secrets={"API_KEY": "k"})
    sb.checkpoint(memory=True)
    assert sb.commands.run("echo $API_KEY").stdout == "k\n"
    holder = "import tempfile, time; f = tempfile.TemporaryFile(); open('/tmp/there', 'w'); time.sleep(100000)"
    sb.commands.run(f'python3 -c "{holder}"', background=True)
    until(lambda: sb.commands.run("test -e /tmp/there").exit_code == 0, "the process")
    with pytest.raises(RuntimeFailed, match="holds the deleted file"):
        sb.pause()
    assert sb.info().state is State.RUNNING
    assert sb.commands.run("echo $API_KEY").stdout == "k\n"
    assert len([one for one in sb.commands.list() if one.running]) == 1


def test_clocks_are_right_after_waking(box: Sandbox) -> None:
    clocks = "import time\nwhile True: print(time.time(), time.monotonic(), flush=True); time.sleep(0.05)"
    box.files.write("/tmp/clocks.py", clocks)
    pid = box.commands.run("python3 /tmp/clocks.py > ~/clocks", background=True).pid

    def lines() -> list[list[float]]:
        return [[float(word) for word in line.split()] for line in box.commands.run("cat ~/clocks").stdout.splitlines()]

    until(lambda: len(lines()) > 2, "the clocks")
    box.pause()
    asleep, begun = time.time(), time.monotonic()
    until(lambda: time.monotonic() > begun + 2, "two seconds to pass")
    woken = time.time()
    box.resume(require="memory")
    before = len([line for line in lines() if line[0] < asleep])
    until(lambda: lines()[-1][0] > woken, "the clock to show the present")
    found = lines()
    assert not [line for line in found[before + 1 :] if line[0] < woken - 1]
    assert found[-1][0] < time.time() + 1
    assert all(a[1] <= b[1] for a, b in itertools.pairwise(found))
    assert box.commands.connect(pid).info().running


def test_each_copy_has_a_name_and_numbers_of_its_own(box: Sandbox, make: Make) -> None:
    box.commands.run("echo x > ~/f")
    saved = box.checkpoint(memory=True)
    copies = [
        box,
        box.fork(),
        box.fork(memory=True),
        make(runtime="runsc", from_checkpoint=saved.id),
        make(from_checkpoint=saved.id),
    ]
    assert len({sb.commands.run("cat /etc/machine-id").stdout for sb in copies}) == len(copies)
    assert len({sb.commands.run("head -c 16 /dev/urandom | od -An -tx1").stdout for sb in copies}) == len(copies)
    names = [sb.commands.run("hostname").stdout.strip() for sb in copies]
    assert names[0] == names[2] == names[3] == box.id  # processes from memory know it
    assert (names[1], names[4]) == (copies[1].id, copies[4].id)
    assert [sb.usage()["memory_bytes"] > 0 for sb in copies] == [True] * len(copies)


def test_create_from_memory_takes_what_the_caller_adds(box: Sandbox, make: Make) -> None:
    box.commands.run("export KEPT=yes")
    box.commands.run(COUNT, background=True)
    box.workflow.set_state("n", 1)
    until(lambda: len(counted(box)) > 2, "the counter")
    saved = box.pause()
    again = make(runtime="auto", from_checkpoint=saved.id, env={"MORE": "1"}, cwd="/tmp", secrets={"KEY": "k"})
    assert again.restore_report is not None
    assert again.restore_report.level == "memory"
    assert again.commands.run("echo $KEPT $MORE $KEY $PWD").stdout == "yes 1 k /tmp\n"
    assert again.workflow.state == {"n": 1}
    goes_on(again)
    assert again.checkpoint().parent_id == saved.id


def test_with_the_hosts_network_memory_is_refused_by_name(make: Make) -> None:
    sb = make(runtime="runsc", network="host")
    sb.commands.run("sleep 100000", background=True)
    for refused in (lambda: sb.pause(memory=True), lambda: sb.checkpoint(memory=True), lambda: sb.fork(memory=True)):
        with pytest.raises(BadArgument, match="network"):
            refused()
    assert not sb.pause().memory
    assert sb.resume().relaunched == ["sleep 100000"]


def test_bad_words_change_nothing(make: Make, box: Sandbox) -> None:
    with pytest.raises(BadArgument):
        box.resume(require="everything")  # type: ignore[arg-type]
    with pytest.raises(BadArgument):
        make().checkpoint(memory=True)
    with pytest.raises(BadArgument):
        make().fork(memory=True)
    assert box.resume().why == "it was not paused"


def settled(home: Path, id: str) -> State:
    """What is left of an operation after its process died: running or paused, never both, never neither."""
    machine = Machine(Home(home), id)
    with machine.held() as record:
        assert record.state in (State.RUNNING, State.PAUSED)
        assert machine.alive(record) == (record.state is State.RUNNING)
        return record.state


@pytest.mark.timeout(600)
@pytest.mark.parametrize("operation", ["pause", "resume"])
def test_dying_at_every_step_of_sleep(box: Sandbox, home: Path, operation: str) -> None:
    box.commands.run(COUNT, background=True)
    pid = box.commands.list()[0].pid
    until(lambda: len(counted(box)) > 2, "the counter")
    found = set()
    for at in steps():
        if operation == "resume":
            box.pause()
        died = crash(home, operation, at, box.id)
        found.add(settled(home, box.id))
        again = Sandbox.connect(box.id, home=home)
        assert again.restore_report is None or again.restore_report.level == "memory"
        assert [one.pid for one in again.commands.list() if one.running] == [pid]
        goes_on(again)
        if died is None:
            assert found == {State.RUNNING, State.PAUSED}
            return
    pytest.fail("it never ended")


@pytest.mark.timeout(600)
def test_dying_at_every_step_of_a_restore(box: Sandbox, home: Path) -> None:
    box.commands.run(COUNT, background=True)
    pid = box.commands.list()[0].pid
    until(lambda: len(counted(box)) > 2, "the counter")
    saved = box.checkpoint(memory=True)
    for at in steps():
        box.commands.run("echo new > ~/new")
        died = crash(home, "restore-checkpoint", at, box.id, saved.id)
        assert settled(home, box.id) is State.RUNNING
        again = Sandbox.connect(box.id, home=home)
        assert [one.pid for one in again.commands.list() if one.running] == [pid]
        goes_on(again)
        if died is None:
            assert again.commands.run("test -e ~/new").exit_code == 1
            return
    pytest.fail("it never ended")
