"""Capture and unpack are exact in everything, at every size, for an ordinary user too, in bounded memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sandkeep.checkpoints.capture import load_record
from sandkeep.checkpoints.unpack import unpack
from trees import fill, looks, open_repo, save, whiteout


def test_every_kind_of_entry_comes_back_as_it_was(tmp_path: Path) -> None:
    tree = fill(
        tmp_path / "tree", {"plain": b"p" * 5000, "empty": b"", "d/inner": b"i", "tiny": b"t" * 64, "edge": b"e" * 65}
    )
    names = os.fsencode(tree)
    for name in (b"\xff\xfe-not-utf8", b"new\nline", b"-dash", b" space ", "ünïcode".encode(), b"n" * 255):
        with open(os.path.join(names, name), "wb") as file:
            file.write(name)
    os.mkfifo(tree / "fifo", 0o640)
    os.chmod(tree / "fifo", 0o622)
    (tree / "absolute").symlink_to("/etc/passwd")
    (tree / "dangling").symlink_to("../../nowhere")
    os.symlink(b"\xff" * 3000, os.path.join(names, b"long"))
    os.link(tree / "plain", tree / "d/linked")
    os.link(tree / "dangling", tree / "d/dangling", follow_symlinks=False)
    os.chmod(tree / "tiny", 0o4751)
    os.chown(tree / "d/inner", 1234, 60000)
    os.chmod(tree / "d/inner", 0o6711)
    os.chmod(tree / "d", 0o3770)
    os.chmod(tree / "empty", 0)
    os.setxattr(tree / "plain", "user.binary", bytes(range(256)))
    os.setxattr(tree / "d", "user.on-folder", b"")
    os.setxattr(tree / "d", "user.overlay.overlay.opaque", b"y")
    for number, path in enumerate([tree / "plain", tree / "d/inner", tree / "d", tree / "fifo", tree]):
        os.utime(path, ns=(1, 1_234_567_890_123_456_789 + number))
    os.utime(tree / "absolute", ns=(1, -987_654_321), follow_symlinks=False)
    with open_repo(tmp_path) as repo:
        saved = save(repo, tree)
        done = unpack(repo, saved.id, tmp_path / "out")
    assert done.notes == []
    assert looks(tmp_path / "out", raw=True) == looks(tree, raw=True)


@pytest.mark.parametrize(
    "size", [0, 1, 64, 65, 262_143, 262_144, 262_145, 64 * 262_144, 64 * 262_144 + 1, 70 * 262_144 + 5]
)
def test_sizes_at_the_edges_of_the_format(tmp_path: Path, size: int) -> None:
    tree = fill(
        tmp_path / "tree",
        {"data": (b"%020d" * (size // 20 + 1) % tuple(range(size // 20 + 1)))[:size], "zeros": bytes(size)},
    )
    with open_repo(tmp_path) as repo:
        saved = save(repo, tree)
        unpack(repo, saved.id, tmp_path / "out")
    assert looks(tmp_path / "out") == looks(tree)


def test_holes_stay_holes_and_zeros_stay_zeros(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    with open(tree / "sparse", "wb") as file:
        for at in (0, 1_000_000, 50_000_000):
            file.seek(at)
            file.write(b"data")
        file.truncate(80_000_000)
    with open(tree / "hole", "wb") as file:
        file.truncate(200_000)
    (tree / "zeros").write_bytes(bytes(20_000_000))
    subprocess.run(["sync", "-f", str(tree)], check=True)
    with open_repo(tmp_path) as repo:
        unpack(repo, save(repo, tree).id, tmp_path / "out")
    subprocess.run(["sync", "-f", str(tmp_path)], check=True)
    assert looks(tmp_path / "out") == looks(tree)
    blocks = {name: os.stat(tmp_path / "out" / name).st_blocks * 512 for name in ("sparse", "hole", "zeros")}
    assert blocks["sparse"] < 1_000_000
    assert blocks["hole"] < 100_000
    assert blocks["zeros"] >= 20_000_000


def test_150_000_files_and_a_5_gb_file(root: Path) -> None:
    tree = root / "tree"
    for folder in range(150):
        (tree / f"d{folder}").mkdir(parents=True)
        at = os.open(tree / f"d{folder}", os.O_RDONLY)
        for number in range(1000):
            os.mknod(f"f{number}", 0o100644, dir_fd=at)
        os.close(at)
    with open(tree / "huge", "wb") as file:
        for at in (0, 3 << 30, (5 << 30) - 4):
            file.seek(at)
            file.write(b"mark")
    with open_repo(root) as repo:
        saved = save(repo, tree)
        assert saved.size_bytes == 5 << 30
        record = load_record(repo, saved.id)
        assert record.root.below == 150_151
        done = unpack(repo, saved.id, root / "out")
    assert done.entries == 150_151
    huge = os.stat(root / "out/huge")
    assert huge.st_size == 5 << 30
    assert huge.st_blocks * 512 < 10 << 20
    with open(root / "out/huge", "rb") as file:
        file.seek(3 << 30)
        assert file.read(4) == b"mark"
    assert sum(len(os.listdir(root / f"out/d{folder}")) for folder in range(150)) == 150_000


def test_a_tree_deeper_than_any_path(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    here = os.open(tree, os.O_RDONLY)
    for _ in range(900):
        os.mkdir("level", dir_fd=here)
        below = os.open("level", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    for name in ("leaf", "twin"):
        os.close(os.open(name, os.O_CREAT | os.O_WRONLY, 0o644, dir_fd=here))
    os.close(here)
    try:
        with open_repo(tmp_path) as repo:
            saved = save(repo, tree)
            unpack(repo, saved.id, tmp_path / "out")
            assert save(repo, tmp_path / "out").hash == saved.hash
    finally:
        subprocess.run(["rm", "-rf", str(tree), str(tmp_path / "out")], check=True)


NAMESPACE = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from trees import Base, looks, open_repo, save
from sandkeep.checkpoints.unpack import unpack
root = Path(sys.argv[2])
with open_repo(root) as repo:
    mine = save(repo, root / "mine", below=Base({"/": str(root / "base")}))
    assert unpack(repo, mine.id, root / "same").notes == []
    assert looks(root / "same", raw=True) == looks(root / "mine", raw=True)
    print(unpack(repo, sys.argv[3], root / "theirs").notes)
"""


def test_in_a_user_namespace(tmp_path: Path) -> None:
    fill(tmp_path / "base", {"d/hidden": b"h", "deleted": b"d", "e": b"e"})
    mine = fill(tmp_path / "mine", {"d/f": b"f" * 100})
    whiteout(mine / "deleted")
    os.mkfifo(mine / "fifo")
    os.setxattr(mine / "d", "user.overlay.opaque", b"y")
    other = fill(tmp_path / "other", {"f": b"f"})
    os.chown(other / "f", 1000, 1000)
    with open_repo(tmp_path) as repo:
        saved = save(repo, other)
    command = ["unshare", "--user", "--map-root-user", sys.executable, "-c", NAMESPACE]
    run = subprocess.run(
        [*command, str(Path(__file__).parent), str(tmp_path), saved.id], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "['the owner could not be set on 1 entries']"


MEMORY = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from trees import open_repo, save
from sandkeep.checkpoints.transfer import export_to_path, import_checkpoint
from sandkeep.checkpoints.unpack import unpack
root = Path(sys.argv[2])
def tell():
    print(next(int(line.split()[1]) >> 10 for line in open("/proc/self/status") if line.startswith("VmHWM")))
with open_repo(root) as repo, open_repo(root, "other") as other:
    saved = save(repo, root / "tree")
    tell()
    unpack(repo, saved.id, root / "out")
    tell()
    export_to_path(repo, saved.id, root / "file")
    with open(root / "file", "rb") as file:
        import_checkpoint(other, file)
    tell()
"""


@pytest.mark.parametrize(("what", "most"), [("large", 150), ("many", 300)])
def test_memory_is_bounded_whatever_the_workspace(root: Path, what: str, most: int) -> None:
    """MiB of the whole process: for a file of 800 MiB that shrinks to nothing, and for 60,000 files. These are so small that answers of
    the process beside fill a pipe."""
    tree = root / "tree"
    tree.mkdir()
    if what == "large":
        with open(tree / "big", "wb") as file:
            for number in range(800):
                file.write(number.to_bytes(4) * (1 << 18))
    else:
        for number in range(60_000):
            if number % 200 == 0:
                (folder := tree / f"d{number}").mkdir()
            (folder / f"f{number}").write_bytes(b"%d" % number * 20)
    run = subprocess.run(
        [sys.executable, "-c", MEMORY, str(Path(__file__).parent), str(root)],
        capture_output=True,
        text=True,
        check=True,
        timeout=170,
    )
    assert max(map(int, run.stdout.split())) < most, run.stdout
