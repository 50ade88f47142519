"""Memory images: what must be the same for one to be restored, and what differs here."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from sandkeep.runtime.driver import Driver

PLATFORM = "systrap"


def facts(engine: Driver, hostname: str, folder: Path) -> dict[str, Any]:
    """Of an image taken now by this runtime on this host."""
    return {"version": version(engine), "platform": PLATFORM, "cpu": cpu_features(), "hostname": hostname}


def version(engine: Driver) -> str:
    told = subprocess.run([engine.path(), "--version"], capture_output=True, text=True, check=True).stdout
    return told.splitlines()[0].strip()


def cpu_features() -> list[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("flags", "Features")):
            return sorted(line.partition(":")[2].split())
    return []


def difference(engine: Driver, saved: dict[str, Any]) -> str:
    """Which fact keeps an image from being restored here; empty when it can be."""
    if saved["version"] != version(engine):
        return f"the image was saved by {saved['version']}, here is {version(engine)}"
    if saved["platform"] != PLATFORM:
        return f"the image was saved on platform {saved['platform']}, here is {PLATFORM}"
    missing = sorted(set(saved["cpu"]) - set(cpu_features()))
    return f"the processor here lacks {', '.join(missing)}" if missing else ""
