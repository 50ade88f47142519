"""The process that shares the making of small files."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandkeep.checkpoints import beside
from sandkeep.checkpoints.unpack import unpack
from sandkeep.errors import Corrupt, StoreError
from trees import looks, open_repo, quick_folder, save

FILES = beside.WORTH + 500


@pytest.fixture(scope="module")
def saved() -> Iterator[tuple[Path, str]]:
    """A tree of many files, and the checkpoint made of it."""
    with quick_folder() as root:
        for number in range(FILES):
            path = root / "tree" / f"{number % 7}" / f"{number}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(random.Random(number % 4000).randbytes(4000))
            path.chmod(0o600 + number % 0o200)
        os.setxattr(root / "tree" / "0" / "0", "user.mark", b"x")
        os.link(root / "tree" / "1" / "1", root / "tree" / "linked")
        (root / "tree" / "large").write_bytes(os.urandom(700_000))
        with open_repo(root) as repo:
            yield root, save(repo, root / "tree").id


def test_both_make_files_and_all_are_exact(
    saved: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, checkpoint = saved
    answers: list[int] = []
    take = beside.Beside._take
    monkeypatch.setattr(
        beside.Beside, "_take", lambda self, supply, layer: (take(self, supply, layer), answers.append(layer.beside[0]))
    )
    told: list[tuple[str, int, int]] = []
    with open_repo(root) as repo:
        unpack(repo, checkpoint, tmp_path / "out", progress=lambda *facts: told.append(facts))
    assert looks(tmp_path / "out") == looks(root / "tree")
    assert 0 < answers[-1] < FILES
    assert told == sorted(told)
    assert told[-1][2] == sum(path.stat().st_size for path in (root / "tree").rglob("*") if path.is_file()) - 4000


ALTERED = (
    "import os; from sandkeep.checkpoints import beside; make = beside.Task.make; beside.Task.make = {}; beside.main()"
)


@pytest.mark.parametrize("command", [["/nonexistent"], ["sh", "-c", "exit"], ["sh", "-c", "head -c 100 >/dev/null"]])
def test_without_a_process_it_is_only_slower(
    saved: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    root, checkpoint = saved
    monkeypatch.setattr(beside, "_COMMAND", command)
    with open_repo(root) as repo:
        unpack(repo, checkpoint, tmp_path / "out")
    assert looks(tmp_path / "out") == looks(root / "tree")


@pytest.mark.parametrize(
    ("instead", "error"),
    [("lambda *_: os.abort()", StoreError), ("lambda *them: (make(*them), os.abort())", StoreError), ("lambda *_: 1 / 0", ZeroDivisionError)],
)  # fmt: skip
def test_what_fails_there_fails_here_and_leaves_nothing(
    saved: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instead: str, error: type[Exception]
) -> None:
    root, checkpoint = saved
    monkeypatch.setattr(beside, "_COMMAND", [sys.executable, "-c", ALTERED.format(instead)])
    with open_repo(root) as repo, pytest.raises(error):
        unpack(repo, checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_damage_is_found_wherever_it_is_read(saved: tuple[Path, str], tmp_path: Path) -> None:
    root, checkpoint = saved
    for pack in (root / "store" / "packs").iterdir():
        kept = pack.read_bytes()
        hurt = bytearray(kept)
        hurt[len(hurt) // 3] ^= 1
        pack.write_bytes(hurt)
        try:
            with open_repo(root) as repo, pytest.raises(Corrupt):
                unpack(repo, checkpoint, tmp_path / "out")
        finally:
            pack.write_bytes(kept)
        assert not (tmp_path / "out").exists()
