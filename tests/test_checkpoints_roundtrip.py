"""Random edits through real overlay mounts: saved step by step or at once, and restored in any way, a state is one state."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandkeep.checkpoints.base import Base
from sandkeep.checkpoints.capture import load_record
from sandkeep.checkpoints.unpack import unpack
from trees import looks, make_socket, open_repo, overlay, quick_folder, save, view

NAMES = st.sampled_from([b"a", b"b", b"sub", b"file", b"link", b"\xff\xfe", b"new\nline", b"x" * 255])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map(b"/".join)
DATA = st.one_of(
    st.binary(max_size=200),
    st.integers(0, 700_000).map(lambda size: (b"0123456789abcde\n" * (size // 16 + 1))[:size]),
    st.integers(1, 600_000).map(bytes),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), PATHS, DATA),
        st.tuples(st.just("append"), PATHS, st.binary(min_size=1, max_size=50)),
        st.tuples(st.just("patch"), PATHS, st.integers(0, 600_000)),
        st.tuples(st.just("sparse"), PATHS, st.integers(1, 3_000_000)),
        st.tuples(st.just("mkdir"), PATHS),
        st.tuples(st.just("remove"), PATHS),
        st.tuples(st.just("empty"), PATHS),
        st.tuples(st.just("fresh"), PATHS),
        st.tuples(st.just("rename"), PATHS, PATHS),
        st.tuples(st.just("link"), PATHS, PATHS),
        st.tuples(st.just("symlink"), PATHS, PATHS),
        st.tuples(st.just("fifo"), PATHS),
        st.tuples(st.just("socket"), PATHS),
        st.tuples(st.just("chmod"), PATHS, st.sampled_from([0o700, 0o644, 0o4755, 0o1777, 0])),
        st.tuples(st.just("chown"), PATHS, st.integers(0, 70000)),
        st.tuples(st.just("xattr"), PATHS, st.binary(max_size=20)),
        st.tuples(st.just("touch"), PATHS, st.integers(-(10**15), 4 * 10**18)),
    ),
    max_size=8,
)


def at_once(path: str, flags: int) -> int:
    """A FIFO that nobody reads is an error, not a wait."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


def edit(root: Path, step: tuple[Any, ...]) -> None:
    """One edit; one that makes no sense here changes nothing."""
    what, path = step[0], os.path.join(os.fsencode(root), step[1])
    more = step[2] if len(step) > 2 else None
    try:
        if what == "write":
            with open(path, "wb", opener=at_once) as file:
                file.write(more)
        elif what == "append":
            with open(path, "r+b", opener=at_once) as file:
                file.seek(0, os.SEEK_END)
                file.write(more)
        elif what == "patch":
            with open(path, "r+b", opener=at_once) as file:
                file.seek(more)
                file.write(b"patched")
        elif what == "sparse":
            with open(path, "wb", opener=at_once) as file:
                file.seek(more)
                file.write(b"end")
                file.truncate(more + 300_000)
        elif what == "mkdir":
            os.mkdir(path)
        elif what == "remove":
            shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)
        elif what == "empty":
            for name in os.listdir(path):
                edit(root, ("remove", os.path.join(step[1], name)))
        elif what == "fresh":
            shutil.rmtree(path)
            os.mkdir(path)
        elif what == "rename":
            os.rename(path, os.path.join(os.fsencode(root), more))
        elif what == "link":
            os.link(path, os.path.join(os.fsencode(root), more), follow_symlinks=False)
        elif what == "symlink":
            os.symlink(more, path)
        elif what == "fifo":
            os.mkfifo(path)
        elif what == "socket":
            make_socket(Path(os.fsdecode(path)))
        elif what == "chmod":
            os.chmod(path, more)
        elif what == "chown":
            os.chown(path, more, more, follow_symlinks=False)
        elif what == "xattr":
            os.setxattr(path, "user.note", more, follow_symlinks=False)
        elif what == "touch":
            os.utime(path, ns=(more, more), follow_symlinks=False)
    except (OSError, shutil.Error):
        pass


def make_base(root: Path) -> Path:
    base = root / "base"
    for folder in ("a/sub/deep", "b", "sub"):
        (base / folder).mkdir(parents=True)
    for name in ("file", "a/file", "a/sub/file", "a/sub/deep/file", "b/a"):
        (base / name).write_bytes(name.encode() * 20)
    (base / "link").symlink_to("a/file")
    os.link(base / "a/file", base / "b/file")
    return base


@settings(max_examples=30)
@given(st.lists(STEPS, min_size=1, max_size=4))
def test_one_state_however_it_was_made_saved_and_restored(batches: list[list[tuple[Any, ...]]]) -> None:
    with tempfile.TemporaryDirectory(prefix="sk-roundtrip-") as name, quick_folder() as stored:
        check(Path(name), stored, batches)


def check(root: Path, stored: Path, batches: list[list[tuple[Any, ...]]]) -> None:
    base_folder = make_base(root)
    base = Base({"/": str(base_folder)})
    uppers: list[Path] = []
    with open_repo(stored) as repo:
        parent, restored = None, None
        for number, steps in enumerate(batches):
            upper = root / f"upper{number}"
            with overlay(root, [base_folder, *uppers], upper) as mounted:
                for step in steps:
                    edit(mounted, step)
                expected = looks(mounted)
            uppers.append(upper)
            saved = save(repo, upper, parent=parent, below=base)
            at_once = save(repo, *uppers, below=base)
            assert saved.hash == at_once.hash
            assert load_record(repo, saved.id).root == load_record(repo, at_once.id).root

            whole = root / f"whole{number}"
            assert unpack(repo, saved.id, whole).notes == []
            with view(root, [base_folder, whole]) as mounted:
                assert looks(mounted) == expected
            again = save(repo, whole, below=base)
            assert load_record(repo, again.id).root == load_record(repo, saved.id).root
            assert again.hash == saved.hash

            if parent is not None and restored is not None:
                layer = root / f"layer{number}"
                done = unpack(repo, saved.id, layer, since=parent, base=base)
                assert done.on == parent
                with view(root, [base_folder, restored, layer]) as mounted:
                    assert looks(mounted) == expected
                back = root / f"back{number}"
                undone = unpack(repo, parent, back, since=saved.id, base=base)
                with view(root, [base_folder, *([whole] if undone.on else []), back]) as mounted:
                    seen = looks(mounted)
                with view(root, [base_folder, restored]) as mounted:
                    assert seen == looks(mounted)
            parent, restored = saved.id, whole


def test_edits_never_wait_for_a_fifo() -> None:
    steps = [
        ("fifo", b"b/fifo"),
        *((what, b"b/fifo", more) for what, more in (("write", b"x"), ("sparse", 5), ("append", b"x"), ("patch", 5))),
    ]
    with tempfile.TemporaryDirectory(prefix="sk-roundtrip-") as name, quick_folder() as stored:
        check(Path(name), stored, [steps])


@pytest.mark.parametrize("rounds", [1, 3])
def test_what_is_equal_to_the_base_again_leaves_no_trace(tmp_path: Path, rounds: int) -> None:
    base_folder = make_base(tmp_path)
    base = Base({"/": str(base_folder)})
    times = {path: os.stat(base_folder / path).st_mtime_ns for path in ("a", "a/sub")}
    uppers: list[Path] = []
    with open_repo(tmp_path) as repo:
        for number in range(rounds):
            upper = tmp_path / f"upper{number}"
            with overlay(tmp_path, [base_folder, *uppers], upper) as mounted:
                (mounted / "a/sub/fresh").write_bytes(b"x")
                (mounted / "a/sub/fresh").unlink()
                for path, when in times.items():
                    os.utime(mounted / path, ns=(when, when))
            uppers.append(upper)
            assert load_record(repo, save(repo, *uppers, below=base).id).root.below == 0


def test_emptying_a_folder_of_the_base_is_one_state_in_two_ways(tmp_path: Path) -> None:
    base_folder = make_base(tmp_path)
    base = Base({"/": str(base_folder)})
    found = set()
    with open_repo(tmp_path) as repo:
        for way in ("fresh", "empty"):
            upper = tmp_path / way
            with overlay(tmp_path, [base_folder], upper) as mounted:
                edit(mounted, (way, b"a"))
            found.add(save(repo, upper, below=base).hash)
    assert len(found) == 1
