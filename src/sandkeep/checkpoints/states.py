"""What differs between two checkpoints beside their files: the session, the workflow state, processes, memory.

Names are told, and of values only the folder's and the user's: what a variable holds may be a secret of somebody's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from sandkeep.checkpoints.compare import Change

KINDS = ("cwd", "user", "env", "variable", "function", "alias", "option", "workflow", "process", "memory")
State = Mapping[str, Any]  # a session with its volatile part
Named = Mapping[str, Any]
_FUNCTION = re.compile(r"^(\S+) \(\) ?$", re.MULTILINE)
_ALIAS = re.compile(r"^alias (?:-- )?([^=\n]+)=", re.MULTILINE)
_OPTION = re.compile(r"^(?:set|shopt) [-+]\w+ (\w+)$|^(umask) ", re.MULTILINE)


def compare_states(old: State, new: State) -> Iterator[Change]:
    """From `old` to `new`. `path` is the name of what changed, `kind` says of what kind it is."""
    for kind in ("cwd", "user"):
        was, now = str(old.get(kind, "")), str(new.get(kind, ""))
        if was != now:
            yield Change(kind, "changed", kind, old=was, new=now)
    shell, after = _mapping(old, "shell"), _mapping(new, "shell")
    yield from _each("env", _mapping(old, "env"), _mapping(new, "env"))
    yield from _each("variable", _mapping(shell, "variables"), _mapping(after, "variables"))
    for kind, part, begin in (
        ("function", "functions", _FUNCTION),
        ("alias", "aliases", _ALIAS),
        ("option", "options", _OPTION),
    ):
        was, now = str(shell.get(part, "")), str(after.get(part, ""))
        if was != now:
            yield from [*_each(kind, _pieces(was, begin), _pieces(now, begin))] or [Change(part, "changed", kind)]
    yield from _each("workflow", _mapping(old, "workflow"), _mapping(new, "workflow"))
    yield from _each("process", _running(old), _running(new))
    yield from _each("memory", _memory(old), _memory(new))


def _each(kind: str, old: Named, new: Named) -> Iterator[Change]:
    for name in sorted({*old, *new}):
        if name not in old or name not in new or not _same(old[name], new[name]):
            change: Literal["added", "removed", "changed"]
            change = "added" if name not in old else "removed" if name not in new else "changed"
            yield Change(str(name), change, kind)


def _same(a: Any, b: Any) -> bool:
    """1, 1.0 and true are equal to Python, and three values to a driver."""
    return type(a) is type(b) and (
        a.keys() == b.keys() and all(_same(value, b[key]) for key, value in a.items())
        if isinstance(a, dict)
        else len(a) == len(b) and all(map(_same, a, b))
        if isinstance(a, list)
        else a == b
    )


def _pieces(text: str, begin: re.Pattern[str]) -> dict[str, str]:
    """What the shell printed of many things, by the name at the beginning of each."""
    starts = [*begin.finditer(text)]
    ends = [*(match.start() for match in starts[1:]), len(text)]
    names = [next(filter(None, match.groups())) for match in starts]
    return {name: text[match.start() : end] for name, match, end in zip(names, starts, ends, strict=False)}


def _running(state: State) -> dict[str, str]:
    """Commands that were running, each with its pid."""
    found = state.get("processes")
    running = [one for one in found if isinstance(one, dict) and one.get("running")] if isinstance(found, list) else []
    return {f"{one.get('pid')} {one.get('code')}": "" for one in running}


def _memory(state: State) -> dict[str, str]:
    return {"memory": ""} if state.get("image") else {}


def _mapping(state: State, name: str) -> Named:
    found = state.get(name)
    return found if isinstance(found, dict) else {}
