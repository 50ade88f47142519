"""The difference of two checkpoints tells of all that was saved, not of files alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from agents_kit import SECRET, home_at
from sandkeep import Sandbox, Store
from sandkeep.cli.main import main
from trees import fill, save

SHELL = {
    "variables": {"X": 'declare -- X="2"\n'},
    "functions": "f () \n{ \n    echo a\n}\n",
    "aliases": "alias ll='ls -l'\n",
}
SESSION: dict[str, Any] = {
    "cwd": "/a",
    "user": "user",
    "env": {"A": "1", "K": "k"},
    "shell": SHELL,
    "workflow": {"step": 1},
}
RUN = {"pid": 4, "code": "sleep 9", "running": True}


@pytest.mark.parametrize(
    ("other", "loose", "expected"),
    [
        ({}, {}, []),
        ({"cwd": "/b"}, {}, [("cwd", "changed", "cwd", "/a", "/b")]),
        ({"user": "root"}, {}, [("user", "changed", "user", "user", "root")]),
        ({"env": {"A": "2", "B": ""}}, {}, [("env", "changed", "A"), ("env", "added", "B"), ("env", "removed", "K")]),
        ({"workflow": {"step": True, "/new": []}}, {}, [("workflow", "added", "/new"), ("workflow", "changed", "step")]),
        ({"workflow": {"step": 1.0}}, {}, [("workflow", "changed", "step")]),
        ({"shell": {**SHELL, "variables": {}}}, {}, [("variable", "removed", "X")]),
        ({"shell": {**SHELL, "aliases": ""}}, {}, [("alias", "removed", "ll")]),
        ({"shell": {**SHELL, "options": "umask 0027\nset -o noglob\nshopt -s extglob\n"}}, {}, [
            ("option", "added", "extglob"), ("option", "added", "noglob"), ("option", "added", "umask"),
        ]),
        ({"shell": {**SHELL, "functions": "f () \n{ \n    echo b\n}\ng () \n{ \n    :\n}\n"}}, {}, [
            ("function", "changed", "f"), ("function", "added", "g"),
        ]),
        ({"shell": {**SHELL, "functions": "what nobody foresaw"}}, {}, [("function", "removed", "f")]),
        ({}, {"processes": [RUN, {**RUN, "pid": 5, "running": False}]}, [("process", "added", "4 sleep 9")]),
        ({}, {"image": {"runtime": "runsc"}}, [("memory", "added", "memory")]),
    ],
)  # fmt: skip
def test_each_part_of_a_state_has_its_rows(
    root: Path, store: Store, other: dict[str, Any], loose: dict[str, Any], expected: list[tuple[str, ...]]
) -> None:
    tree = fill(root / "tree", {"f": b""})
    one = save(store.repo, tree, session=SESSION)
    two = save(store.repo, parent=one.id, session={**SESSION, **other}, volatile=loose)
    rows = [(row.kind, row.change, row.path, row.old, row.new) for row in store.diff(one, two)]
    assert rows == [(*row, *[""] * (5 - len(row))) for row in expected]
    swapped = {"added": "removed", "removed": "added", "changed": "changed"}
    assert {(r.kind, swapped[r.change], r.path) for r in store.diff(two, one)} == {row[:3] for row in expected}


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    with home_at(tmp_path / "home") as made:
        yield made


def test_all_that_a_sandbox_became_is_told_and_no_secret(home: Path) -> None:
    with Sandbox(home=home, secrets={"TOKEN": SECRET}) as sandbox, Store(home=home) as store:
        one = sandbox.checkpoint()
        sandbox.commands.run("echo n > new; mkdir d; export B=1; C=$TOKEN; export D=$TOKEN; f() { :; }; cd /tmp")
        sandbox.workflow.set_state("step", 2)
        sandbox.commands.run("sleep 1000; : $TOKEN", background=True)
        two = sandbox.checkpoint()
        rows = {(row.kind, row.change, row.path) for row in store.diff(one, two)}
        assert {
            ("file", "added", "/home/user/workspace/new"), ("env", "added", "B"),
            ("function", "added", "f"), ("cwd", "changed", "cwd"), ("workflow", "added", "step"),
        } <= rows  # fmt: skip
        assert next(path for kind, _, path in rows if kind == "process").endswith(" sleep 1000; : $TOKEN")
        shown = CliRunner().invoke(main, ["checkpoint", "diff", one.id, two.id, "--home", str(home)])
        told = shown.stdout
        assert shown.exit_code == 0, told
        assert {"cwd /home/user/workspace -> /tmp", "env B", "function f", "workflow step"} <= set(cells(told))
        assert "/home/user/workspace/new" in cells(told)
        asked = CliRunner().invoke(main, ["checkpoint", "diff", one.id, two.id, "--home", str(home), "--json"]).stdout
        assert {"kind": "env", "path": "B"}.items() <= next(r for r in json.loads(asked) if r["path"] == "B").items()
        assert SECRET not in told + asked


def cells(told: str) -> list[str]:
    """The second column."""
    return [line.split(maxsplit=1)[1].strip() for line in told.splitlines() if len(line.split(maxsplit=1)) > 1]
