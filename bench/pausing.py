"""Issue 4's figures: pause and resume of a process with 256 MB beside `runsc checkpoint` and `runsc restore` by hand."""

from __future__ import annotations

import shutil
import statistics
import tempfile
from pathlib import Path

from bench.measure import Report, timed
from sandkeep import Sandbox
from sandkeep.sandbox.home import Home
from sandkeep.sandbox.machine import Machine

FILL = "import os,time; data=os.urandom({0} << 20); print('ready', flush=True); time.sleep(100000)"


def run(report: Report, quick: bool = False) -> None:
    with tempfile.TemporaryDirectory(prefix="sandkeep-bench-") as folder:
        size = 32 if quick else 256
        times = [cycle(Path(folder), size) for _ in range(2 if quick else 5)]
        ours = statistics.median(one["ours"] for one in times)
        hand = statistics.median(one["by hand"] for one in times)
        report.add(f"pause + resume of {size} MB", ours, hand, "runsc checkpoint + restore", 1.5)
        report.add("bytes of the second pause", times[-1]["second"], times[-1]["first"], "the first", 0.1, unit="MB")


def cycle(home: Path, size: int) -> dict[str, float]:
    sb = Sandbox(home=home, runtime="runsc")
    try:
        process = sb.commands.run(f'exec python3 -c "{FILL.format(size)}"', background=True)
        for _, data in process.output():
            if b"ready" in data:
                break
        hand = sum(by_hand(home, sb.id))
        infos = []
        ours = timed(lambda: infos.append(sb.pause())) + timed(sb.resume)
        infos.append(sb.pause())
        sb.resume()
        return {"ours": ours, "by hand": hand, "first": infos[0].new_bytes / 1e6, "second": infos[1].new_bytes / 1e6}
    finally:
        sb.kill()


def by_hand(home: Path, id: str) -> tuple[float, float]:
    """The runtime's own save and restore of the same sandbox, into a twin."""
    sb = Sandbox.connect(id, home=home)
    machine = Machine(Home(home), id)
    record = machine.record()
    engine = machine.driver(record)
    image = machine.folder / "by-hand"
    machine.link.call("sleep")
    machine.link.close()
    save = timed(lambda: engine.checkpoint(id, machine.folder, image, leave_running=True))
    twin = sb._home.new_id()
    (machine.folder / "run" / "wake").touch()
    other = Machine(Home(home), twin)
    (other.folder / "run").mkdir(parents=True)
    other.make_top(0)
    record.id = twin
    load = timed(lambda: engine.restore(other.plan(record, record.stack, 0), image))
    engine.stop(twin, other.folder)
    shutil.rmtree(other.folder)
    shutil.rmtree(image)
    return save, load
