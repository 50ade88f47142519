"""What a checkpoint leaves out: by its scope, by patterns, by its kind; and that it says so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sandkeep.checkpoints.base import Base
from sandkeep.checkpoints.catalog import Store
from sandkeep.checkpoints.filters import Filter
from sandkeep.checkpoints.unpack import unpack
from sandkeep.errors import BadArgument
from trees import fill, make_socket, open_repo, save, whiteout

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
        for bad in ([None], [5], ["!"], ["\udcff"]):
            with pytest.raises(BadArgument, match="pattern"):
                save(repo, tree, exclude=bad)
        with pytest.raises(BadArgument, match="list of patterns"):
            save(
                repo, tree, exclude="*.log"
            )  # as a list it would be five patterns, the first of which is for everything
    assert Filter("all").idle


@pytest.mark.parametrize(
    ("patterns", "left", "kept"),
    [
        (["*.log"], ["a.log", "x\n/a.log", "\udcff.log"], ["a.log\n", "A.LOG", "a.logs"]),
        (["/a/*", "!/a/x"], ["a/y"], ["a/x", "b/a/y"]),
        (["a/", "!a/x"], ["a"], ["b/x"]),
        (["\\#f", "\\!f", "f\\ ", "# f", ""], ["#f", "!f", "f "], ["f", " f"]),
        (["a/**/d"], ["a/b/c/d", "a/d"], ["d", "b/a/d"]),
        (["foo[1]", "?x"], ["foo1", "yx"], ["foo[1]", "x"]),
        (["node_modules/"], ["node_modules", "a/node_modules"], ["b/node_modules.txt"]),
    ],
)
def test_patterns_are_gitignores(
    root: Path, store: Store, patterns: list[str], left: list[str], kept: list[str]
) -> None:
    folders = {"a", "node_modules", "a/node_modules"} & set(left)
    names = [f"{name}/in" if name in folders else name for name in (*left, *kept)]
    saved = save(store.repo, fill(root / "tree", dict.fromkeys(names, b"")), exclude=patterns)
    assert store.left_out(saved) == {f"/{name}": "excluded" for name in sorted(left)}
    unpack(store.repo, saved.id, root / "out")
    out = root / "out"
    assert {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()} == set(kept)


def test_all_that_was_left_out_can_be_seen(root: Path, store: Store) -> None:
    tree = fill(root / "tree", {f"{n:03d}.log": b"" for n in range(150)})
    make_socket(tree / "socket")
    saved = save(store.repo, tree, exclude=["*.log"])
    assert saved.excluded[99:] == ["/099.log", "… and 51 more"]
    assert len(store.left_out(saved)) == 151
    assert store.left_out(saved)["/socket"] == "socket"


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


def test_a_name_that_only_begins_like_one_that_is_kept_is_left_out(tmp_path: Path) -> None:
    kept = [f"{WORK}/f", "home/user/.claude/f", "home/user/.claude.json", "home/user/.local/share/opencode/f"]
    near = [f"{WORK}2/f", f"{WORK}.old/f", "home/user/.claudette/f", "home/user/.claude.json.bak", "home/us/f", "home/user/.local/share/open/f"]  # fmt: skip
    tree = fill(tmp_path / "tree", dict.fromkeys([*kept, *near], b"x"))
    with open_repo(tmp_path) as repo, Store(tmp_path / "store", home=tmp_path / "home") as store:
        info = save(repo, tree, scope="workspace")
        files = {one.path for one in store.find(info.id, "**/*") if one.kind == "file"}
    assert files == {f"/{name}" for name in kept}
    rules = Filter("workspace")
    assert all(rules.leaves_out(name.encode(), False) for name in near)
    assert rules.leaves_out(b"home/us", True)
    assert not rules.leaves_out(b"home", True)
