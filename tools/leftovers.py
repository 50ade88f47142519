"""What a run of the tests left mounted, running or in a control group. Prints one item a line and fails if there is any.

    leftovers.py MARK

MARK is the name of the run's folder for temporary files. Homes lie below it, so whatever is ours has it in its arguments,
its environment or its mounts: what others run on this machine meanwhile is not looked at.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

_SIGNS = ("cmdline", "environ", "mountinfo")
_PATIENCE = 30.0


def mounts(mark: str) -> Iterator[str]:
    for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
        if mark in line:
            yield f"mount {line.split()[4]}"


def processes(mark: str) -> Iterator[str]:
    """Those that run in a control group of a sandbox, and all others that carry the mark; not who asks, nor who asked for that."""
    asking = set(_ancestors("self"))
    for folder in Path("/proc").glob("[0-9]*"):
        if folder.name in asking or not any(mark in _read(folder / name) for name in _SIGNS):
            continue
        words = _read(folder / "cmdline").replace("\0", " ").strip()
        if words:  # a zombie, or one of the kernel's, has none
            yield f"process {folder.name} {words[:160]} {_group(folder)}".rstrip()


def _group(folder: Path) -> str:
    groups = [line.rpartition(":")[2] for line in _read(folder / "cgroup").splitlines()]
    return next((f"in {group}" for group in groups if "/sandkeep-" in group), "")


def _ancestors(pid: str) -> Iterator[str]:
    while pid != "0":
        status = dict(line.split(":", 1) for line in _read(Path("/proc") / pid / "status").splitlines() if ":" in line)
        yield status["Pid"].strip()
        pid = status["PPid"].strip()


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""


def leftovers(mark: str) -> list[str]:
    return sorted({*mounts(mark), *processes(mark)})


def main() -> int:
    mark = sys.argv[1]
    deadline = time.monotonic() + _PATIENCE
    while (left := leftovers(mark)) and time.monotonic() < deadline:
        time.sleep(0.5)
    for item in left:
        print(f"left behind: {item}")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
