"""What of ours is still mounted, running, bound or in a cgroup on this machine. Prints one item a line.

--against TEXT  fail if there is anything that TEXT (an earlier answer) does not have
"""

from __future__ import annotations

import sys
import time
from pathlib import Path


def mounts() -> set[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return {f"mount {line.split()[4]}" for line in lines if "sandkeep" in line or "/sk-" in line or "/tops/" in line}


def cgroups() -> set[str]:
    """Those of ours that still hold a process."""
    found = [Path("/sys/fs/cgroup").glob(f"{above}sandkeep-*/cgroup.procs") for above in ("", "*/")]
    return {f"cgroup {path.parent}" for paths in found for path in paths if path.read_text().strip()}


def processes() -> set[str]:
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = [word.decode(errors="replace") for word in (folder / "cmdline").read_bytes().split(b"\0")]
        except OSError:
            continue
        if ours(words):
            found.add(f"process {folder.name} {' '.join(words)[:120]}")
    return found


def ours(words: list[str]) -> bool:
    """By what it runs, not by what its arguments mention: a shell of somebody else's may quote any of this."""
    program = Path(words[0]).name
    if program.startswith("runsc-"):
        return True
    if not program.startswith("python"):
        return False
    scripts = [Path(word).name for word in words[1:3]]
    code = words[words.index("-c") + 1] if "-c" in words[:-1] else ""
    return any(name.startswith("swift-") for name in scripts) or "guest.main import main" in code


def leftovers() -> set[str]:
    return mounts() | cgroups() | processes()


def main() -> int:
    if sys.argv[1:2] != ["--against"]:
        print("\n".join(sorted(leftovers())))
        return 0
    before = set(sys.argv[2].splitlines())
    deadline = time.monotonic() + 20
    while (left := leftovers() - before) and time.monotonic() < deadline:
        time.sleep(0.5)
    for item in sorted(left):
        print(f"left behind: {item}")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
