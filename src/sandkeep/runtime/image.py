"""Memory images: what must be the same for one to be restored, and what differs here."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from sandkeep.runtime import spec
from sandkeep.runtime.driver import Driver
from sandkeep.runtime.plan import Plan


def facts(engine: Driver, hostname: str, folder: Path) -> dict[str, Any]:
    """Of an image taken now of the sandbox in `folder`; JSON."""
    bundle = json.loads((folder / "bundle/config.json").read_text())
    process = bundle["process"]
    return {
        "version": version(engine),
        "flags": flags(engine, spec.network_of(bundle)),
        "cpu": cpu_features(),
        "hostname": hostname,
        "args": process["args"],
        "env": process["env"],
        "cwd": process["cwd"],
        "mounts": mounts(bundle),
    }


def difference(engine: Driver, saved: dict[str, Any], plan: Plan) -> str:
    """Which fact keeps an image from being restored with this plan on this host; empty when it can be."""
    bundle = spec.bundle(plan, engine.facts())
    here = {"version": version(engine), "flags": flags(engine, plan.network), "mounts": mounts(bundle)}
    names = {"version": "runsc's version", "flags": "runsc's flags", "mounts": "the mounts"}
    for fact, value in here.items():
        if saved[fact] != value:
            was, now = (item for item in _only(saved[fact], value))
            return f"{names[fact]} differ: {was} when the memory was saved, {now} here"
    missing = sorted(set(saved["cpu"]) - set(cpu_features()))
    return f"the processor here lacks {', '.join(missing)}" if missing else ""


def _only(was: Any, now: Any) -> tuple[str, str]:
    """What of two facts is not in both, for people."""
    if isinstance(was, str):
        return was, str(now)
    left = [item for item in was if item not in now]
    right = [item for item in now if item not in was]
    return (_said(left), _said(right)) if left or right else ("another order", "this one")


def _said(items: list[Any]) -> str:
    return ", ".join(item if isinstance(item, str) else item[0] for item in items) or "nothing"


def mounts(bundle: dict[str, Any]) -> list[list[str]]:
    """Where what is mounted, in order, and whether it can be written. Where it comes from may differ."""
    return [[one["destination"], one["type"], "ro" if "ro" in one["options"] else "rw"] for one in bundle["mounts"]]


def flags(engine: Driver, network: str) -> list[str]:
    return engine.base_command(Path("/"), network)[2:]


def version(engine: Driver) -> str:
    path = engine.path()
    return _version(path, os.stat(path).st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _version(path: str, _modified: int) -> str:
    told = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    return told.splitlines()[0].strip()


@functools.cache
def cpu_features() -> list[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("flags", "Features")):
            return sorted(line.partition(":")[2].split())
    return []
