"""Guests that mean harm: the host stays well, sees nothing it should not give, and says what happened."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import threading
from pathlib import Path

import pytest

from conftest import Make
from guest_box import record
from sandkeep import Limits, Sandbox
from sandkeep.errors import GuestLied, SandboxDead, SandkeepError
from sandkeep.model import WORKSPACE
from sandkeep.runtime.link import Link, door
from waiting import until


def test_symlinks_and_dots_lead_nowhere(sb: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "host-secret"
    secret.write_text("the host's")
    sb.commands.run(f"ln -s {secret} out; ln -s / root; mkdir d; ln -s ../../../../../../../../../.. d/up")
    for path in ("out", f"d/up{secret}", f"root{secret}", f"../../../../../../..{secret}"):
        with pytest.raises(SandkeepError):
            sb.files.read(f"{WORKSPACE}/{path}")
    sb.files.write(f"{WORKSPACE}/root/etc/written", "x")
    assert not Path("/etc/written").exists()
    assert sb.files.read("/etc/written") == b"x"


def test_layers_with_evil_links_are_kept_as_links(sb: Sandbox, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("safe")
    sb.commands.run(f"rm -rf /home/user/workspace/*; ln -s {victim} /home/user/evil; mkdir /tmp/evil")
    sb.commands.run("sleep 1000", background=True)
    sb.snapshot()
    sb.commands.run(f"rm -rf /tmp/evil; ln -s {victim} /tmp/evil")
    saved = sb.snapshot()
    kept = sb.checkpoint()
    sb.restore(saved)
    sb.restore(kept.id)
    sb.kill()
    assert [path.name for path in victim.iterdir()] == ["file"]
    assert (victim / "file").read_text() == "safe"


def test_what_is_not_seen_from_inside(sb: Sandbox, tmp_path: Path) -> None:
    script = (
        "ls / | tr '\\n' ' '; ls /home; ps ax | wc -l; ip -o addr 2>/dev/null | grep -v ' lo ' | wc -l; "
        "cat /proc/1/environ | tr '\\0' '\\n' | grep -c -i secret; ls /sys/kernel/debug 2>/dev/null | wc -l; mount | grep -c ' / '"
    )
    seen = sb.commands.run(script, user="root").stdout
    for name in ("work", "lost+found", "mnt/sandboxing"):
        assert name not in seen.split()
    assert "user" in seen
    assert not sb.files.exists(str(tmp_path))
    assert (
        sb.commands.run("ls /root/.ssh /root/.claude /var/lib/postgresql 2>/dev/null | wc -l", user="root").stdout
        == "0\n"
    )
    other = Sandbox(home=sb._home.path, runtime="runc")
    other.commands.run("exec -a marker-of-the-other sleep 1000", background=True)
    assert "marker-of-the-other" not in sb.commands.run("ps axww", user="root").stdout


@pytest.mark.parametrize("attempt", ["mknod /tmp/sda b 8 0 && cat /tmp/sda", "mount -t tmpfs none /mnt", "unshare -m true", "echo 1 > /proc/sys/kernel/panic",
                                     "echo c > /proc/sysrq-trigger", "chroot /proc/1/root/../..", "dmesg | grep . ", "swapoff -a && false"])  # fmt: skip
def test_root_inside_is_not_root_outside(sb: Sandbox, attempt: str) -> None:
    assert sb.commands.run(attempt, user="root", timeout=60).exit_code != 0


def test_a_fork_bomb_is_bounded(make: Make) -> None:
    sb = make(limits=Limits(pids=80))
    sb.commands.run("bomb() { bomb | bomb & }; bomb; sleep 1", timeout=20)

    def alive() -> bool:
        try:
            sb._held.link.call("kill_all")
            return sb.commands.run("echo alive", timeout=30).stdout == "alive\n"
        except SandkeepError:
            return False

    until(alive, "it to come back")
    sb.kill()


def test_setuid_files_made_inside_mean_nothing_outside(sb: Sandbox) -> None:
    sb.commands.run("cp /bin/bash /tmp/rootbash; chmod 4755 /tmp/rootbash", user="root")
    saved = sb.snapshot()
    assert (sb._home.layers.tree(saved.layers[0]) / "tmp/rootbash").stat().st_mode & 0o4000
    for folder in (sb._home.path, sb._home.layers.folder, sb._home.sandboxes, sb._home.trash):
        assert folder.stat().st_mode & 0o077 == 0


class Liar:
    """A stand-in for a guest that has been taken over: speaks the socket, not the truth."""

    def __init__(self, dir: Path, speech: bytes) -> None:
        self._socket = socket.socket(fileno=door.make(dir, calls=False))
        record(dir, os.getpid())
        self._socket.listen()
        self._speech = speech
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            client, _ = self._socket.accept()
        except OSError:
            return
        with client:
            client.recv(1 << 16)
            try:
                client.sendall(self._speech)
                client.settimeout(60)
                while client.recv(1 << 16):
                    pass
            except OSError:
                pass

    def close(self) -> None:
        self._socket.close()
        self._thread.join(60)


@pytest.mark.parametrize(
    ("speech", "error"),
    [
        (struct.pack("!IB", 1 << 31, 0) + b"x", GuestLied),
        (struct.pack("!IB", 5, 9) + b"abcd", GuestLied),
        (struct.pack("!IB", 5, 0) + b"nope", GuestLied),
        (struct.pack("!IB", 3, 0) + b"[]", GuestLied),
        (struct.pack("!IB", 200_001, 0) + b"[" * 200_000, GuestLied),
        (struct.pack("!IB", 1, 0), GuestLied),
        (b"".join(struct.pack("!IB", (1 << 20) + 1, 4) + bytes(1 << 20) for _ in range(40)), GuestLied),
        (b"", SandboxDead),
    ],
)
def test_a_lying_guest_is_called_one(tmp_path: Path, speech: bytes, error: type[SandkeepError]) -> None:
    liar = Liar(tmp_path, speech)
    link = Link(tmp_path)
    try:
        with pytest.raises(error):
            with link.stream("hello", timeout=60 if speech else 0.5) as events:
                for _ in events:
                    pass
    finally:
        link.close()
        liar.close()


def test_a_flood_of_output_does_not_grow_the_host(sb: Sandbox) -> None:
    code = f"""
import resource, sys
from sandkeep import Sandbox
sb = Sandbox.connect({sb.id!r}, home={str(sb._home.path)!r})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
result = sb.commands.run("head -c 300000000 /dev/zero", max_output=1000)
assert result.truncated and len(result.stdout) == 1000
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    import sys

    grown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=150).stdout
    assert int(grown) < 50


def test_a_full_disk_is_an_error_not_a_loss(make: Make, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(small)], check=True)
    try:
        sb = Sandbox(home=small / "home", runtime="runc")
        try:
            sb.commands.run("echo precious > precious")
            saved = sb.snapshot()
            full = sb.commands.run("head -c 200000000 /dev/zero > fill")
            assert full.exit_code != 0
            assert sb.commands.run("cat precious").stdout == "precious\n"
            with pytest.raises((SandkeepError, OSError)):
                sb.checkpoint()
                sb.snapshot()
                sb.commands.run("sleep 100", background=True)
                sb.files.write("/tmp/more", b"x" * 1000)
            sb.commands.run("rm fill")
            sb.restore(saved)
            assert sb.commands.run("cat precious").stdout == "precious\n"
        finally:
            sb.kill()
            until(lambda: not os.listdir(small / "home" / "trash"), "the trash to be emptied")
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)
