"""`sandkeep agent` as a program, and the example."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents_kit import home_at
from sandkeep import Sandbox
from sandkeep.errors import SandkeepError
from sandkeep.model import WORKSPACE
from waiting import until

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    with home_at(tmp_path / "home") as path:
        yield path


def command(home: Path, *words: str) -> tuple[list[str], dict[str, str]]:
    return [sys.executable, "-m", "sandkeep", "agent", *words], {**os.environ, "SANDKEEP_HOME": str(home)}


def sandkeep(home: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    argv, env = command(home, *words)
    return subprocess.run(argv, env={**env, **more}, capture_output=True, text=True, timeout=120, check=False)


def test_run_list_and_log(home: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("from outside\n")
    first = sandkeep(home, "run", "shell", "cat context/notes.md | tee kept; echo $PASS", "--comment", "one",
                     "--context", str(tmp_path / "notes.md"), "--secret", "PASS", PASS="open-sesame")  # fmt: skip
    assert (first.returncode, first.stdout) == (0, "from outside\n[PASS]\n")
    saved = first.stderr.split()[-1]
    again = sandkeep(home, "run", "shell", "cat kept; exit 7", "--from", "latest", "--json")
    done = json.loads(again.stdout)
    assert (again.returncode, done["status"], done["stdout"]) == (7, "failed", "from outside\n")
    assert done["checkpoint"]["parent_id"] == saved
    rows = [line.split("\t") for line in sandkeep(home, "list").stdout.splitlines()]
    assert [(row[0], row[1], row[3]) for row in rows] == [
        (done["checkpoint"]["id"], "shell", "failed"),
        (saved, "shell", "completed"),
    ]
    log = sandkeep(home, "log").stdout
    assert (
        log.index("you: cat context/notes.md")
        < log.index("you: cat kept; exit 7")
        < log.index("! ended with exit code 7")
    )
    steps = json.loads(sandkeep(home, "log", saved, "--json").stdout)
    assert [step["checkpoint"]["comment"] for step in steps] == ["one"]
    assert Sandbox.list(home=home) == []


def test_refusals_have_their_exit_codes(home: Path) -> None:
    assert sandkeep(home, "run", "nobody", "x").returncode == 2
    assert sandkeep(home, "run", "shell", "x", "--from", "latest").returncode == 3
    assert sandkeep(home, "run", "shell", "x", "--secret", "NOT_SET_ANYWHERE").returncode == 2
    assert "claude" in sandkeep(home, "types").stdout


def test_ctrl_c_ends_the_run_and_keeps_it(home: Path) -> None:
    def begun(id: str) -> bool:
        try:
            return Sandbox.attach(id, home=home).files.exists(f"{WORKSPACE}/work")
        except SandkeepError:
            return False  # it is still being made

    def heeding() -> None:
        """Even where the tests were started with Ctrl-C ignored, as shells do in the background."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    argv, env = command(home, "run", "shell", "echo begun > work; sleep 600")
    with subprocess.Popen(
        argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heeding
    ) as program:
        until(lambda: any(begun(one.id) for one in Sandbox.list(home=home)), "the run to begin")
        program.send_signal(signal.SIGINT)
        _, told = program.communicate(timeout=120)
    assert program.returncode != 0
    assert "saved ck_" in told
    assert json.loads(sandkeep(home, "list", "--json").stdout)[0]["metadata"]["agent"]["status"] == "interrupted"
    back = sandkeep(home, "run", "shell", "cat work", "--from", "latest")
    assert back.stdout == "begun\n"


def test_the_example(home: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(ROOT / "examples" / "evolve.py"), str(tmp_path / "store")], capture_output=True,
                          env={**os.environ, "SANDKEEP_HOME": str(home)}, text=True, timeout=120, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "as it first was: Draft v1\nr2 and r3 descend from r1: True\n3 checkpoints\n" in done.stdout
