"""What a scope or exclusions leave out: a history saved step by step is what its last state, saved anew, is."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from random import Random

import pytest

from sandkeep.checkpoints.base import Base
from sandkeep.checkpoints.capture import Source, capture, load_list, load_record
from sandkeep.checkpoints.unpack import unpack
from sandkeep.errors import BadArgument
from sandkeep.model import CheckpointInfo
from sandkeep.store.repository import Repository
from trees import BASE, fill, looks, open_repo, overlay, save, whiteout

WORK = "home/user/workspace"
NAMES = [
    "a",
    "b",
    "venv",
    ".venv",
    "temp",
    "node_modules",
    "x.pyc",
    ".codex",
    ".local",
    "share",
    "opencode",
    "auth.json",
]
PATTERNS = ["node_modules/", "temp/", "*.pyc", "/home/user/.codex/auth.json"]
RULES = [{"scope": "workspace"}, {"scope": "workspace", "exclude": []}, {"exclude": PATTERNS}]
UNDER = {"etc/passwd": b"p", f"{WORK}/b/q": b"1", f"{WORK}/venv/k": b"2", "home/user/.local/f": b"3"}


def edit(random: Random, root: Path) -> None:
    """One edit somewhere; one that makes no sense changes nothing."""
    (root / WORK).mkdir(parents=True, exist_ok=True)
    everything = sorted(root.rglob("*"))
    folders = [path for path in everything if path.is_dir() and not path.is_symlink()]
    inner = [path for path in folders if path.is_relative_to(root / WORK)]
    place = random.choice(inner if random.random() < 0.7 else folders)
    at, other = place / random.choice(NAMES), random.choice(everything)
    what = random.choice(
        ["write", "write", "folder", "remove", "move", "move", "link", "symlink", "begin", "end", "anew"]
    )
    try:
        if what == "write":
            at.write_bytes(random.randbytes(10))
        elif what == "folder":
            fill(at, {"in": b"i"})
        elif what == "remove":
            shutil.rmtree(other) if other in folders else other.unlink()
        elif what == "move":
            shutil.move(other, at)
        elif what == "link":
            os.link(other, at)
        elif what == "symlink":
            at.symlink_to("a")
        elif what == "begin":
            fill(place / random.choice(["venv", ".venv"]), {"pyvenv.cfg": b"", "lib/q": b"q"})
        elif what == "end":
            random.choice([path for path in everything if path.name == "pyvenv.cfg"]).unlink()
        elif what == "anew":
            shutil.rmtree(other)
            fill(other, {"new": b"n"})
    except (OSError, IndexError, shutil.Error):
        return


def grow(
    repo: Repository, layers: list[Path], parent: str | None, base: Base, rules: dict[str, object]
) -> CheckpointInfo:
    source = Source([layers[-1]], parent, base, layers[:-1])
    return capture(repo, source, base=BASE, session={"cwd": "/"}, **rules)  # type: ignore[arg-type]


@pytest.mark.parametrize("rules", RULES, ids=["workspace", "workspace, nothing excluded", "all, patterns"])
@pytest.mark.parametrize("seed", [2, 3, 6, 8, 13])
def test_every_history_saved_step_by_step_is_its_last_state_saved_anew(
    root: Path, rules: dict[str, object], seed: int
) -> None:
    draw = Random(seed)
    under = fill(root / "base", UNDER if seed % 2 else {"etc/passwd": b"p"})
    base, layers, parent, restored = Base({"/": str(under)}), list[Path](), None, False
    with open_repo(root) as repo:
        for step in range(8):
            if parent and draw.random() < 0.15:
                unpack(repo, parent, root / f"restored{step}", base=base)
                layers, restored = [root / f"restored{step}"], True
            upper = root / f"upper{step}"
            with overlay(root, [under, *layers], upper) as mounted:
                for _ in range(draw.randint(1, 6)):
                    edit(draw, mounted)
            layers.append(upper)
            grown = grow(repo, layers, parent, base, rules)
            anew = save(repo, *layers, below=base, **rules)
            assert grown.hash == anew.hash, step
            if not restored:
                assert left_out(repo, grown) == left_out(repo, anew), step
            parent = grown.id


def left_out(repo: Repository, saved: CheckpointInfo) -> list[object]:
    return load_list(repo, load_record(repo, saved.id).left_out)


def test_an_environment_that_is_none_any_more_is_kept_whole(tmp_path: Path) -> None:
    first = fill(tmp_path / "first", {f"{WORK}/venv/pyvenv.cfg": b"", f"{WORK}/venv/lib/a.py": b"a"})
    second = tmp_path / "second"
    whiteout(second / WORK / "venv/pyvenv.cfg")
    with open_repo(tmp_path) as repo:
        one = save(repo, first, scope="workspace")
        assert one.excluded == [f"/{WORK}/venv"]
        with pytest.raises(BadArgument, match="below"):
            save(repo, second, parent=one.id, scope="workspace")
        two = grow(repo, [first, second], one.id, Base(), {"scope": "workspace"})
        assert (two.parent_id, two.excluded) == (one.id, [])
        unpack(repo, two.id, tmp_path / "out")
    assert (tmp_path / "out" / WORK / "venv/lib/a.py").read_bytes() == b"a"


def test_a_folder_where_an_environment_was_left_out_is_kept(tmp_path: Path) -> None:
    """Restored, the environment is not there; a folder of its name that is made then is a folder."""
    first = fill(tmp_path / "first", {f"{WORK}/venv/pyvenv.cfg": b"", f"{WORK}/m.py": b"m"})
    with open_repo(tmp_path) as repo:
        one = save(repo, first, scope="workspace")
        unpack(repo, one.id, tmp_path / "back")
        second = fill(tmp_path / "second", {f"{WORK}/venv/notes.txt": b"notes"})
        two = grow(repo, [tmp_path / "back", second], one.id, Base(), {"scope": "workspace"})
        unpack(repo, two.id, tmp_path / "out")
    assert (tmp_path / "out" / WORK / "venv/notes.txt").read_bytes() == b"notes"
    assert (tmp_path / "out" / WORK / "m.py").read_bytes() == b"m"


def test_what_was_deleted_above_what_a_scope_keeps_stays_deleted(tmp_path: Path) -> None:
    under = fill(tmp_path / "base", {f"{WORK}/deleted": b"d", "home/user/.local/share/opencode/deleted": b"d"})
    base = Base({"/": str(under)})
    first, second = tmp_path / "first", fill(tmp_path / "second", {f"{WORK}/kept": b"k"})
    whiteout(first / "home/user")
    with open_repo(tmp_path) as repo:
        one = save(repo, first, below=base, scope="workspace")
        two = save(repo, second, parent=one.id, below=base, scope="workspace")
        assert two.hash == save(repo, first, second, below=base, scope="workspace").hash
        for saved, expected in ((one, []), (two, ["kept"])):
            unpack(repo, saved.id, out := tmp_path / saved.id, base=base)
            with overlay(tmp_path, [under, out], tmp_path / f"{saved.id}-upper") as mounted:
                assert [path.name for path in mounted.rglob("*") if path.name in ("kept", "deleted")] == expected
    assert looks(tmp_path / one.id)
