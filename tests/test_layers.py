"""Layers against the kernel's own overlayfs: what a copy or a squash shows is what the original shows."""

from __future__ import annotations

import os
import random
import stat
import time
from pathlib import Path

import pytest

from sandkeep.checkpoints.base import Base
from sandkeep.layers import overlay
from sandkeep.layers.copying import copy_top
from sandkeep.layers.detached import detach
from sandkeep.layers.pool import Layers, empty_trash, throw_away
from sandkeep.layers.squash import squash
from sandkeep.runtime import kernel
from waiting import until

NAMES = ["a", "b", "c", "d e", "ü", "f\n"]


def digest(root: Path) -> dict[str, tuple[object, ...]]:
    """Everything a user can see below a folder, by path."""
    found: dict[str, tuple[object, ...]] = {}
    links: dict[int, str] = {}
    for folder, names, files in os.walk(root):
        for name in sorted(names + files):
            path = Path(folder, name)
            info = path.lstat()
            what: object = None
            if stat.S_ISREG(info.st_mode):
                what = path.read_bytes()
            elif stat.S_ISLNK(info.st_mode):
                what = os.readlink(path)
            shown = str(path.relative_to(root))
            first = links.setdefault(info.st_ino, shown) if info.st_nlink > 1 and not path.is_dir() else None
            times = None if path.is_dir() else info.st_mtime_ns
            found[shown] = (stat.S_IFMT(info.st_mode), stat.S_IMODE(info.st_mode), info.st_uid, times, what, first)
    return found


def mounted(lowers: list[Path], upper: Path | None, work: Path | None, at: Path) -> None:
    at.mkdir(exist_ok=True)
    settings = f"lowerdir={':'.join(map(str, lowers))},userxattr,xino=off,index=off"
    if upper is not None:
        settings += f",upperdir={upper},workdir={work}"
    kernel.mount("overlay", str(at), "overlay", 0, settings)


def edit(root: Path, rng: random.Random) -> None:
    """One random change below a folder."""
    folders = [Path(folder) for folder, _, _ in os.walk(root)]
    here = rng.choice(folders)
    path = here / rng.choice(NAMES)
    verb = rng.choice(
        ["write", "write", "append", "mkdir", "remove", "link", "symlink", "chmod", "rename", "fifo", "replace"]
    )
    exists, is_dir = os.path.lexists(path), path.is_dir() and not path.is_symlink()
    plain = exists and not is_dir and stat.S_ISREG(path.lstat().st_mode)
    if verb == "mkdir" and not exists:
        path.mkdir()
    elif verb in ("remove", "replace") and is_dir and path != root:
        for folder, names, files in os.walk(path, topdown=False):
            for name in files:
                os.unlink(Path(folder, name))
            for name in names:
                inner = Path(folder, name)
                os.unlink(inner) if inner.is_symlink() else os.rmdir(inner)
        os.rmdir(path)
        if verb == "replace":
            path.mkdir()
            (path / "fresh").write_text("fresh")
    elif verb == "remove" and exists and not is_dir:
        os.unlink(path)
    elif verb == "link" and plain:
        other = here / (path.name + "-link")
        if not os.path.lexists(other):
            os.link(path, other)
    elif verb == "symlink" and not exists:
        os.symlink("nowhere", path)
    elif verb == "fifo" and not exists:
        os.mkfifo(path)
    elif verb == "chmod" and plain:
        os.chmod(path, rng.choice([0o600, 0o755, 0o4711]))
    elif verb == "rename" and plain:
        os.rename(path, here / rng.choice(NAMES[:3])) if not (here / "a").is_dir() and not (
            here / "b"
        ).is_dir() and not (here / "c").is_dir() else None
    elif verb in ("write", "append") and (plain or not exists):
        with open(path, "ab" if verb == "append" else "wb") as file:
            file.write(rng.randbytes(rng.choice([0, 10, 5000])))


@pytest.mark.parametrize("seed", range(12))
def test_copies_of_a_changing_top_show_what_it_shows(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    base, top, work = tmp_path / "base", tmp_path / "top", tmp_path / "work"
    for folder in (base, top, work):
        folder.mkdir()
    for _ in range(40):
        edit(base, rng)

    def check() -> None:
        kernel.private_mounts()
        mounted([base], top, work, tmp_path / "live")
        copies: list[Path] = []
        cursor = tmp_path / "cursor"
        for round_ in range(6):
            for _ in range(rng.choice([0, 1, 15])):
                edit(tmp_path / "live", rng)
            layer = tmp_path / f"layer{round_}"
            copied = copy_top(top, layer, cursor)
            if copied.changed:
                cursor.write_bytes(copied.cursor)
                copies.insert(0, layer)
            at = tmp_path / f"seen{round_}"
            mounted([*copies, base], None, None, at) if copies else None
            if copies:
                assert digest(at) == digest(tmp_path / "live")
        if len(copies) > 1:
            squash(copies, tmp_path / "squashed", Base({"/": str(base)}))
            mounted([tmp_path / "squashed", base], None, None, tmp_path / "merged")
            assert digest(tmp_path / "merged") == digest(tmp_path / "live")

    kernel.in_thread(check)


def test_same_size_rewrite_within_a_tick_is_copied(tmp_path: Path) -> None:
    top, cursor = tmp_path / "top", tmp_path / "cursor"
    top.mkdir()
    for round_ in range(5):
        (top / "file").write_text(f"{round_}")
        layer = tmp_path / f"layer{round_}"
        copied = copy_top(top, layer, cursor)
        cursor.write_bytes(copied.cursor)
        assert copied.changed
        assert (layer / "file").read_text() == f"{round_}"


def test_an_unchanged_top_is_copied_once(tmp_path: Path) -> None:
    top, cursor = tmp_path / "top", tmp_path / "cursor"
    (top / "inner").mkdir(parents=True)
    (top / "inner" / "file").write_text("x")
    long_ago = 1_000_000_000
    for path in (top / "inner" / "file", top / "inner", top):
        os.utime(path, (long_ago, long_ago))
    time.sleep(0.05)
    copied = copy_top(top, tmp_path / "one", cursor)
    assert copied.changed
    cursor.write_bytes(copied.cursor)
    assert copy_top(top, tmp_path / "two", cursor).changed == 0


def test_folders_deeper_than_calls_may_be(tmp_path: Path) -> None:
    depth, top, cursor = 1200, tmp_path / "top", tmp_path / "cursor"
    at = os.fspath(top)
    for _ in range(depth):
        os.mkdir(at)
        at += "/d"
    (tmp_path / at[:-2] / "file").write_text("one")
    time.sleep(0.05)
    copied = copy_top(top, tmp_path / "one", cursor)
    assert copied.changed == depth + 1
    cursor.write_bytes(copied.cursor)
    assert copy_top(top, tmp_path / "two", cursor).changed == 0
    file = Path(at[:-2], "file").relative_to(top)
    assert (tmp_path / "one" / file).read_text() == "one"
    squash([tmp_path / "two", tmp_path / "one"], tmp_path / "merged", Base())
    assert (tmp_path / "merged" / file).read_text() == "one"
    empty_trash(tmp_path)
    assert os.listdir(tmp_path) == []


def test_sparse_files_stay_sparse_and_sockets_are_named(tmp_path: Path) -> None:
    import socket

    top = tmp_path / "top"
    top.mkdir()
    with open(top / "sparse", "wb") as file:
        file.truncate(1 << 30)
        file.seek(1 << 29)
        file.write(b"middle")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(top / "sock"))
        copied = copy_top(top, tmp_path / "layer", tmp_path / "cursor")
    assert copied.left_out == ["sock"]
    sparse = (tmp_path / "layer" / "sparse").stat()
    assert sparse.st_size == 1 << 30
    assert sparse.st_blocks * 512 < 1 << 20


def test_throwing_away_survives_odd_modes(tmp_path: Path) -> None:
    layers = Layers(tmp_path)
    tree = layers.begin("ly_x")
    (tree / "work").mkdir(parents=True)
    (tree / "work" / "file").write_text("x")
    os.chmod(tree / "work", 0)
    layers.discard("ly_x")
    assert layers.ids() == []
    empty_trash(layers.trash)
    assert list(layers.trash.iterdir()) == []
    throw_away(tmp_path / "nothing", layers.trash)


def test_whiteouts_and_opaque(tmp_path: Path) -> None:
    overlay.make_whiteout(str(tmp_path / "gone"))
    assert overlay.is_whiteout(os.lstat(tmp_path / "gone"))
    assert not overlay.is_opaque(str(tmp_path))
    overlay.set_opaque(str(tmp_path))
    assert overlay.is_opaque(str(tmp_path))


def test_detached_work_is_in_a_session_of_its_own(tmp_path: Path) -> None:
    """So that what ends ours, a closed terminal or ^C, does not end it."""
    told = tmp_path / "told"
    detach(["sh", "-c", f"cat /proc/$$/stat > {told}.part; echo $$ >> {told}.part; mv {told}.part {told}"])
    until(told.exists, "the command to say where it is")
    stat_, pid = told.read_text().splitlines()
    group, session = (int(field) for field in stat_.rpartition(")")[2].split()[2:4])
    assert (group, session) == (int(pid), int(pid))
    assert session != os.getsid(0)
