"""Choosing a runtime. A good verdict is kept in home/runtimes.json until the binary, the kernel or the user changes; a bad one only
saves a probe for a while and while another runtime is healthy, since what was in the way then (a full disk) may be gone."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from sandkeep.errors import BadArgument, RuntimeFailed, RuntimeMissing
from sandkeep.model import Limits
from sandkeep.runtime.doctor import Probe, probe
from sandkeep.runtime.driver import CRUN, DRIVERS, RUNC, RUNSC, Driver

_FASTEST_FIRST = (CRUN, RUNC, RUNSC)
_DOUBT_SECONDS = 600.0
_LOOKING = threading.Lock()
_FORM = 2  # of what is kept: what an older release kept is probed again


def pick(name: str, home: Path) -> Driver:
    """The runtime called `name`; for "auto" the fastest that is healthy, probed once."""
    if name != "auto":
        if name not in DRIVERS:
            raise BadArgument(f"runtime {name!r} is unknown", f"use auto, {', '.join(DRIVERS)}")
        DRIVERS[name].path()
        return DRIVERS[name]
    known = _read(home)
    why, doubtful = [], []
    for driver in _FASTEST_FIRST:
        try:
            key = _key(driver)
        except RuntimeMissing as error:
            why.append(error.message)
            continue
        if known.get(driver.name, {}).get("key") != key:
            known[driver.name] = _verdict(driver, key, home, lambda one: True)
            if not known[driver.name]["healthy"]:
                why.append(f"{driver.name}: {known[driver.name]['why']}")
        elif not known[driver.name]["healthy"]:
            doubtful.append(driver)
        if known[driver.name]["healthy"]:
            return driver
    for driver in doubtful:
        found = remember(probe(driver.name, home), home)
        if found["healthy"]:
            return driver
        why.append(f"{driver.name}: {found['why']}")
    raise RuntimeFailed(
        f"no runtime works here: {'; '.join(why)}", "run `sandkeep doctor`; `apt-get install runc` is the least"
    )


def keeps_memory(home: Path, limits: Limits) -> str:
    """Why no runtime here can keep what sleeps in memory, within these limits; empty when runsc can."""
    try:
        key = _key(RUNSC)
    except RuntimeMissing as error:
        return error.message
    if problems := RUNSC.enforceable(limits):
        return f"{RUNSC.name} can't limit {'; '.join(problems)}"
    known = _verdict(
        RUNSC, key, home, lambda one: bool(one["memory"]) or time.time() - float(one["at"]) < _DOUBT_SECONDS
    )
    return "" if known["memory"] else f"{RUNSC.name}: {known['why']}"


def ready(name: str, home: Path) -> str:
    """Why no sandbox can be started with this choice of a runtime, in words that name no place; empty when one can."""
    why = []
    for driver in _FASTEST_FIRST if name == "auto" else (DRIVERS[name],):
        try:
            key = _key(driver)
        except RuntimeMissing:
            why.append(f"{driver.name} is not installed")
            continue
        if _verdict(driver, key, home, lambda one: bool(one["healthy"]))["healthy"]:
            return ""
        why.append(f"{driver.name} does not work, `sandkeep doctor` says why")
    return "; ".join(why)


def _verdict(
    driver: Driver, key: str, home: Path, stands: Callable[[dict[str, str | bool | float]], bool]
) -> dict[str, str | bool | float]:
    """What is known of a runtime if that still stands, else what a probe finds: one for all who ask at once."""
    known = _read(home).get(driver.name, {})
    if known.get("key") == key and stands(known):
        return known
    with _LOOKING:
        known = _read(home).get(driver.name, {})
        if known.get("key") == key and stands(known):
            return known
        return remember(probe(driver.name, home), home)


def remember(found: Probe, home: Path) -> dict[str, str | bool | float]:
    """Keep a probe's verdict for the next pick()."""
    entry: dict[str, str | bool | float] = {
        "key": _key(DRIVERS[found.name]),
        "at": time.time(),
        "healthy": found.healthy,
        "memory": found.healthy and found.works.get("memory", False),
        "why": "; ".join(problem.why for problem in found.problems),
    }
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = home / f".runtimes.{os.getpid()}.{threading.get_ident()}"
    fresh.write_text(json.dumps({**_read(home), found.name: entry}))
    fresh.rename(home / "runtimes.json")
    return entry


def _key(driver: Driver) -> str:
    path = driver.path()
    found = os.stat(path)
    return f"{path} {found.st_mtime_ns} {found.st_size} {os.uname().release} {os.geteuid()} {_FORM}"


def _read(home: Path) -> dict[str, dict[str, str | bool | float]]:
    try:
        known = json.loads((home / "runtimes.json").read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
