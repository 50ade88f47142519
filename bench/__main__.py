"""python -m bench [--quick] [suite …]"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from bench import agents, crowd, e2b, pausing, price, running, serving, soak, storing
from bench.measure import HEAD, Report

SUITES = {
    "running": running.run,
    "storing": storing.run,
    "pausing": pausing.run,
    "serving": serving.run,
    "load": crowd.run,
    "soak": soak.run,
    "agents": agents.run,
    "e2b": e2b.run,
    "price": price.run,
}


def main() -> None:
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    report = Report()
    print(HEAD)
    for name in words or SUITES:
        SUITES[name](report, quick="--quick" in sys.argv)
    folder = Path("bench-results")
    folder.mkdir(exist_ok=True)
    path = folder / time.strftime("%Y%m%d-%H%M%S.json")
    rows = [{**row.__dict__, "ratio": row.ratio} for row in report.rows]
    path.write_text(json.dumps({"rows": rows, "notes": report.notes}, indent=1))
    missed = [row.what for row in report.rows if row.bound is not None and row.ratio > row.bound]
    print(f"\n{len(report.rows)} figures, missed: {missed or 'none'}; kept in {path}")


if __name__ == "__main__":
    main()
