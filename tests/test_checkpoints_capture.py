"""Capture and unpack: canonical, cheap where little changed, layered as overlay does, whole or not at all.

With test_checkpoints_exact, _scope, _roundtrip (deletions), _hostile (many writers, verified content) and _store (forget, gc, facts readable
before anything is fetched) this shows that what Evolve gets wrong in storage is right here.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from sandkeep.checkpoints.base import Base
from sandkeep.checkpoints.capture import Source, load_record
from sandkeep.checkpoints.records import is_id, new_id, time_of
from sandkeep.checkpoints.remote import RepositorySpec, capture_here, unpack_here
from sandkeep.checkpoints.unpack import unpack, unpack_attachment
from sandkeep.errors import BadArgument, CheckpointNotFound, StateConflict, StoreFull
from sandkeep.store.writer import Writer
from trees import BASE, fill, looks, open_repo, save, view, whiteout

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


def test_a_small_change_adds_little_even_in_a_huge_folder(root: Path) -> None:
    tree = root / "tree"
    tree.mkdir()
    for number in range(20_000):
        os.mknod(tree / f"file-{number:05d}", 0o100644)
    edit = fill(root / "edit", {"file-07777": b"changed", "file-new": b"n"})
    whiteout(edit / "file-00042")
    with open_repo(root) as repo:
        first = save(repo, tree)
        second = save(repo, edit, parent=first.id)
        assert second.new_bytes < 40_000
        (tree / "file-07777").write_bytes(b"changed")
        (tree / "file-new").write_bytes(b"n")
        (tree / "file-00042").unlink()
        assert save(repo, tree).hash == second.hash
        unpack(repo, second.id, root / "out")
        assert sorted(os.listdir(root / "out")) == sorted(os.listdir(tree))


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


# failures


@pytest.mark.parametrize("how", ["rewritten", "longer", "shorter"])
@pytest.mark.parametrize(("size", "method"), [(200_000, "add"), (1_000_000, "_add_now")])
def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, size: int, method: str
) -> None:
    tree = fill(tmp_path / "tree", {"log": b"x" * size})
    os.utime(tree / "log", ns=(1, 1))
    add = getattr(Writer, method)

    def add_and_change(writer: Writer, data: bytes, **how_to: bool) -> bytes:
        if how == "shorter":
            os.truncate(tree / "log", size // 2)
        else:
            with open(tree / "log", "ab" if how == "longer" else "r+b") as file:
                file.write(b"y")
        return add(writer, data, **how_to)  # type: ignore[no-any-return]

    with open_repo(tmp_path) as repo:
        with monkeypatch.context() as patched:
            patched.setattr(Writer, method, add_and_change)
            with pytest.raises(StateConflict, match="changed while"):
                save(repo, tree)
        assert list(repo.list_records("checkpoints", full=True)) == []


def nested(levels: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(levels):
        found = {"a": found}
    return found


def test_bad_input_changes_nothing(tmp_path: Path) -> None:
    tree = fill(tmp_path / "tree", {"f": b"f"})
    with open_repo(tmp_path) as repo:
        for how in (
            {"tag": "x" * 201},
            {"comment": "\0"},
            {"metadata": {"a": object()}},
            {"metadata": {1: "a key that no record keeps"}},
            {"metadata": {"a": 1 << 64}},
            {"metadata": {"a": "\ud800"}},
            {"metadata": nested(3000)},
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


# attachments, other processes, progress


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
