"""Issue 6's figure: the automatic checkpoint after a run that changed one line of a 423 MB workspace, against `tar | gzip`."""

from __future__ import annotations

import random
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import workspace
from bench.measure import Report, timed
from sandkeep.agents import Agent
from sandkeep.model import WORKSPACE, Mount

BOUND, MOST_ADDED_MB, WHOLE = 0.01, 1.0, 423_000_000


def run(report: Report, quick: bool = False) -> None:
    shape, rounds = ("S", 3) if quick else ("M", 7)
    folder = Path(tempfile.mkdtemp(prefix="sandkeep-bench-"))
    try:
        tree = folder / "tree"
        workspace.make(tree, shape)
        if not quick:
            workspace.write(tree / "assets" / "more.bin", random.Random(7).randbytes(WHOLE - size_of(tree)))
        with Agent(
            "shell", home=folder / "home", storage=folder / "store", mounts=[Mount(str(tree), "/mnt/tree")]
        ) as agent:
            agent.run(f"cp -r /mnt/tree {WORKSPACE}/repo")
            took, added = zip(*(one(agent, number) for number in range(rounds)), strict=True)
        archive = f"tar -C {tree} -cf - . | gzip > {folder / 'tar.gz'}"
        peer = timed(lambda: subprocess.run(archive, shell=True, check=True))
        what = f"automatic checkpoint, one line of {size_of(tree) / 1e6:.0f} MB changed"
        report.add(what, statistics.median(took), peer, "tar | gzip", None if quick else BOUND)
        report.add(f"{what}: added", max(added) / 1e6, MOST_ADDED_MB, "allowed", 1.0, unit="MB")
    finally:
        shutil.rmtree(folder)


def size_of(tree: Path) -> int:
    return sum(path.stat().st_size for path in tree.rglob("*") if path.is_file())


def one(agent: Agent, number: int) -> tuple[float, int]:
    """Milliseconds from the end of the script to the end of the run, and bytes that the store gained."""
    ends: list[float] = []

    def heard(text: str) -> None:
        ends.append(time.perf_counter())

    agent._sinks["stdout"][:] = [heard]
    line = f"echo '# {number}' >> $(find {WORKSPACE}/repo/src -name '*.py' | sort | sed -n {100 + number}p); echo done"
    done: Any = agent.run(line)
    return (time.perf_counter() - ends[-1]) * 1000, done.checkpoint.new_bytes
