"""Capture and unpack: exact in everything, canonical, cheap where little changed, honest about what is left out.

With test_checkpoints_roundtrip (deletions), _hostile (many writers, verified content) and _store (forget, gc, facts readable
before anything is fetched) this shows that what Evolve gets wrong in storage is right here.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandkeep.checkpoints import Base, RepositorySpec, Source, capture_here, unpack, unpack_attachment, unpack_here
from sandkeep.checkpoints.capture import load_record
from sandkeep.checkpoints.filters import Filter
from sandkeep.checkpoints.records import is_id, new_id, time_of
from sandkeep.errors import BadArgument, CheckpointNotFound, StateConflict, StoreFull
from sandkeep.store.writer import Writer
from trees import BASE, looks, make_socket, open_repo, quick_folder, save, view


def fill(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    root.mkdir(exist_ok=True)
    return root


def whiteout(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mknod(path, 0o020000, 0)


# the state


def test_order_of_creation_and_times_do_not_change_the_hash(tmp_path: Path) -> None:
    files = {"a/one": b"1" * 100, "b": b"2", "a/two": b"3" * 400_000}
    first = fill(tmp_path / "first", files)
    second = fill(tmp_path / "second", dict(reversed(files.items())))
    (second / "made").touch()
    (second / "made").unlink()
    os.utime(second / "b", ns=(1, 1))
    with open_repo(tmp_path) as repo:
        one, two = save(repo, first), save(repo, second)
        assert one.hash == two.hash
        assert two.new_bytes < 2000  # times only


@pytest.mark.parametrize("change", ["content", "mode", "owner", "xattr", "name", "link", "session", "base"])
def test_everything_else_does(tmp_path: Path, change: str) -> None:
    tree = fill(tmp_path / "tree", {"file": b"x" * 100, "twin": b"x" * 100})
    with open_repo(tmp_path) as repo:
        before = save(repo, tree)
        how = {}
        if change == "content":
            (tree / "file").write_bytes(b"y" * 100)
        elif change == "mode":
            (tree / "file").chmod(0o600)
        elif change == "owner":
            os.chown(tree / "file", 7, 7)
        elif change == "xattr":
            os.setxattr(tree / "file", "user.k", b"v")
        elif change == "name":
            (tree / "file").rename(tree / "other")
        elif change == "link":
            (tree / "twin").unlink()
            os.link(tree / "file", tree / "twin")
        elif change == "session":
            how = {"session": {"cwd": "/elsewhere"}}
        else:
            how = {"base": {**BASE, "fingerprint": "another"}}
        assert save(repo, tree, **how).hash != before.hash


def test_volatile_facts_are_kept_but_not_hashed(tmp_path: Path) -> None:
    tree = fill(tmp_path / "tree", {"f": b""})
    with open_repo(tmp_path) as repo:
        one, two = save(repo, tree, volatile={"at": 1}), save(repo, tree, volatile={"at": 2})
        assert one.hash == two.hash
        assert load_record(repo, one.id).volatile != load_record(repo, two.id).volatile


def test_saving_again_uploads_nothing(tmp_path: Path) -> None:
    tree = fill(tmp_path / "tree", {f"d{n}/f{n}": os.urandom(3000) for n in range(50)})
    with open_repo(tmp_path) as repo:
        first = save(repo, tree)
        assert first.new_bytes > 150_000
        for again in (
            save(repo, tree),
            save(repo, parent=first.id),
            save(repo, fill(tmp_path / "none", {}), parent=first.id),
        ):
            assert again.new_bytes == 0
            assert again.hash == first.hash
            assert again.size_bytes == first.size_bytes == 150_000


@pytest.fixture
def quick() -> Iterator[Path]:
    with quick_folder() as folder:
        yield folder


def test_a_small_change_adds_little_even_in_a_huge_folder(quick: Path) -> None:
    tmp_path = quick
    tree = tmp_path / "tree"
    tree.mkdir()
    for number in range(20_000):
        os.mknod(tree / f"file-{number:05d}", 0o100644)
    edit = fill(tmp_path / "edit", {"file-07777": b"changed", "file-new": b"n"})
    whiteout(edit / "file-00042")
    with open_repo(tmp_path) as repo:
        first = save(repo, tree)
        second = save(repo, edit, parent=first.id)
        assert second.new_bytes < 40_000
        (tree / "file-07777").write_bytes(b"changed")
        (tree / "file-new").write_bytes(b"n")
        (tree / "file-00042").unlink()
        assert save(repo, tree).hash == second.hash
        unpack(repo, second.id, tmp_path / "out")
        assert sorted(os.listdir(tmp_path / "out")) == sorted(os.listdir(tree))


def test_pages_changed_inside_a_large_file_add_their_chunks_only(tmp_path: Path) -> None:
    size = 40 << 20
    tree = tmp_path / "tree"
    tree.mkdir()
    with open(tree / "db", "wb") as file:
        for number in range(size >> 16):
            file.write(number.to_bytes(4) * (1 << 14))
    with open_repo(tmp_path) as repo:
        first = save(repo, tree)
        with open(tree / "db", "r+b") as file:
            for at in (5_000_000, 33_000_000):
                file.seek(at)
                file.write(os.urandom(4096))
        second = save(repo, tree, parent=first.id)
        assert second.new_bytes < 60_000
        unpack(repo, second.id, tmp_path / "out")
        assert looks(tmp_path / "out") == looks(tree)


# exactness


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
    (tree / "zeros").write_bytes(bytes(3_000_000))
    subprocess.run(["sync", "-f", str(tree)], check=True)
    with open_repo(tmp_path) as repo:
        unpack(repo, save(repo, tree).id, tmp_path / "out")
    subprocess.run(["sync", "-f", str(tmp_path)], check=True)
    assert looks(tmp_path / "out") == looks(tree)
    blocks = {name: os.stat(tmp_path / "out" / name).st_blocks * 512 for name in ("sparse", "hole", "zeros")}
    assert blocks["sparse"] < 1_000_000
    assert blocks["hole"] < 100_000
    assert blocks["zeros"] >= 3_000_000


def test_150_000_files_and_a_5_gb_file(quick: Path) -> None:
    tmp_path = quick
    tree = tmp_path / "tree"
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
    with open_repo(tmp_path) as repo:
        saved = save(repo, tree)
        assert saved.size_bytes == 5 << 30
        record = load_record(repo, saved.id)
        assert record.root.below == 150_151
        done = unpack(repo, saved.id, tmp_path / "out")
    assert done.entries == 150_151
    huge = os.stat(tmp_path / "out/huge")
    assert huge.st_size == 5 << 30
    assert huge.st_blocks * 512 < 10 << 20
    with open(tmp_path / "out/huge", "rb") as file:
        file.seek(3 << 30)
        assert file.read(4) == b"mark"
    assert sum(len(os.listdir(tmp_path / f"out/d{folder}")) for folder in range(150)) == 150_000


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


# layers


def test_several_trees_merge_as_overlay_does(tmp_path: Path) -> None:
    base = Base({"/": str(fill(tmp_path / "base", {"etc/conf": b"base", "etc/other": b"o", "usr/x": b"x"}))})
    low = fill(tmp_path / "low", {"etc/conf": b"low", "gone": b"g", "dir/a": b"a"})
    middle = fill(tmp_path / "middle", {"dir": b"now a file"})
    whiteout(middle / "gone")
    whiteout(middle / "usr")
    top = fill(tmp_path / "top", {"dir/b": b"b", "usr/y": b"y"})
    with open_repo(tmp_path) as repo:
        record = load_record(repo, save(repo, low, middle, top, below=base).id)
        unpack(repo, record.id, tmp_path / "out")
    out = tmp_path / "out"
    assert sorted(str(path.relative_to(out)) for path in out.rglob("*")) == [
        "dir",
        "dir/b",
        "etc",
        "etc/conf",
        "usr",
        "usr/y",
    ]
    assert os.getxattr(out / "usr", "user.overlay.opaque") == b"y"
    assert os.listxattr(out / "dir") == []
    assert (out / "etc/conf").read_bytes() == b"low"


def test_a_base_of_several_roots() -> None:
    base = Base({"/": "/nonexistent-root", "/usr": "/usr"})
    assert base.is_folder(b"usr")
    assert base.is_folder(b"usr/bin")
    assert base.stat(b"usr/nothing-here") is None
    assert base.names(b"") == {b"usr"}
    assert base.stat(b"etc") is None


def test_a_difference_that_no_layer_can_say_is_written_whole(tmp_path: Path) -> None:
    base = Base({"/": str(fill(tmp_path / "base", {"file": b"base"}))})
    edited, deleted = fill(tmp_path / "edited", {"other": b"1"}), tmp_path / "deleted"
    whiteout(deleted / "file")
    with open_repo(tmp_path) as repo:
        one, two = save(repo, edited, below=base), save(repo, deleted, below=base)
        done = unpack(repo, one.id, tmp_path / "out", since=two.id, base=base)
        assert done.on is None
        assert os.listdir(tmp_path / "out") == ["other"]


def test_a_folder_that_hides_the_base_in_both_is_merged_not_hidden_again(tmp_path: Path) -> None:
    base = Base({"/": str(fill(tmp_path / "base", {"d/of-the-base": b"b"}))})
    first, second = (
        fill(tmp_path / "first", {"d/kept": b"k", "d/old": b"o"}),
        fill(tmp_path / "second", {"d/new": b"n"}),
    )
    os.setxattr(first / "d", "user.overlay.opaque", b"y")
    whiteout(second / "d/old")
    with open_repo(tmp_path) as repo:
        one = save(repo, first, below=base)
        two = save(repo, second, parent=one.id, below=base)
        unpack(repo, one.id, tmp_path / "low")
        assert unpack(repo, two.id, tmp_path / "high", since=one.id, base=base).on == one.id
    with view(tmp_path, [tmp_path / "base", tmp_path / "low", tmp_path / "high"]) as mounted:
        assert sorted(os.listdir(mounted / "d")) == ["kept", "new"]


def test_links_made_and_broken_since_are_said_by_the_layer(tmp_path: Path) -> None:
    first = fill(tmp_path / "first", {"a": b"shared" * 50, "d/b": b"x", "e/f": b"shared" * 50})
    os.link(first / "d/b", first / "d/c")
    os.link(first / "e/f", first / "e/g")
    second = tmp_path / "second"
    subprocess.run(["cp", "-a", str(first), str(second)], check=True)
    (second / "e/g").unlink()
    (second / "e/g").write_bytes(b"shared" * 50)
    for name in ("e/f", "e/g", "e", "d"):
        os.utime(second / name, ns=(5, 5))
        os.utime(first / name, ns=(5, 5))
    os.link(second / "a", second / "z")
    with open_repo(tmp_path) as repo:
        one, two = save(repo, first), save(repo, second)
        done = unpack(repo, two.id, tmp_path / "out", since=one.id, base=Base())
        assert done.on == one.id
    out = tmp_path / "out"
    assert sorted(str(path.relative_to(out)) for path in out.rglob("*")) == ["a", "e", "e/f", "e/g", "z"]
    assert os.path.samefile(out / "a", out / "z")
    assert not os.path.samefile(out / "e/f", out / "e/g")


def test_links_of_a_replaced_folder_are_forgotten(tmp_path: Path) -> None:
    first = fill(tmp_path / "first", {"d/a": b"one" * 50, "keep/a": b"two" * 50})
    os.link(first / "d/a", first / "b")
    for name in ("b", "c"):
        os.link(first / "keep/a", first / "keep" / name)
    second = fill(tmp_path / "second", {"d/a": b"one" * 50, "keep/c": b"two" * 50})
    os.setxattr(second / "d", "user.overlay.opaque", b"y")
    with open_repo(tmp_path) as repo:
        one = save(repo, first)
        two = save(repo, second, parent=one.id)
        unpack(repo, two.id, tmp_path / "out")
    assert os.stat(tmp_path / "out/d/a").st_nlink == os.stat(tmp_path / "out/b").st_nlink == 1
    assert os.path.samefile(tmp_path / "out/keep/a", tmp_path / "out/keep/b")
    assert os.stat(tmp_path / "out/keep/c").st_nlink == 1
    third = fill(tmp_path / "third", {"d/other": b"o"})
    os.setxattr(third / "d", "user.overlay.opaque", b"y")
    with open_repo(tmp_path) as repo:
        unpack(repo, save(repo, third, parent=one.id).id, tmp_path / "again")
    assert os.listdir(tmp_path / "again/d") == ["other"]
    assert os.stat(tmp_path / "again/b").st_nlink == 1


# scope and exclusions

WORK = "home/user/workspace"


def test_the_scope_workspace_leaves_out_only_what_can_be_made_again(tmp_path: Path) -> None:
    kept = {
        f"{WORK}/main.py": b"m", f"{WORK}/venv/notes.txt": b"a source folder that happens to be called venv",
        f"{WORK}/src/temp/x": b"x", f"{WORK}/lib/.cache/y": b"y", "home/user/.claude/state.json": b"{}",
        "home/user/.local/share/opencode/db": b"db", "home/user/.claude.json": b"{}",
    }  # fmt: skip
    left = {
        f"{WORK}/node_modules/m/index.js": b"", f"{WORK}/a/__pycache__/m.pyc": b"", f"{WORK}/temp/t": b"", f"{WORK}/.cache/c": b"",
        f"{WORK}/.venv/pyvenv.cfg": b"home = /usr", f"{WORK}/.venv/lib/x.py": b"", "etc/passwd": b"", "home/user/.bashrc": b"",
        "home/user/.codex/auth.json": b"a key",
    }  # fmt: skip
    tree = fill(tmp_path / "tree", {**kept, **left})
    with open_repo(tmp_path) as repo:
        saved = save(repo, tree, scope="workspace")
        unpack(repo, saved.id, tmp_path / "out")
        assert {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()} == set(kept)
        assert saved.excluded == sorted(
            [
                "/etc",
                "/home/user/.bashrc",
                "/home/user/.codex/auth.json",
                *(f"/{WORK}/{name}" for name in (".cache", ".venv", "a/__pycache__", "node_modules", "temp")),
            ]
        )
        assert saved.scope == "workspace"
        everything = save(repo, tree, scope="workspace", exclude=[])
        assert everything.excluded == ["/etc", "/home/user/.bashrc"]


def test_a_virtual_environment_stays_out_when_only_part_of_it_changed(tmp_path: Path) -> None:
    first = fill(
        tmp_path / "first", {f"{WORK}/venv/pyvenv.cfg": b"", f"{WORK}/venv/lib/a.py": b"a", f"{WORK}/m.py": b"m"}
    )
    second = fill(tmp_path / "second", {f"{WORK}/venv/lib/b.py": b"b"})
    with open_repo(tmp_path) as repo:
        one = save(repo, first, scope="workspace")
        two = save(repo, second, parent=one.id, scope="workspace")
        assert two.hash == one.hash
        assert two.excluded == one.excluded == [f"/{WORK}/venv"]
        third = tmp_path / "third"
        whiteout(third / WORK / "venv")
        assert save(repo, third, parent=two.id, scope="workspace").excluded == []


def test_own_patterns_and_bad_ones(tmp_path: Path) -> None:
    tree = fill(tmp_path / "tree", {"var/log/a.log": b"", "var/log/keep.log": b"", "srv/b.log": b""})
    with open_repo(tmp_path) as repo:
        saved = save(repo, tree, exclude=["/var/log/*.log", "!keep.log"])
        assert saved.excluded == ["/var/log/a.log"]
        with pytest.raises(BadArgument, match="another scope"):
            save(repo, parent=saved.id)
        with pytest.raises(BadArgument, match="scope"):
            save(repo, tree, scope="some")
    assert Filter("all").idle


def test_sockets_and_devices_are_left_out_and_said_so(tmp_path: Path) -> None:
    base = Base({"/": str(fill(tmp_path / "base", {"run/s": b"a file in the base", "run/t": b"t"}))})
    tree = fill(tmp_path / "tree", {"run/f": b"f"})
    make_socket(tree / "run/s")
    os.mknod(tree / "null", 0o020666, os.makedev(1, 3))
    with open_repo(tmp_path) as repo:
        saved = save(repo, tree, below=base)
        assert saved.excluded == ["/null", "/run/s"]
        unpack(repo, saved.id, tmp_path / "out")
    assert os.stat(tmp_path / "out/run/s").st_rdev == 0  # the base's file must not show instead
    assert not (tmp_path / "out/null").exists()


# failures


@pytest.mark.parametrize("how", ["rewritten", "longer", "shorter"])
def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    tree = fill(tmp_path / "tree", {"log": b"x" * 1_000_000})
    os.utime(tree / "log", ns=(1, 1))
    add = Writer.add

    def add_and_change(writer: Writer, data: bytes, meta: bool = False) -> bytes:
        if how == "shorter":
            os.truncate(tree / "log", 500_000)
        else:
            with open(tree / "log", "ab" if how == "longer" else "r+b") as file:
                file.write(b"y")
        return add(writer, data, meta)

    with open_repo(tmp_path) as repo:
        with monkeypatch.context() as patched:
            patched.setattr(Writer, "add", add_and_change)
            with pytest.raises(StateConflict, match="changed while"):
                save(repo, tree)
        assert list(repo.list_records("checkpoints", full=True)) == []


def test_bad_input_changes_nothing(tmp_path: Path) -> None:
    tree = fill(tmp_path / "tree", {"f": b"f"})
    with open_repo(tmp_path) as repo:
        for how in (
            {"tag": "x" * 201},
            {"comment": "\0"},
            {"metadata": {"a": object()}},
            {"session": {"a": float("nan")}},
            {"base": {}},
        ):
            with pytest.raises(BadArgument):
                save(repo, tree, **how)
        with pytest.raises(BadArgument):
            save(repo, tree, parent_id="yesterday's")
        for parent in (new_id(), "../config", "ck_short"):
            with pytest.raises(CheckpointNotFound):
                save(repo, tree, parent=parent)
        assert list(repo.list_records("checkpoints", full=True)) == []
        saved = save(repo, tree)
        (tmp_path / "full").mkdir()
        (tmp_path / "full/mine").write_bytes(b"mine")
        (tmp_path / "elsewhere").symlink_to(tmp_path / "tree")
        for target in ("full", "full/mine", "elsewhere"):
            with pytest.raises(BadArgument, match="not an empty folder"):
                unpack(repo, saved.id, tmp_path / target)
        with pytest.raises(CheckpointNotFound):
            unpack(repo, new_id(), tmp_path / "out")
        with pytest.raises(StoreFull):
            unpack(repo, saved.id, tmp_path / "out", limit=0)
        assert not (tmp_path / "out").exists()
        assert (tmp_path / "full/mine").read_bytes() == b"mine"


def test_ids_sort_by_creation_and_after_their_parent() -> None:
    ids = [new_id() for _ in range(2000)]
    assert ids == sorted(ids)
    assert len(set(ids)) == 2000
    assert all(is_id(one) for one in ids)
    late = "ck_" + "7" + "z" * 25
    future = new_id(after=ids[-1])
    assert future > ids[-1]
    assert abs(time_of(future) / 1000 - time.time()) < 60
    assert not is_id(late.upper())


# attachments and other processes


def test_an_attached_folder_is_kept_beside_the_tree(tmp_path: Path) -> None:
    tree, image = (
        fill(tmp_path / "tree", {"f": b"f"}),
        fill(tmp_path / "image", {"pages.img": os.urandom(700_000), "meta": b"m"}),
    )
    with open_repo(tmp_path) as repo:
        saved = save(repo, tree, attachments={"memory": image})
        assert saved.memory
        assert saved.size_bytes == 700_002
        unpack_attachment(repo, saved.id, "memory", tmp_path / "out")
        assert looks(tmp_path / "out") == looks(image)
        unpack(repo, saved.id, tmp_path / "files")
        assert os.listdir(tmp_path / "files") == ["f"]


def test_entry_points_for_another_process(tmp_path: Path) -> None:
    tree = fill(tmp_path / "tree", {"f": b"f" * 1000})
    spec = RepositorySpec(str(tmp_path / "store"), tmp_path / "cache")
    call = pickle.dumps((spec, Source([tree], None, Base({"/": "/"}))))
    got_spec, source = pickle.loads(call)
    saved = capture_here(got_spec, source, base=BASE, session={})
    assert pickle.loads(pickle.dumps(saved)) == saved
    done = unpack_here(got_spec, saved.id, tmp_path / "out", since=None)
    assert pickle.loads(pickle.dumps(done)) == done
    assert looks(tmp_path / "out") == looks(tree)


NAMESPACE = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from trees import Base, looks, open_repo, save
from sandkeep.checkpoints import unpack
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


def test_progress_is_told(tmp_path: Path) -> None:
    tree = fill(tmp_path / "tree", {f"f{n}": b"x" * 100 for n in range(1500)})
    told: list[tuple[str, int, int]] = []
    with open_repo(tmp_path) as repo:
        saved = save(repo, tree, progress=lambda *facts: told.append(facts))
        unpack(repo, saved.id, tmp_path / "out", progress=lambda *facts: told.append(facts))
    for phase in ("capture", "unpack"):
        steps = [fact for fact in told if fact[0] == phase]
        assert len(steps) >= 3
        assert steps == sorted(steps)
        assert steps[-1][2] == 150_000


MEMORY = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from trees import open_repo, save
from sandkeep.checkpoints import unpack
root = Path(sys.argv[2])
with open_repo(root) as repo:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    saved = save(repo, root / "tree")
    unpack(repo, saved.id, root / "out")
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_does_not_follow_the_size_of_files(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    with open(tree / "big", "wb") as file:
        for number in range(300):
            file.write(number.to_bytes(4) * (1 << 18))
    run = subprocess.run(
        [sys.executable, "-c", MEMORY, str(Path(__file__).parent), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=170,
    )
    assert int(run.stdout) < 150 << 10  # KiB, for a file of 300 MiB
