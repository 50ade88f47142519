"""What a copy takes for unchanged must be unchanged: numbers of files and folders are given again, clocks go back, cursors grow old."""

from __future__ import annotations

import mmap
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import msgpack
import pytest

from sandkeep.checkpoints.base import Base
from sandkeep.layers import copying, filesystem, overlay
from sandkeep.layers.check import breaks
from sandkeep.layers.copying import copy_top
from sandkeep.layers.squash import squash
from sandkeep.runtime import kernel
from test_layers import mounted
from trees import looks


class Saves:
    """A base with a mounted top, and the layers that copies of it made."""

    def __init__(self, at: Path) -> None:
        self.at = at
        self.base, self.top, self.live = at / "base", at / "top", at / "live"
        self.copies: list[Path] = []
        self.count = 0
        self.cursor = at / "cursor"
        for folder in (self.base, self.top, at / "work"):
            folder.mkdir(parents=True)

    def mount(self) -> None:
        mounted([self.base], self.top, self.at / "work", self.live)

    def save(self) -> int:
        time.sleep(0.05)  # out of doubt
        self.count += 1
        layer = self.at / f"layer{self.count}"
        copied = copy_top(self.top, layer, self.cursor)
        self.cursor.write_bytes(copied.cursor)
        if copied.anew:
            self.copies = []
        if copied.changed:
            self.copies.insert(0, layer)
        return copied.changed

    def shown(self) -> Path:
        at = self.at / f"shown{time.monotonic_ns()}"
        mounted([*self.copies, self.base], None, None, at)
        return at

    def check(self) -> None:
        assert looks(self.shown()) == looks(self.live)


@pytest.fixture
def saves(tmp_path: Path) -> Saves:
    return Saves(tmp_path)


def apart(call: Callable[[], None]) -> None:
    def body() -> None:
        kernel.private_mounts()
        call()

    kernel.in_thread(body)


def remove(folder: Path) -> None:
    for here, names, files in os.walk(folder, topdown=False):
        for name in files:
            os.unlink(Path(here, name))
        for name in names:
            os.rmdir(Path(here, name))
    os.rmdir(folder)


def again(folder: Path, same: Callable[[], bool]) -> None:
    """Remove a folder and make it, until it has the number of before, if this file system ever does that."""
    for _ in range(50):
        remove(folder)
        folder.mkdir()
        if same():
            break


@pytest.mark.parametrize("where", ["d", "p/d", "new/d"])
def test_a_folder_that_is_removed_and_made_again_shows_nothing_of_the_old(saves: Saves, where: str) -> None:
    """`p` lies in the base, `new` only in the top: there the kernel marks nothing."""

    def body() -> None:
        if where != "new/d":
            (saves.base / where).mkdir(parents=True)
            (saves.base / where / "secret").write_text("secret")
        saves.mount()
        folder = saves.live / where
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "gone").write_text("gone")
        (folder / "inner").mkdir()
        (folder / "inner" / "gone").write_text("gone")
        saves.save()
        saves.check()
        number = (saves.top / where).stat().st_ino
        again(folder, lambda: (saves.top / where).stat().st_ino == number)
        (folder / "only").write_text("only")
        saves.save()
        saves.check()
        assert [path.name for path in (saves.shown() / where).iterdir()] == ["only"]

    apart(body)


def test_a_folder_made_again_in_one_made_again(saves: Saves) -> None:
    def body() -> None:
        (saves.base / "p/d/e").mkdir(parents=True)
        (saves.base / "p/d/e/secret").write_text("secret")
        (saves.base / "p/secret").write_text("secret")
        saves.mount()
        (saves.live / "p/d/e/touched").write_text("x")
        saves.save()
        remove(saves.live / "p")
        (saves.live / "p/d/e").mkdir(parents=True)
        saves.save()
        saves.check()
        (saves.live / "p/d/e/new").write_text("new")
        remove(saves.live / "p/d")
        saves.save()
        (saves.live / "p/d").mkdir()
        saves.save()
        saves.check()

    apart(body)


def test_names_of_one_file_stay_together_when_a_folder_is_renamed(saves: Saves) -> None:
    """Renaming a folder changes nothing about what is in it, so only the renamed name seems new."""

    def body() -> None:
        saves.mount()
        (saves.live / "d1").mkdir()
        (saves.live / "d2").mkdir()
        (saves.live / "d1/a").write_text("one")
        os.link(saves.live / "d1/a", saves.live / "d2/b")
        saves.save()
        (saves.live / "d2").rename(saves.live / "d3")
        saves.save()
        saves.check()
        shown = saves.shown()
        assert (shown / "d1/a").stat().st_ino == (shown / "d3/b").stat().st_ino
        assert (shown / "d1").stat().st_mtime_ns == (saves.live / "d1").stat().st_mtime_ns

    apart(body)


def test_attributes_of_an_overlay_inside_the_sandbox_are_kept(saves: Saves) -> None:
    def body() -> None:
        saves.mount()
        (saves.live / "d").mkdir()
        os.setxattr(saves.live / "d", "user.overlay.opaque", b"y")  # refused by kernels before 6.7
        (saves.live / "d/file").write_text("x")
        saves.save()
        squash(saves.copies, saves.at / "squashed", Base({"/": str(saves.base)}))
        saves.copies = [saves.at / "squashed"]
        assert os.getxattr(saves.shown() / "d", "user.overlay.opaque") == b"y"

    apart(body)


def test_only_the_attributes_of_folders_changed(saves: Saves) -> None:
    """Also the root's own, and also within a clock tick of a copy."""

    def body() -> None:
        (saves.base / "d").mkdir()
        saves.mount()
        saves.save()
        assert saves.save() == 0
        for folder in (saves.live, saves.live / "d"):
            for change in (
                lambda at: os.chmod(at, 0o711),
                lambda at: os.chown(at, 5, 6),
                lambda at: os.setxattr(at, "user.mark", b"1"),
                lambda at: os.utime(at, ns=(5, 5)),
            ):
                change(folder)
                assert saves.save() > 0
                assert saves.save() == 0
                for seen in (saves.shown(), saves.shown() / "d"):
                    live = saves.live if seen.name != "d" else saves.live / "d"
                    one, other = seen.stat(), live.stat()
                    assert (one.st_mode, one.st_uid, one.st_gid, one.st_mtime_ns) == (
                        other.st_mode,
                        other.st_uid,
                        other.st_gid,
                        other.st_mtime_ns,
                    )
                    assert os.listxattr(seen) == os.listxattr(live)

    apart(body)


@pytest.mark.parametrize(
    "why", ["missing", "of format 1", "of another boot", "the clock was set back", "torn", "empty"]
)
def test_a_cursor_that_can_not_be_believed_is_none(saves: Saves, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    def body() -> None:
        (saves.base / "d").mkdir()
        saves.mount()
        (saves.live / "d/file").write_text("file")
        (saves.live / "d/gone").write_text("gone")
        saves.save()
        (saves.live / "d/gone").unlink()
        if why == "missing":
            saves.cursor.unlink()
        elif why == "of format 1":
            info = (saves.top / "d/file").stat()
            one = [info.st_ino, info.st_ctime_ns, info.st_size, info.st_mode, info.st_nlink, info.st_mtime_ns]
            saves.cursor.write_bytes(msgpack.packb([[2], {b"d": [[3], {b"file": [one, None]}]}]))
        elif why == "of another boot":
            monkeypatch.setattr(copying, "_boot", lambda: "another")
        elif why == "the clock was set back":
            monkeypatch.setattr(copying, "_clock", lambda: clock() - 10**9)
        else:
            saves.cursor.write_bytes(saves.cursor.read_bytes()[: -20 if why == "torn" else 0])
        assert copying.load_cursor(saves.cursor) is None
        saves.save()
        assert len(saves.copies) == 1
        saves.check()

    clock = copying._clock
    apart(body)


@pytest.mark.parametrize("system", ["tmpfs", "ext4"])
def test_what_is_written_through_a_mapping_is_never_missed(tmp_path: Path, system: str) -> None:
    """tmpfs gives a file no new time when it is written through a shared mapping."""

    def body() -> None:
        at = tmp_path / "home"
        at.mkdir()
        if system == "tmpfs":
            kernel.mount("tmpfs", str(at), "tmpfs", 0)
            assert not filesystem.tells(at)
        saves = Saves(at / "saves")
        saves.mount()
        with open(saves.live / "map", "w+b") as file:
            file.truncate(4096)
            with mmap.mmap(file.fileno(), 4096) as memory:
                for number in range(4):
                    memory[:4] = b"AAA%d" % number
                    os.sync()
                    saves.save()
                    assert (saves.shown() / "map").read_bytes()[:4] == b"AAA%d" % number

    apart(body)


SHOUT = ["a", "b", "c"]


def churn(root: Path, rng: random.Random) -> None:
    """One change, most of them of whole folders, in so few names that numbers and names come again and again."""
    folders = [Path(folder) for folder, _, _ in os.walk(root)]
    here = rng.choice(folders)
    path, other = here / rng.choice(SHOUT), rng.choice(folders) / rng.choice(SHOUT)
    verb = rng.choice(["write", "mkdir", "mkdir", "remove", "again", "rename", "rename", "link", "touch"])
    is_dir = path.is_dir()
    try:
        if verb == "write" and not is_dir:
            path.write_text(rng.choice(["same", "different"]))
        elif verb == "mkdir":
            path.mkdir()
        elif verb in ("remove", "again"):
            remove(path) if is_dir else path.unlink()
            if verb == "again":
                path.mkdir()
        elif verb == "rename":
            path.rename(other)
        elif verb == "link" and not is_dir:
            os.link(path, other)
        elif verb == "touch":
            os.utime(path, ns=(rng.choice([5, 6]), rng.choice([5, 6])))
    except OSError:
        pass


@pytest.mark.parametrize("seed", range(8))
def test_folders_that_come_and_go(saves: Saves, seed: int) -> None:
    """Through copies, tops that become layers, and squashes: each stack shows what its sandbox showed."""
    rng = random.Random(seed)
    below = Base({"/": str(saves.base)})

    def body() -> None:
        for _ in range(30):
            churn(saves.base, rng)
        saves.mount()
        layers: list[Path] = []
        for round_ in range(14):
            for _ in range(rng.choice([1, 5, 30])):
                churn(saves.live, rng)
            time.sleep(0.03)
            saves.save()
            live = looks(saves.live)
            stack = [*saves.copies, *layers]
            at = saves.at / f"seen{round_}"
            mounted([*stack, saves.base], None, None, at)
            assert looks(at) == live
            assert breaks(stack, below) == []
            if len(stack) > 4:
                run = rng.randrange(0, 3)
                target = saves.at / f"squashed{round_}"
                squash(stack[run:], target, below)
                stack = [*stack[:run], target]
                at = saves.at / f"also{round_}"
                mounted([*stack, saves.base], None, None, at)
                assert looks(at) == live
                assert breaks(stack, below) == []
            if rng.random() < 0.4:
                layers, saves.copies = stack, []
                saves.cursor = saves.at / f"cursor{round_}"
                saves.top, saves.live = saves.at / f"top{round_}", saves.at / f"live{round_}"
                saves.top.mkdir()
                (saves.at / f"work{round_}").mkdir()
                mounted([*layers, saves.base], saves.top, saves.at / f"work{round_}", saves.live)

    apart(body)


def test_a_folder_over_a_deleted_one_hides_it_when_squashed(tmp_path: Path) -> None:
    def body() -> None:
        base, old, gone, new = (tmp_path / name for name in ("base", "old", "gone", "new"))
        for folder in (base, old / "d", gone, new / "d"):
            folder.mkdir(parents=True)
        (base / "d").mkdir()
        (base / "d/base").write_text("base")
        (old / "d/old").write_text("old")
        overlay.make_whiteout(str(gone / "d"))
        (new / "d/new").write_text("new")
        squash([new, gone], tmp_path / "squashed", Base({"/": str(base)}))
        mounted([tmp_path / "squashed", old, base], None, None, tmp_path / "shown")
        assert os.listdir(tmp_path / "shown/d") == ["new"]

    apart(body)


@pytest.mark.parametrize("hidden", [False, True])
def test_a_squash_leaves_no_whiteout_that_the_kernel_would_show(tmp_path: Path, hidden: bool) -> None:
    """The folder is only in the layers that become one; or the base has it too, and it was replaced."""

    def body() -> None:
        base, old, new = (tmp_path / name for name in ("base", "old", "new"))
        for folder in (base, old / "d/inner", new / "d/inner"):
            folder.mkdir(parents=True)
        if hidden:
            (base / "d/inner").mkdir(parents=True)
            overlay.set_opaque(str(old / "d"))
        for name in ("d/gone", "d/inner/gone"):
            (old / name).write_text("x")
            overlay.make_whiteout(str(new / name))
        (base / "kept").write_text("x")
        overlay.make_whiteout(str(new / "kept"))
        squash([new, old], tmp_path / "squashed", Base({"/": str(base)}))
        mounted([tmp_path / "squashed", base], tmp_path / "top", tmp_path / "work", tmp_path / "shown")
        assert os.listdir(tmp_path / "shown/d") == ["inner"]
        assert os.listdir(tmp_path / "shown/d/inner") == []
        assert os.listdir(tmp_path / "shown") == ["d"]
        assert breaks([tmp_path / "squashed"], Base({"/": str(base)})) == []
        remove(tmp_path / "shown/d")
        assert os.listdir(tmp_path / "shown") == []

    for name in ("top", "work"):
        (tmp_path / name).mkdir()
    apart(body)
