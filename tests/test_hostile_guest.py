"""Guests that mean harm at the link: what meets host and guest is the host's own, and all that a guest says is bounded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import hostile_guest
from conftest import Make
from sandkeep import Sandbox
from sandkeep.errors import SandboxDead, SandkeepError
from waiting import until

RUNTIMES = ["runc", "crun", "runsc"]
RUN = "/.sandkeep/run"


def as_root(sb: Sandbox, code: str) -> None:
    """Whatever comes of it."""
    try:
        sb.commands.run(f"( {code} )", user="root", timeout=60)
    except SandkeepError:
        pass


def host_tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_no_sandbox_answers_for_another(make: Make, home: Path, runtime: str) -> None:
    victim, attacker = make(runtime="runc"), make(runtime=runtime)
    victim.files.write("/etc/who", "victim")
    attacker.files.write("/etc/who", "attacker")
    places = [f"../../{victim.id}/{folder}" for folder in ("run", "link")]
    places.append(str(home / "sandboxes" / victim.id / "link"))
    traps = [f"cd {RUN}; rm -rf *; ln -s {place}/guest.sock guest.sock; ln -s {place}/calls calls" for place in places]
    traps += [f"cd {RUN}/..; rm -rf run link; ln -s {place} run; ln -s {place} link" for place in places]
    for trap in traps:
        as_root(attacker, trap)
        assert Sandbox.connect(attacker.id, home=home).files.read("/etc/who") == b"attacker"
    assert victim.files.read("/etc/who") == b"victim"


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_no_folder_of_the_host_is_written_by_a_guest(make: Make, home: Path, tmp_path: Path, runtime: str) -> None:
    sb = make(runtime=runtime)
    folder, target = home / "sandboxes" / sb.id, tmp_path / "made-by-a-guest"
    before = {name: host_tree(folder / name) for name in ("run", "link")}
    as_root(sb, f"cd {RUN}; mkdir wake a; mkfifo f; ln -s {target} wake; echo x > x; touch -d @1 .; chmod 777 .; true")
    as_root(sb, f"mount -o remount,rw {RUN}; umount {RUN}; mkdir {RUN}/b; exec 9<>/proc/1/fd/0; chmod 777 /proc/1/fd/*")
    assert {name: host_tree(folder / name) for name in ("run", "link")} == before
    assert [os.stat(folder / name).st_mode & 0o777 for name in ("run", "link")] == [0o700, 0o700]
    assert sb.commands.run("echo well").stdout == "well\n"


def test_waking_makes_no_file_anywhere(make: Make, tmp_path: Path) -> None:
    sb, target = make(runtime="runsc"), tmp_path / "made-by-a-guest"
    trap = f"while :; do ln -sf {target} {RUN}/wake; ln -sf {target} {RUN}/calls; : > /tmp/set; done"
    sb.commands.run(trap, background=True, user="root")
    until(lambda: sb.files.exists("/tmp/set"), "the trap to be set")
    try:
        assert sb.checkpoint(memory=True).memory
    finally:
        sb.kill()
    assert not os.path.lexists(target)


@pytest.mark.parametrize("runtime", ["runc", "runsc"])
def test_tricks_at_the_link_end_as_errors_and_hurt_nobody(
    make: Make, home: Path, runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile_guest.plant(home)
    other, sb = make(), make(runtime=runtime)
    one = sb._held.driver(sb._held.record()).pid(sb.id, sb._held.folder)
    for trick in [name for name in hostile_guest.TRICKS if name not in (*hostile_guest.FATAL, hostile_guest.LATER)]:
        with monkeypatch.context() as quick, pytest.raises(SandkeepError):
            quick.setattr("sandkeep.runtime.link._sync.link.QUICK", 1.0)
            sb._held.link.call("file_stat", path=f"#trick:{trick}")
            raise AssertionError(trick)
        assert other.commands.run("echo well").stdout == "well\n"
    assert sb._held.link.call("file_stat", path=f"#trick:{hostile_guest.LATER}") == {"entry": {}}
    assert sb.commands.run("echo well").stdout == "well\n"
    sb.kill()
    assert one is not None
    assert not os.path.exists(f"/proc/{one}/root/etc")
    assert other.commands.run("echo well").stdout == "well\n"


@pytest.mark.parametrize("runtime", ["runc", "runsc"])
@pytest.mark.parametrize("trick", hostile_guest.FATAL)
def test_death_in_the_middle_is_told_and_can_be_mended(make: Make, home: Path, runtime: str, trick: str) -> None:
    hostile_guest.plant(home)
    sb = make(runtime=runtime)
    sb.files.write("/etc/kept", "kept")
    saved = sb.snapshot()
    with pytest.raises(SandboxDead):
        sb._held.link.call("file_stat", path=f"#trick:{trick}")
    sb.restore(saved)
    assert sb.files.read("/etc/kept") == b"kept"
