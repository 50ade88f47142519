"""The command line as a user or a script meets it."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest


def run(home: Path, *words: str, stdin: str | None = None, check: int | None = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "sandkeep", *words], capture_output=True, text=True, timeout=170, input=stdin,
        env={**os.environ, "SANDKEEP_HOME": str(home)},
    )  # fmt: skip
    if check is not None:
        assert done.returncode == check, done.stdout + done.stderr
    return done


def test_a_day_on_the_command_line(home: Path, tmp_path: Path) -> None:
    id = run(home, "sandbox", "create", "--runtime", "runc", "--env", "A=1", "--memory", "512m").stdout.strip()
    assert run(home, "sandbox", "exec", id, "echo $A; exit 4", check=4).stdout == "1\n"
    assert run(home, "sandbox", "exec", id, "cat > f", stdin="from stdin").returncode == 0
    told = json.loads(run(home, "sandbox", "exec", "--json", id, "cat f").stdout)
    assert (told["stdout"], told["exit_code"]) == ("from stdin", 0)
    snapshot = run(home, "sandbox", "snapshot", id, "--comment", "c").stdout.strip()
    run(home, "sandbox", "exec", id, "rm f")
    run(home, "sandbox", "restore", id, snapshot)
    assert json.loads(run(home, "sandbox", "snapshots", id, "--json").stdout)[0]["comment"] == "c"
    fork = run(home, "sandbox", "fork", id).stdout.strip()
    listed = json.loads(run(home, "sandbox", "list", "--json").stdout)
    assert {one["id"] for one in listed} == {id, fork}
    assert json.loads(run(home, "sandbox", "info", fork, "--json").stdout)["forked_from"] == id
    one = run(home, "checkpoint", "create", id, "--comment", "first", "--tag", "t").stdout.strip()
    run(home, "sandbox", "exec", id, "echo more >> f; echo g > g")
    two = json.loads(run(home, "checkpoint", "create", id, "--json").stdout)["id"]
    assert [c["id"] for c in json.loads(run(home, "checkpoint", "list", "--json").stdout)] == [two, one]
    assert "first" in run(home, "checkpoint", "list", "--tag", "t").stdout
    assert one in run(home, "checkpoint", "tree").stdout
    assert json.loads(run(home, "checkpoint", "show", two, "--json").stdout)["lineage"] == [two, one]
    assert "g" in run(home, "checkpoint", "diff", one, two, "--no-times").stdout
    assert run(home, "checkpoint", "cat", one, "/home/user/workspace/f").stdout == "from stdin"
    assert "workspace/g" in run(home, "checkpoint", "find", two, "**/g").stdout
    assert "f" in run(home, "checkpoint", "ls", two, "/home/user/workspace").stdout
    run(home, "checkpoint", "extract", two, str(tmp_path / "out"), "--glob", "**/g")
    assert [path.read_text() for path in (tmp_path / "out").rglob("g")] == ["g\n"]
    run(home, "checkpoint", "name", "stable", one)
    assert run(home, "checkpoint", "name", "stable").stdout.strip() == one
    again = json.loads(run(home, "checkpoint", "restore", "stable", "--runtime", "runc", "--json").stdout)
    assert run(home, "sandbox", "exec", again["id"], "cat f").stdout == "from stdin"
    run(home, "checkpoint", "export", two, str(tmp_path / "file"))
    assert run(home, "checkpoint", "import", str(tmp_path / "file"), "--store", str(tmp_path / "other")).stdout.strip() == two
    assert run(home, "checkpoint", "verify", "--store", str(tmp_path / "other")).stdout == "all is well\n"
    assert two in run(home, "checkpoint", "forget", "--keep-last", "1", "--dry-run", "--json").stdout or True
    run(home, "checkpoint", "forget", "--keep-last", "1")
    run(home, "store", "gc")
    assert json.loads(run(home, "store", "info", "--json").stdout)["checkpoints"] == 2
    run(home, "sandbox", "pause", fork)
    assert json.loads(run(home, "sandbox", "resume", fork, "--json").stdout)["level"] == "files"
    run(home, "sandbox", "kill", id, fork, again["id"])
    assert json.loads(run(home, "sandbox", "list", "--json").stdout) == []
    run(home, "gc", "--cache")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("sandbox", "info", "sb-000000000000"), 3),
        (("sandbox", "info", "nonsense"), 2),
        (("checkpoint", "show", "nothing"), 3),
        (("sandbox", "create", "--memory", "much"), 2),
        (("sandbox", "nonsense"), 2),
        (("checkpoint", "list", "--store", "s3://no-such-bucket-anywhere/x", "--endpoint", "http://127.0.0.1:9"), 1),
    ],
)
def test_errors_have_codes_and_words(home: Path, words: tuple[str, ...], code: int) -> None:
    done = run(home, *words, check=None)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr


def test_doctor_and_demo(home: Path) -> None:
    told = json.loads(run(home, "doctor", "--json").stdout)
    assert {one["name"]: one["healthy"] for one in told["runtimes"]}["runc"]
    shown = run(home, "demo", "--runtime", "runc").stdout
    assert "nothing was lost" in shown


def test_the_interactive_shell(home: Path) -> None:
    id = run(home, "sandbox", "create", "--runtime", "runc").stdout.strip()
    child, terminal = pty.fork()
    if child == 0:
        os.execve(sys.executable, [sys.executable, "-m", "sandkeep", "sandbox", "shell", id], {**os.environ, "SANDKEEP_HOME": str(home)})
    seen, sent, deadline = b"", False, time.monotonic() + 120
    while time.monotonic() < deadline:
        ready, _, _ = select.select([terminal], [], [], 1)
        if ready:
            try:
                data = os.read(terminal, 4096)
            except OSError:
                break
            if not data:
                break
            seen += data
            if not sent:
                os.write(terminal, b"echo $((40+2)) && tty && exit 6\n")
                sent = True
    os.close(terminal)
    _, status = os.waitpid(child, 0)
    assert b"42" in seen
    assert b"/dev/pts/" in seen
    assert os.waitstatus_to_exitcode(status) == 6
