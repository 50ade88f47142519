"""The checker of layers: each break of the rules is named, and what keeps them is not."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from conftest import Make
from sandkeep.checkpoints.base import Base
from sandkeep.checkpoints.unpack import unpack
from sandkeep.cli.main import main
from sandkeep.layers import overlay
from sandkeep.layers.check import breaks
from trees import fill, make_socket, open_repo, save, whiteout


@pytest.fixture
def stack(tmp_path: Path) -> list[Path]:
    """A layer on a layer that lies on a base: all have `d`, the base alone `b`, the lower one alone `new`."""
    base, lower, upper = (tmp_path / name for name in ("base", "lower", "upper"))
    for folder in (base / "d", base / "b", base / "usr", lower / "d", lower / "new", upper / "d", upper / "usr"):
        folder.mkdir(parents=True)
    return [upper, lower, base]


def found(stack: list[Path]) -> list[tuple[str, str, str]]:
    *layers, base = stack
    below = Base({"/": str(base), "/usr": str(base / "usr")})
    return [(one.tree.name, one.path, one.why.split(":")[0]) for one in breaks(layers, below, own_usr=True)]


LISTED = "a whiteout in a folder that nothing below has"


def test_what_keeps_the_rules(stack: list[Path]) -> None:
    upper, lower, _ = stack
    for path in (upper / "d/x", upper / "new/x", upper / "b/x", upper / "x", upper / "usr/x", lower / "d/y"):
        whiteout(path)
    overlay.set_opaque(lower / "new")
    os.setxattr(upper / "d", "user.overlay.origin", b"")
    os.setxattr(upper / "d", "user.overlay.impure", b"y")
    os.setxattr(upper / "d", "user.overlay.overlay.opaque", b"y")
    os.mkfifo(upper / "fifo")
    make_socket(upper / "socket")
    (upper / "one").write_text("x")
    os.link(upper / "one", upper / "d/two")
    assert found(stack) == []


def test_whiteouts_that_the_kernel_would_list(stack: list[Path]) -> None:
    upper, lower, _ = stack
    whiteout(upper / "only/x")
    whiteout(lower / "new/x")
    overlay.set_opaque(upper / "d")
    whiteout(upper / "d/x")
    whiteout(upper / "d/deeper/x")
    assert sorted(found(stack)) == [
        ("lower", "new/x", LISTED),
        ("upper", "d/deeper/x", LISTED),
        ("upper", "d/x", LISTED),
        ("upper", "only/x", LISTED),
    ]


def test_a_whiteout_below_hides_the_base(stack: list[Path]) -> None:
    upper, lower, _ = stack
    (upper / "b").mkdir()
    whiteout(upper / "b/x")
    whiteout(lower / "b")
    assert found(stack) == [("upper", "b/x", LISTED)]


def test_marks_and_kinds_that_do_not_belong_there(stack: list[Path]) -> None:
    upper, lower, _ = stack
    (upper / "file").write_text("x")
    for path, name in ((upper / "d", "redirect"), (upper / "file", "metacopy"), (upper / "file", "opaque")):
        os.setxattr(path, f"user.overlay.{name}", b"y")
    os.setxattr(lower / "d", "user.overlay.opaque", b"x")
    overlay.set_opaque(upper)
    overlay.set_opaque(upper / "usr")
    os.mknod(upper / "device", 0o020600, os.makedev(1, 3))
    (lower / "usr").symlink_to("elsewhere")
    assert sorted(found(stack)) == [
        ("lower", "d", "opaque, but not by 'y'"),
        ("lower", "usr", "is no folder, but an overlay of its own is to be there"),
        ("upper", "", "opaque, where that means nothing"),
        ("upper", "d", "the attribute user.overlay.redirect is foreign"),
        ("upper", "device", "a device"),
        ("upper", "file", "the attribute user.overlay.metacopy is foreign"),
        ("upper", "file", "the attribute user.overlay.opaque is foreign"),
        ("upper", "usr", "opaque, where that means nothing"),
    ]


def test_a_file_with_a_name_outside(stack: list[Path], tmp_path: Path) -> None:
    (stack[0] / "file").write_text("x")
    os.link(stack[0] / "file", tmp_path / "outside")
    assert found(stack) == [("upper", "file", "has 2 names, 1 of them in this layer")]


def test_gc_check_names_breaks_and_ends_with_5(make: Make, home: Path) -> None:
    sb = make()
    sb.commands.run("mkdir d; touch d/file")
    saved = sb.snapshot()

    def check(*more: str) -> tuple[int, str]:
        told = CliRunner().invoke(main, ["gc", "--check", "--home", str(home), *more])
        return told.exit_code, told.stdout

    assert check() == (0, "every layer keeps the rules\n")
    bad = home / "layers" / saved.layers[0] / "tree/srv/made/x"
    whiteout(bad)
    code, told = check()
    assert code == 5
    assert f"{saved.layers[0]} /srv/made/x: {LISTED}" in told
    code, told = check("--json")
    assert (code, [one["path"] for one in json.loads(told)]) == (5, ["/srv/made/x"])
    bad.unlink()
    bad.parent.rmdir()


def test_a_checkpoint_deletes_nothing_where_this_base_has_no_folder(root: Path) -> None:
    """It was saved on another machine's base. A whiteout in a folder that nothing below has would be listed."""
    repo = open_repo(root)
    there, here, tree = root / "there", root / "here", root / "tree"
    for folder in (there / "d/inner", there / "e", here / "e", tree / "d/inner", tree / "e"):
        folder.mkdir(parents=True)
    for name in ("d/x", "d/inner/x", "d/inner/y", "e/x", "e/y"):
        (there / name).write_text("x")
    for name in ("d/x", "d/inner/x", "e/x"):
        whiteout(tree / name)
    kept = save(repo, tree, below=Base({"/": str(there)}))
    below = Base({"/": str(here)})
    unpack(repo, kept.id, root / "layer", base=below)
    assert breaks([root / "layer"], below) == []
    assert (root / "layer/e/x").is_char_device()
    assert sorted(path.name for path in (root / "layer/d").rglob("*")) == ["inner"]
    fill(root / "empty", {})
    empty = save(repo, root / "empty", below=Base({"/": str(there)}))
    unpack(repo, empty.id, root / "under", base=below)
    unpack(repo, kept.id, root / "over", base=below, since=empty.id)
    assert breaks([root / "over", root / "under"], below) == []
