"""What a change costs: another checkout's source and this one's in turns, in one run.

SANDKEEP_BENCH_BEFORE=CHECKOUT python -m bench price
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import workspace
from bench.measure import Report

BOUNDS = {"commands.run('true')": 1.1, "10 MB of output": 1.1, "write of 1 MB": 1.1}
BOUND = 1.15
HERE = Path(__file__).resolve().parent.parent


def run(report: Report, quick: bool = False) -> None:
    if "SANDKEEP_BENCH_BEFORE" not in os.environ:
        report.note("price: not run; SANDKEEP_BENCH_BEFORE must name a checkout to compare with")
        return
    sources = {"before": Path(os.environ["SANDKEEP_BENCH_BEFORE"]).resolve(), "now": HERE}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sources}
    with tempfile.TemporaryDirectory(prefix="sandkeep-bench-") as folder:
        tree = Path(folder) / "tree"
        workspace.make(tree, "S" if quick else "M")
        for number in range(3 if quick else 7):
            for name in sorted(sources, reverse=bool(number % 2)):
                home = Path(folder) / f"{name}-{number}"
                found[name].append(_round(sources[name], home, tree))
                subprocess.run(["rm", "-rf", str(home)], check=True)
    for what in found["now"][0]:
        now, before = (statistics.median(row[what] for row in found[name]) for name in ("now", "before"))
        report.add(what, now, before, "before", BOUNDS.get(what, BOUND))


def _round(source: Path, home: Path, tree: Path) -> dict[str, float]:
    work = [sys.executable, str(HERE / "bench/price_work.py"), str(home), str(tree)]
    done = subprocess.run(
        work, env={**os.environ, "PYTHONPATH": str(source / "src")}, stdout=subprocess.PIPE, check=True, text=True
    )
    figures: dict[str, float] = json.loads(done.stdout)
    return figures
