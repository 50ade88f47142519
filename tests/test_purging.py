"""A home whose folder was removed under living sandboxes, and one that is removed as it should be."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from conftest import Make
from sandkeep import Sandbox
from sandkeep.cli.main import main
from sandkeep.runtime import cgroup
from sandkeep.sandbox.home import Home
from test_killing import process_1
from waiting import until


def said(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, list(words))
    return done.exit_code, done.output


@pytest.mark.parametrize("verb", [["gc"], ["kill", "--all"], ["purge", "--yes"]])
@pytest.mark.parametrize("runtime", ["runc", "runsc"])
def test_what_runs_though_its_home_was_removed_is_ended(
    make: Make, tmp_path: Path, home: Path, runtime: str, verb: list[str]
) -> None:
    lost, kept = Sandbox(home=tmp_path / "lost", runtime=runtime), make()
    lost.commands.run("sleep 600", background=True)
    one, group = process_1(lost), cgroup.name_of(lost.id, lost._held.folder)
    shutil.rmtree(tmp_path / "lost")
    assert one.alive()
    code, told = said(*verb, "--home", str(tmp_path / "lost"))
    assert code == 0, told
    until(lambda: not one.alive(), "its process 1 to end")
    assert cgroup.groups(group) == []
    assert kept.commands.run("echo on").stdout == "on\n"


GC = """
import sys
from sandkeep.sandbox.home import Home
from sandkeep.sandbox.sweeping import gc
home = Home(sys.argv[1])
home.ensure()
print(gc(home).sandboxes)
"""


@pytest.mark.parametrize("apart", [["--mount"], ["--mount", "--pid", "--fork", "--mount-proc"]])
@pytest.mark.parametrize("runtime", ["runc", "runsc"])
def test_what_runs_in_a_home_that_others_do_not_see_goes_on(tmp_path: Path, runtime: str, apart: list[str]) -> None:
    home = tmp_path / "home"
    with Sandbox(home=home, runtime=runtime) as sb:
        covered = 'mount -t tmpfs none "$3" && exec "$1" -c "$2" "$3"'
        argv = ["unshare", *apart, "sh", "-c", covered, "sh", sys.executable, GC, str(home)]
        done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True, timeout=50)
        assert done.stdout == "[]\n"
        assert sb.commands.run("echo on").stdout == "on\n"


def test_what_runs_though_its_home_was_moved_goes_on(tmp_path: Path) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    with Sandbox(home=home, runtime="runc") as sb:
        home.rename(elsewhere)
        assert said("gc", "--home", str(home))[0] == 0
        shutil.rmtree(home)
        elsewhere.rename(home)
        assert sb.commands.run("echo on").stdout == "on\n"


def test_all_are_killed_or_those_that_are_named(make: Make, home: Path) -> None:
    made = [make() for _ in range(3)]
    assert said("kill", "--home", str(home))[0] == 2
    assert said("sandbox", "kill", "--all", made[0].id, "--home", str(home))[0] == 2
    assert said("kill", made[0].id, "sb-000000000000", "--home", str(home))[0] == 3
    assert len(Home(home).ids()) == 3
    assert said("sandbox", "kill", made[0].id, "--home", str(home)) == (0, "")
    assert sorted(Home(home).ids()) == sorted(one.id for one in made[1:])
    assert said("kill", "--all", "--home", str(home)) == (0, "")
    assert Home(home).ids() == []


def test_purge_takes_a_home_and_nothing_else(tmp_path: Path) -> None:
    home = tmp_path / "home"
    for folder in (tmp_path, tmp_path / "nowhere"):
        code, told = said("purge", "--yes", "--home", str(folder))
        assert (code, "no home of Sandkeep's" in told) == (2, True)
    sb = Sandbox(home=home, runtime="runc")
    one = process_1(sb)
    sb.checkpoint()
    assert said("purge", "--home", str(home))[0] == 1  # nobody says yes
    assert one.alive()
    (home / "mine").write_text("x")
    code, told = said("purge", "--yes", "--home", str(home))
    assert (code, f"left: {home / 'mine'}" in told) == (0, True)
    assert not one.alive()
    assert [path.name for path in home.iterdir()] == ["mine"]
    (home / "mine").unlink()
    Sandbox(home=home, runtime="runc")
    assert said("purge", "--yes", "--home", str(home)) == (0, "")
    assert not home.exists()
