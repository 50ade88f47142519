"""Control groups of sandboxes, version 1, 2 or both: limits, freezing, counting, killing, removing.

Every sandbox's groups are /sandkeep-<id> in each hierarchy: no parent is shared, so that none is left. Files are read and written directly: no program is started.
"""

from __future__ import annotations

import os
import signal
import time
from functools import cache
from pathlib import Path

from sandkeep.errors import RuntimeFailed
from sandkeep.model import Limits

_USED = ("memory", "cpu", "pids", "freezer", "cpuacct")
_PERIOD = 100_000
_PATIENCE = 60.0


@cache
def hierarchies() -> dict[str, Path]:
    """Controller to mount point; the unified (version 2) hierarchy is "unified"."""
    found: dict[str, Path] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        place = Path(left.split(" ")[4])
        if kind == "cgroup2":
            found["unified"] = place
        elif kind == "cgroup":
            for name in options.split(","):
                found.setdefault(name, place)
    return found


@cache
def controllers() -> dict[str, Path]:
    """The controllers that can be used here, each with its hierarchy's mount point."""
    known = hierarchies()
    found: dict[str, Path] = {name: known[name] for name in _USED if name in known}
    if "unified" in known:
        for name in (known["unified"] / "cgroup.controllers").read_text().split():
            found.setdefault(name, known["unified"])
        found.setdefault("freezer", known["unified"])
    return {name: place for name, place in found.items() if os.access(place, os.W_OK)}


def name_of(id: str) -> str:
    return f"sandkeep-{id}"


def usable() -> bool:
    return "freezer" in controllers()


def is_unified() -> bool:
    """True where version 2 is all there is."""
    return set(hierarchies()) == {"unified"}


def swap_limit() -> bool:
    place = controllers().get("memory")
    if place is None or place == hierarchies().get("unified"):
        return place is not None and os.path.exists("/proc/swaps")
    return (place / "memory.memsw.limit_in_bytes").exists()


def missing(limits: Limits) -> list[str]:
    """The limits asked for that no controller here can hold."""
    asked = {"memory": limits.memory, "cpu": limits.cpus, "pids": limits.pids}
    names = {"cpu": "cpus"}
    return [names.get(name, name) for name, value in asked.items() if value is not None and name not in controllers()]


def groups(id: str) -> list[Path]:
    """The sandbox's groups that exist."""
    places = dict.fromkeys(hierarchies().values())
    return [group for group in (place / name_of(id) for place in places) if group.is_dir()]


def make(id: str, limits: Limits) -> list[Path]:
    """Make the groups with their limits; a process that writes 0 to each answered file has joined."""
    wanted = {name: place for name, place in controllers().items() if name in _USED}
    for name, place in wanted.items():
        group = place / name_of(id)
        if place == hierarchies().get("unified") and name != "freezer":
            _enable(place, name)
        group.mkdir(parents=True, exist_ok=True)
    _limit(id, limits)
    return [place / name_of(id) / "cgroup.procs" for place in dict.fromkeys(wanted.values())]


def _enable(place: Path, name: str) -> None:
    control = place / "cgroup.subtree_control"
    if name not in control.read_text().split():
        control.write_text(f"+{name}")


def _limit(id: str, limits: Limits) -> None:
    def put(controller: str, old: dict[str, object], new: dict[str, object]) -> None:
        place = controllers().get(controller)
        if place is None:  # told by missing(), for the caller to refuse
            return
        for file, value in (new if place == hierarchies().get("unified") else old).items():
            (place / name_of(id) / file).write_text(str(value))

    if limits.memory is not None:
        swap: dict[str, object] = {"memory.memsw.limit_in_bytes": limits.memory} if swap_limit() else {}
        new: dict[str, object] = {"memory.max": limits.memory, **({"memory.swap.max": 0} if swap_limit() else {})}
        put("memory", {"memory.limit_in_bytes": limits.memory, **swap}, new)
    if limits.cpus is not None:
        quota = max(1000, int(limits.cpus * _PERIOD))
        old: dict[str, object] = {"cpu.cfs_period_us": _PERIOD, "cpu.cfs_quota_us": quota}
        put("cpu", old, {"cpu.max": f"{quota} {_PERIOD}"})
    if limits.pids is not None:
        put("pids", {"pids.max": limits.pids}, {"pids.max": limits.pids})


def has_freezer(id: str) -> bool:
    place = controllers().get("freezer")
    return place is not None and (place / name_of(id)).is_dir()


def _freezer(id: str) -> Path:
    if not has_freezer(id):
        raise RuntimeFailed(f"sandbox {id} has no freezer group", "it has ended, or this host has no freezer")
    return controllers()["freezer"] / name_of(id)


def freeze(id: str) -> None:
    """Returns when every process of the sandbox stands still."""
    group = _freezer(id)
    end = time.monotonic() + _PATIENCE
    try:
        _ask_to_freeze(group)
        again = time.monotonic() + 0.05
        while not _is_frozen(group):
            now = time.monotonic()
            if now > end:
                raise RuntimeFailed(f"sandbox {id} could not be frozen in {_PATIENCE:.0f} s")
            if now > again:
                # Version 1 gets stuck on a task that was forking or exec'ing just then; let it go on and ask once more.
                thaw(id)
                time.sleep(0.01)
                _ask_to_freeze(group)
                again = time.monotonic() + 0.05
            time.sleep(0.0005)
    except BaseException:
        thaw(id)
        raise


def _ask_to_freeze(group: Path) -> None:
    old = group / "freezer.state"
    if old.exists():
        old.write_text("FROZEN")
    else:
        (group / "cgroup.freeze").write_text("1")


def _is_frozen(group: Path) -> bool:
    old = group / "freezer.state"
    if old.exists():
        return old.read_text().strip() == "FROZEN"
    return "frozen 1" in (group / "cgroup.events").read_text()


def thaw(id: str) -> None:
    group = _freezer(id)
    old = group / "freezer.state"
    if old.exists():
        old.write_text("THAWED")
    else:
        (group / "cgroup.freeze").write_text("0")


def pids(id: str) -> list[int]:
    """The processes in the sandbox's groups."""
    found: set[int] = set()
    for group in groups(id):
        try:
            found.update(int(word) for word in (group / "cgroup.procs").read_text().split())
        except (FileNotFoundError, OSError):
            continue
    return sorted(found - {0})


def destroy(id: str) -> None:
    """Kill what is left in the groups and remove them. Nothing to do is fine."""
    end = time.monotonic() + _PATIENCE
    while left := groups(id):
        for pid in pids(id):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if has_freezer(id):
            try:
                thaw(id)
            except (RuntimeFailed, OSError):
                pass
        for group in left:
            _remove(group)
        if time.monotonic() > end:
            raise RuntimeFailed(f"control groups of sandbox {id} can't be removed: {', '.join(map(str, left))}")
        if groups(id):
            time.sleep(0.001)


def _remove(group: Path) -> None:
    try:
        for entry in os.scandir(group):
            if entry.is_dir(follow_symlinks=False):
                _remove(Path(entry.path))
        os.rmdir(group)
    except OSError:  # busy until the last process is reaped, or removed by another: the caller looks again
        pass


def usage(id: str) -> dict[str, float]:
    """What the groups count: processor seconds, memory with page cache, processes."""

    def number(controller: str, old: str, new: str, key: str = "") -> float | None:
        place = controllers().get(controller)
        if place is None:
            return None
        file = place / name_of(id) / (new if place == hierarchies().get("unified") else old)
        try:
            text = file.read_text()
        except OSError:
            return None
        words = text.split()
        return float(words[words.index(key) + 1] if key in words else words[0])

    unified = "cpuacct" not in controllers()
    cpu = number("cpu" if unified else "cpuacct", "cpuacct.usage", "cpu.stat", "usage_usec")
    found = {
        "cpu_seconds": None if cpu is None else cpu / (1e6 if unified else 1e9),
        "memory_bytes": number("memory", "memory.usage_in_bytes", "memory.current"),
        "processes": number("pids", "pids.current", "pids.current"),
    }
    return {name: value for name, value in found.items() if value is not None}
