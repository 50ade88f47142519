"""Control groups of sandboxes, version 1, 2 or both: limits, freezing, counting, killing, removing.

Every sandbox's groups are /sandkeep-<id>-<hash of its folder> in each hierarchy (`name_of`): no parent is shared, so that none is
left, and copies of one id in two homes of a machine stay apart. Files are read and written directly: no program is started.
"""

from __future__ import annotations

import contextlib
import hashlib
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


def name_of(id: str, dir: Path) -> str:
    """What the functions below call `name`."""
    return f"sandkeep-{id}-{hashlib.sha256(os.fsencode(dir.resolve())).hexdigest()[:8]}"


def names() -> list[str]:
    """Of every sandbox on this machine, whoever's."""
    places = dict.fromkeys(hierarchies().values())
    return sorted({name for place in places for name in os.listdir(place) if name.startswith("sandkeep-")})


def of_folder(dir: Path) -> list[str]:
    """Those whose sandbox has this folder, whatever its id."""
    return [name for name in names() if name.endswith(name_of("", dir).removeprefix("sandkeep-"))]


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


def groups(name: str) -> list[Path]:
    """The sandbox's groups that exist."""
    places = dict.fromkeys(hierarchies().values())
    return [group for group in (place / name for place in places) if group.is_dir()]


def holds(name: str, pid: int) -> bool:
    """Whether the process is in one of the sandbox's groups."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return False
    return any(name in line.split(":", 2)[2].split("/") for line in lines)


def make(name: str, limits: Limits) -> list[Path]:
    """Make the groups with their limits; a process that writes 0 to each answered file has joined."""
    wanted = {controller: place for controller, place in controllers().items() if controller in _USED}
    for controller, place in wanted.items():
        if place == hierarchies().get("unified") and controller != "freezer":
            _enable(place, controller)
        (place / name).mkdir(parents=True, exist_ok=True)
    _limit(name, limits)
    return [place / name / "cgroup.procs" for place in dict.fromkeys(wanted.values())]


def _enable(place: Path, name: str) -> None:
    control = place / "cgroup.subtree_control"
    if name not in control.read_text().split():
        control.write_text(f"+{name}")


def _limit(name: str, limits: Limits) -> None:
    def put(controller: str, old: dict[str, object], new: dict[str, object]) -> None:
        place = controllers().get(controller)
        if place is None:  # told by missing(), for the caller to refuse
            return
        for file, value in (new if place == hierarchies().get("unified") else old).items():
            (place / name / file).write_text(str(value))

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


def has_freezer(name: str) -> bool:
    place = controllers().get("freezer")
    return place is not None and (place / name).is_dir()


def _freezer(name: str) -> Path:
    if not has_freezer(name):
        raise RuntimeFailed(f"{name} has no freezer group", "it has ended, or this host has no freezer")
    return controllers()["freezer"] / name


def freeze(name: str) -> None:
    """Returns when every process of the sandbox stands still."""
    group = _freezer(name)
    end = time.monotonic() + _PATIENCE
    try:
        _ask_to_freeze(group)
        again = time.monotonic() + 0.05
        while not _is_frozen(group):
            now = time.monotonic()
            if now > end:
                raise RuntimeFailed(f"{name} could not be frozen in {_PATIENCE:.0f} s")
            if now > again:
                # Version 1 gets stuck on a task that was forking or exec'ing just then; let it go on and ask once more.
                thaw(name)
                time.sleep(0.01)
                _ask_to_freeze(group)
                again = time.monotonic() + 0.05
            time.sleep(0.0005)
    except BaseException:
        thaw(name)
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


def thaw(name: str) -> None:
    group = _freezer(name)
    old = group / "freezer.state"
    if old.exists():
        old.write_text("THAWED")
    else:
        (group / "cgroup.freeze").write_text("0")


def pids(name: str) -> list[int]:
    """The processes in the sandbox's groups."""
    found: set[int] = set()
    for group in groups(name):
        try:
            found.update(int(word) for word in (group / "cgroup.procs").read_text().split())
        except (FileNotFoundError, OSError):
            continue
    return sorted(found - {0})


def kill(name: str) -> None:
    """SIGKILL to what is in the groups now, frozen or not. Nothing to do is fine."""
    for pid in pids(name):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if has_freezer(name):
        with contextlib.suppress(RuntimeFailed, OSError):
            thaw(name)


def destroy(name: str) -> None:
    """Kill what is left in the groups and remove them. Nothing to do is fine."""
    end = time.monotonic() + _PATIENCE
    while left := groups(name):
        kill(name)
        for group in left:
            _remove(group)
        if time.monotonic() > end:
            raise RuntimeFailed(f"control groups {name} can't be removed: {', '.join(map(str, left))}")
        if groups(name):
            time.sleep(0.001)


def remove_empty(name: str) -> None:
    """Remove the groups if nothing is in them, be it something that our pid namespace does not show."""
    for group in groups(name):
        _remove(group)


def _remove(group: Path) -> None:
    try:
        for entry in os.scandir(group):
            if entry.is_dir(follow_symlinks=False):
                _remove(Path(entry.path))
        os.rmdir(group)
    except OSError:  # busy until the last process is reaped, or removed by another: the caller looks again
        pass


def usage(name: str) -> dict[str, float]:
    """What the groups count: processor seconds, memory with page cache, processes."""

    def number(controller: str, old: str, new: str, key: str = "") -> float | None:
        place = controllers().get(controller)
        if place is None:
            return None
        file = place / name / (new if place == hierarchies().get("unified") else old)
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
    return {what: value for what, value in found.items() if value is not None}
