"""Issue 7's figures: E2B's own SDK on loopback beside our library in its own process, the same acts on the same runtime."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench.measure import Report, timed
from bench.serving import Serving
from sandkeep import Sandbox

SDK = Path(".build/e2b/new/bin/python")
PROGRAM = """
import json, sys, time
from e2b import Sandbox
times = {}
def timed(what, act):
    begun = time.perf_counter()
    found = act()
    times.setdefault(what, []).append((time.perf_counter() - begun) * 1000)
    return found
data = bytes(1 << 20)
for n in range(int(sys.argv[1])):
    sbx = timed("create", lambda: Sandbox.create(timeout=600))
    for m in range(5):
        timed("echo hi", lambda: sbx.commands.run("echo hi"))
        timed("write 1 MB", lambda: sbx.files.write("big", data))
        timed("read 1 MB", lambda: sbx.files.read("big", format="bytes"))
    timed("pause", sbx.pause)
    timed("connect", lambda: Sandbox.connect(sbx.sandbox_id, timeout=600))
    sbx.kill()
print(json.dumps(times))
"""


def run(report: Report, quick: bool = False) -> None:
    if not SDK.exists():
        raise FileNotFoundError("E2B's SDK is missing: run tools/e2b.sh")
    rounds = 2 if quick else 20
    with tempfile.TemporaryDirectory(prefix="sandkeep-bench-") as folder:
        with Serving(Path(folder) / "served", "runsc") as server:
            url = f"http://{server.address}"
            told = {"E2B_API_URL": url, "E2B_SANDBOX_URL": url, "E2B_API_KEY": server.key, "NO_PROXY": "*"}
            environment = {**os.environ, **told, "E2B_VALIDATE_API_KEY": "false"}
            argv = [str(SDK), "-c", PROGRAM, str(rounds)]
            done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True)
        through = json.loads(done.stdout)
        direct = library(Path(folder) / "own", rounds)
    for what, times in through.items():
        report.add(f"E2B SDK, {what}", statistics.median(times), statistics.median(direct[what]), "the library itself")
        report.note(
            f"E2B SDK, {what}: p50 {statistics.median(times):.1f} ms, p99 {at(times, 0.99):.1f} ms of {len(times)}"
        )


def at(times: list[float], share: float) -> float:
    return sorted(times)[min(len(times) - 1, int(len(times) * share))]


def library(home: Path, rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {}
    data = bytes(1 << 20)

    def take(what: str, act: Callable[[], object]) -> None:
        times.setdefault(what, []).append(timed(act))

    for _ in range(rounds):
        held: list[Sandbox] = []
        take("create", lambda held=held: held.append(Sandbox(home=home, runtime="runsc")))  # type: ignore[misc]
        sb = held[0]
        try:
            for _ in range(5):
                take("echo hi", lambda sb=sb: sb.commands.run("echo hi"))  # type: ignore[misc]
                take("write 1 MB", lambda sb=sb: sb.files.write("big", data))  # type: ignore[misc]
                take("read 1 MB", lambda sb=sb: sb.files.read("big"))  # type: ignore[misc]
            take("pause", sb.pause)
            take("connect", sb.resume)
        finally:
            sb.kill()
    return times
