"""What killed processes leave is gone after one gc, secrets first: the home holds what the design names, and nothing else."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import Make
from sandkeep import Sandbox, owned
from sandkeep.model import State
from sandkeep.runtime import cgroup
from sandkeep.sandbox import machine
from sandkeep.sandbox.home import Home, lock
from sandkeep.sandbox.sweeping import gc
from waiting import until

LITTER = Path(__file__).with_name("litter.py")
NAMED = [
    "sandboxes/*/record.json",
    "sandboxes/*/lock",
    "sandboxes/*/workflow.json",
    "sandboxes/*/.workflow.json.lock",
    "sandboxes/*/tops/*",
    "sandboxes/*/cursor-ly_*",
    "sandboxes/*/snapshots/sn_*.json",
    "sandboxes/*/link/guest.sock",
    "sandboxes/*/link/calls",
    "sandboxes/*/run/numbers",
    "sandboxes/*/numbers",
    "sandboxes/*/asleep.json",
    "sandboxes/*/bundle/config.json",
    "sandboxes/*/bundle/process",
    "sandboxes/*/bundle/boot_id",
    "sandboxes/*/root",
    "sandboxes/*/runtime/*",
    "sandboxes/*/log/console",
    "layers/*/tree",
    "layers/*/of.json",
    "known/*/ck_*.json",
    "bases/.lock",
    "bases/host-*",
    "guest/*",
    "store/*",
    "cache/*",
    "layers.lock",
    "squash.lock",
    "runtimes.json",
]
WHOLE = (
    "sandboxes/*/tops/*",
    "layers/*/tree",
    "bases/host-*",
    "guest/*",
    "store/*",
    "cache/*",
    "sandboxes/*/runtime/*",
)


def entries(home: Path) -> list[str]:
    """Every file and empty folder, but not below what is a tree of others' making."""
    found = []
    for at, folders, files in os.walk(home):
        here = Path(at).relative_to(home)
        if any(fnmatch.fnmatchcase(str(here), name) for name in WHOLE):
            folders.clear()
            found.append(str(here))
        elif not folders and not files:
            found.append(f"{here}/")
        found += [str(here / name) for name in files]
    return sorted(found)


def strange(home: Path) -> list[str]:
    empty = (
        "sandboxes/",
        "trash/",
        "layers/",
        "known/*/",
        "known/",
        "sandboxes/*/snapshots/",
        "sandboxes/*/root/",
        "cache/",
    )
    names = [*NAMED, *empty]
    found = [name for name in entries(home) if not any(fnmatch.fnmatchcase(name, pattern) for pattern in names)]
    return found + [name for name in entries(home) if name.startswith(("cache/carry-", "cache/extract-", "guest/."))]


@pytest.mark.parametrize("runtime", ["runc", "runsc"])
def test_kills_at_any_instant_leave_nothing(make: Make, home: Path, tmp_path: Path, runtime: str) -> None:
    beside = tmp_path / "beside"
    beside.mkdir()
    sb = make(runtime=runtime)
    sb.commands.run("head -c 3000000 /dev/urandom > f; mkfifo /tmp/p", user="root")
    sb.commands.run("while :; do date > /tmp/now; sleep 0.05; done", background=True)
    argv = [sys.executable, str(LITTER), str(home), str(beside), runtime, sb.id, "13", "15"]
    subprocess.run(argv, check=True, timeout=300)
    gc(Home(home))
    asleep = machine.Machine(Home(home), sb.id).record().state is State.PAUSED
    kept = f"sandboxes/{sb.id}/image/" if asleep else "nothing"  # until it wakes

    def left() -> list[str]:
        return [name for name in strange(home) if not name.startswith(kept)]

    until(lambda: not left(), f"what is not in the design to go: {left()}")
    assert set(os.listdir(beside)) <= {"state"}
    Sandbox.connect(sb.id, home=home)
    alive = {cgroup.name_of(id, home / "sandboxes" / id) for id in Home(home).ids()}
    assert {name for id in Home(home).ids() for name in cgroup.names() if id in name} <= alive
    again = gc(Home(home))
    assert (again.sandboxes, again.leftovers) == ([], [])


def test_each_kind_goes_and_what_has_an_owner_stays(make: Make, home: Path, tmp_path: Path) -> None:
    sb = make()
    sb.checkpoint()
    own = sb._held.folder
    [store] = (home / "known").iterdir()
    folders = [
        "cache/carry-1",
        "cache/extract-1",
        "guest/.making-1",
        "bases/.making-1",
        ".probe-1",
        f"sandboxes/{sb.id}/image",
    ]
    files = [f"sandboxes/{sb.id}/.record.json.12", f"sandboxes/{sb.id}/.journal.json.12", f"sandboxes/{sb.id}/.cursor-ly_1.12",
             f"sandboxes/{sb.id}/cursor-ly_1", f"known/{store.name}/.ck_1.json.12", "sandboxes/sb-000000000000/.record.json.12",
             "sandboxes/sb-000000000000/lock", "sandboxes/sb-111111111111/lock"]  # fmt: skip
    for name in folders:
        (home / name).mkdir(parents=True)
        (home / name / "secret").touch()
    for name in files:
        (home / name).parent.mkdir(exist_ok=True)
        (home / name).touch()
    with owned.folder("carry-", home / "cache") as mine, lock(own / "lock"):
        swept = gc(Home(home))
        assert (own / "image").exists()
        assert mine.exists()
        assert not any(
            (home / name).exists() for name in (*folders[:-1], *files[4:]) if not name.startswith(f"sandboxes/{sb.id}")
        )
        assert len(swept.leftovers) == 6
        assert swept.sandboxes == ["sb-000000000000", "sb-111111111111"]
    swept = gc(Home(home))
    assert not any((home / name).exists() for name in (*folders, *files))
    assert sorted(swept.leftovers) == sorted(files[:4])
    assert Home(home).ids() == [sb.id]
    assert os.listdir(home / "trash") == []
    assert gc(Home(home)).leftovers == []


def test_the_memory_of_a_sandbox_does_not_wait_for_gc(sb: Sandbox) -> None:
    (sb._held.folder / "image").mkdir()
    sb.snapshot()
    assert not (sb._held.folder / "image").exists()


def test_a_sandbox_whose_folder_is_swept_before_it_is_locked_is_made_all_the_same(
    make: Make, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make().kill()
    swept: list[str] = []

    @contextlib.contextmanager
    def slow(path: Path, **how: Any) -> Iterator[None]:
        if not swept:
            swept.append(path.parent.name)
            gc(Home(home))
        with lock(path, **how):
            yield

    monkeypatch.setattr(machine, "lock", slow)
    sb = make()
    assert swept == [sb.id]
    assert sb.commands.run("echo on").stdout == "on\n"


def test_an_export_that_is_killed_leaves_no_file_beside_its_target(root: Path) -> None:
    code = "import os, sys; from pathlib import Path; from sandkeep.owned import whole\n"
    code += "with whole(Path(sys.argv[1])) as file: file.write(b'x' * 100); file.flush(); print(flush=True); sys.stdin.read()"
    for _ in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", code, str(root / "x")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as child:
            assert child.stdout is not None
            child.stdout.readline()
            child.kill()
        (root / ".x.12345678.partial").touch()  # as where a file can't be without a name
    with owned.whole(root / "x") as file:
        file.write(b"whole")
    assert [(path.name, path.read_bytes()) for path in root.iterdir()] == [("x", b"whole")]
