"""Choosing a runtime. A good verdict is kept in home/runtimes.json until the binary, the kernel or the user changes; a bad one only
saves a probe while another runtime is healthy, since what was in the way then (a full disk) may be gone."""

from __future__ import annotations

import json
import os
from pathlib import Path

from sandkeep.errors import BadArgument, RuntimeFailed, RuntimeMissing
from sandkeep.runtime.doctor import Probe, probe
from sandkeep.runtime.driver import CRUN, DRIVERS, RUNC, RUNSC, Driver

_FASTEST_FIRST = (CRUN, RUNC, RUNSC)


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
            known[driver.name] = remember(probe(driver.name, home), home)
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


def remember(found: Probe, home: Path) -> dict[str, str | bool]:
    """Keep a probe's verdict for the next pick()."""
    entry: dict[str, str | bool] = {
        "key": _key(DRIVERS[found.name]),
        "healthy": found.healthy,
        "why": "; ".join(problem.why for problem in found.problems),
    }
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = home / f".runtimes.{os.getpid()}"
    fresh.write_text(json.dumps({**_read(home), found.name: entry}))
    fresh.rename(home / "runtimes.json")
    return entry


def _key(driver: Driver) -> str:
    path = driver.path()
    found = os.stat(path)
    return f"{path} {found.st_mtime_ns} {found.st_size} {os.uname().release} {os.geteuid()}"


def _read(home: Path) -> dict[str, dict[str, str | bool]]:
    try:
        known = json.loads((home / "runtimes.json").read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
