"""What works on this host and what does not: found out by doing it, each problem with the command that mends it."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from sandkeep import owned
from sandkeep.errors import RuntimeMissing, SandkeepError, Unsupported
from sandkeep.model import Limits
from sandkeep.runtime import cgroup, kernel, overlay
from sandkeep.runtime.base import Base, remove, resolve
from sandkeep.runtime.driver import DRIVERS, Driver
from sandkeep.runtime.elevate import elevated, id_map, is_root
from sandkeep.runtime.plan import Plan

PROBE = ".probe-"

_PATIENCE = 60.0
_OLDEST_RUNSC = 20240101
_FICLONE = 0x40049409
_PROCESS_1 = "ls /; i=0; while :; do i=$((i+1)); echo count $i; sleep 0.02; done"


@dataclass(frozen=True)
class Problem:
    what: str
    why: str
    mend: str


@dataclass
class Probe:
    """One runtime: `works` says of each verb whether it was seen to work."""

    name: str
    path: str | None = None
    version: str | None = None
    healthy: bool = False
    works: dict[str, bool] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


@dataclass
class Host:
    facts: dict[str, str]
    problems: list[Problem]


def probe(name: str, home: Path) -> Probe:
    """Start a sandbox with this runtime, run `ls` in it, freeze it; with runsc also save its memory and restore it."""
    driver = DRIVERS[name]
    found = Probe(name)
    try:
        found.path = driver.path()
    except RuntimeMissing as error:
        found.problems.append(Problem(f"{name} is not installed", error.message, error.remedy))
        return found
    found.version = _version(found.path)
    if name == "runsc" and _release(found.version) < _OLDEST_RUNSC:
        why = f"release {found.version} refuses calls that coreutils make: `ls` and `stat` fail inside"
        found.problems.append(Problem("runsc is too old", why, driver.install))
        return found
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    with owned.folder(PROBE, home, _remove) as folder:
        _try(found, driver, folder, resolve("host", home))
    found.healthy = found.works.get("start", False) and found.works.get("ls", False)
    return found


def _remove(folder: Path) -> None:
    elevated(remove, str(folder))


def _try(found: Probe, driver: Driver, folder: Path, base: Base) -> None:
    id = f"probe-{uuid.uuid4().hex[:12]}"
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
    argv = ["/bin/sh", "-c", _PROCESS_1]
    plan = Plan(id, folder, base, [], folder / "upper", folder / "work", "probe", argv, environment)
    steps: list[tuple[str, Callable[[], None]]] = [
        ("start", lambda: driver.start(plan)),
        ("ls", lambda: _saw_ls(folder)),
        ("freeze", lambda: _freezes(driver, plan)),
    ]
    if driver.memory:
        steps.append(("memory", lambda: _remembers(driver, plan)))
    try:
        for step, act in steps:
            try:
                act()
            except Unsupported as error:
                found.works[step] = False
                found.problems.append(Problem(f"{driver.name} {step}", error.message, error.remedy))
            else:
                found.works[step] = True
    except (SandkeepError, OSError) as error:
        found.works[step] = False
        mend = driver.install if step in ("start", "ls") else "use another runtime, or none of what needs it"
        found.problems.append(Problem(f"{driver.name} {step}", str(error), mend))
    finally:
        driver.stop(id, folder)
    for text in driver.enforceable(Limits(memory=1 << 30, cpus=1, pids=100)):
        found.problems.append(Problem(f"{driver.name} limit", text, "run as root, on a host with control groups"))


def _saw_ls(folder: Path) -> None:
    _until(lambda: _count(folder) > 0, "`ls` did not end")
    if "usr" not in (folder / "log/console").read_text().split():
        raise OSError(errno.EIO, "`ls /` inside did not show /usr")


def _freezes(driver: Driver, plan: Plan) -> None:
    driver.freeze(plan.id, plan.dir)
    try:
        before = _count(plan.dir)
        time.sleep(0.1)
        if _count(plan.dir) != before:
            raise OSError(errno.EIO, "a frozen sandbox went on")
    finally:
        driver.thaw(plan.id, plan.dir)
    _until(lambda: _count(plan.dir) > before, "a thawed sandbox did not go on")


def _remembers(driver: Driver, plan: Plan) -> None:
    driver.checkpoint(plan.id, plan.dir, plan.dir / "image", leave_running=False)
    before = _count(plan.dir)
    driver.restore(plan, plan.dir / "image")
    _until(lambda: _count(plan.dir) > before, "a restored sandbox did not go on where it was")


def _count(folder: Path) -> int:
    """The last number on the console."""
    said = re.findall(r"^count (\d+)\n", (folder / "log/console").read_text(), re.MULTILINE)
    return int(said[-1]) if said else 0


def _until(done: Callable[[], bool], otherwise: str) -> None:
    end = time.monotonic() + _PATIENCE
    while not done():
        if time.monotonic() > end:
            raise OSError(errno.ETIMEDOUT, f"{otherwise} in {_PATIENCE:.0f} s")
        time.sleep(0.005)


def _version(path: str) -> str:
    said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=_PATIENCE).stdout
    first = (said.splitlines() or [""])[0]
    return first.split("version", 1)[-1].strip()


def _release(version: str) -> int:
    """The date in a version of runsc; one without a date is a build of somebody's own, and taken as new."""
    match = re.search(r"20\d{6}", version)
    return int(match[0]) if match else _OLDEST_RUNSC


def host(home: Path) -> Host:
    """What the host gives, whichever runtime is used."""
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    problems: list[Problem] = []
    with owned.folder(PROBE, home, _remove) as folder:
        refused = elevated(_mounts_overlay, str(folder))
        reflink = _clones(folder)
    if refused:
        problems.append(
            Problem(
                "overlay mounts",
                f"{home}: {refused}",
                "use a kernel of 5.11 or newer, and a home on ext4, xfs or btrfs",
            )
        )
    ids = {"root": "all", "many": "subordinate ids", "one": "only root inside"}[id_map()]
    if id_map() == "one":
        mend = f"apt-get install uidmap; usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {os.getuid()}"
        problems.append(Problem("subordinate ids", "there is no user but root inside sandboxes", mend))
    if not cgroup.usable():
        why = "memory and cpu limits are refused, and freezing is left to the guest"
        problems.append(Problem("control groups", why, "run as root" if not is_root() else "mount a cgroup filesystem"))
    kind = "version 2" if cgroup.is_unified() else "hybrid" if "unified" in cgroup.hierarchies() else "version 1"
    facts = {
        "kernel": os.uname().release,
        "ids": ids,
        "cgroups": f"{kind}: {' '.join(sorted(cgroup.controllers())) or 'none usable'}",
        "overlay": refused or "works",
        "reflink": "yes" if reflink else "no",
        "free": f"{shutil.disk_usage(home).free >> 20} MiB",
    }
    return Host(facts, problems)


def _mounts_overlay(folder: str) -> str:
    """Why an overlay can't be mounted here; nothing when it can."""
    place = Path(folder)
    for name in ("lower", "upper", "work", "root"):
        (place / name).mkdir()

    def attempt() -> None:
        kernel.private_mounts()
        stack = overlay.Stack([place / "lower"], place / "upper", place / "work", volatile=False)
        overlay.attach(overlay.Root(overlay.mount(stack), None), place / "root")
        (place / "root/file").write_text("x")

    try:
        kernel.in_thread(attempt)
    except OSError as error:
        return str(error)
    return "" if (place / "upper/file").exists() else "a write did not reach the upper folder"


def _clones(folder: Path) -> bool:
    (folder / "original").write_bytes(b"x" * 65536)
    with open(folder / "original", "rb") as source, open(folder / "clone", "wb") as target:
        try:
            fcntl.ioctl(target, _FICLONE, source.fileno())
        except OSError:
            return False
    return True
