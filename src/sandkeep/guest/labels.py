"""Attributes of files whose file system has none (gVisor's): kept by path in one file beside them, which is saved as any other is.

They follow what the guest itself moves and go with what it writes anew or removes. Of what programs do by themselves nothing is
known: a file moved away leaves them behind, and one that another takes the place of hands them on.
"""

from __future__ import annotations

import json
import os
import stat

from .problems import Problem, file_problem

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Dict, Optional

    Labels = Dict[str, Dict[str, str]]

PLACE = "/var/lib/sandkeep/attributes"
_MOST = 16 << 20


def read() -> Labels:
    """All that is kept; nothing if a program inside made something else of it."""
    try:
        fd = os.open(PLACE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return {}
    with open(fd, "rb") as source:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST:
            return {}
        try:
            kept = json.loads(source.read(_MOST))
        except (ValueError, RecursionError):
            return {}
    good = isinstance(kept, dict) and all(isinstance(one, dict) and _good(one) for one in kept.values())
    return kept if good else {}


def _good(one: Dict[Any, Any]) -> bool:
    return all(name.startswith("user.") and isinstance(value, str) for name, value in one.items())


def of(kept: Labels, path: str) -> Dict[str, str]:
    return kept.get(os.path.realpath(path), {}) if kept else {}


def place(path: str) -> str:
    """What a name is kept by: that of a link itself, not what it leads to."""
    above, name = os.path.split(path.rstrip("/"))
    if name in ("", ".", ".."):
        return os.path.realpath(path)
    return os.path.join(os.path.realpath(above), name)


class Change:
    """What is kept becomes what `change` makes of it, before the block begins; if the block fails, it is again what it was."""

    def __init__(self, change: Callable[[Labels], Labels]) -> None:
        self._change = change
        self._before: Optional[Labels] = None

    def __enter__(self) -> None:
        before = read()
        after = self._change(before)
        if after != before:
            _save(after)
            self._before = before

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is not None and self._before is not None:
            _save(self._before)


def written(path: str, given: Dict[str, str]) -> Change:
    """A new file at a real path; what is gone from its folder is forgotten on the way."""
    folder = os.path.dirname(path)

    def change(kept: Labels) -> Labels:
        left = {
            at: one for at, one in kept.items() if at != path and (os.path.dirname(at) != folder or os.path.lexists(at))
        }
        return {**left, path: given} if given else left

    return Change(lambda kept: change(kept) if given or path in kept else kept)


def moved(path: str, to: str) -> Change:
    old, new = place(path), place(to)

    def change(kept: Labels) -> Labels:
        left = {at: one for at, one in kept.items() if not _within(at, new) or _within(at, old)}
        return {new + at[len(old) :] if _within(at, old) else at: one for at, one in left.items()}

    return Change(lambda kept: kept if old == new else change(kept))


def removed(path: str) -> None:
    """With a full disk they stay: nothing may stand in the way of what makes room."""
    try:
        with Change(lambda kept: {at: one for at, one in kept.items() if not _within(at, path)}):
            pass
    except Problem:
        pass


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _save(kept: Labels) -> None:
    folder = os.path.dirname(PLACE)
    os.makedirs(folder, 0o755, exist_ok=True)
    aside = os.path.join(folder, ".attributes-{}".format(os.urandom(8).hex()))
    try:
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as target:
            json.dump(kept, target, separators=(",", ":"))
        os.rename(aside, PLACE)
    except OSError as error:
        if os.path.lexists(aside):
            os.unlink(aside)
        raise file_problem(error, PLACE)
