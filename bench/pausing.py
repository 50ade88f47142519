"""Issue 4's figures: pause and resume of a process with 256 MB beside `runsc checkpoint` and `runsc restore` by hand."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import NamedTuple

from bench.measure import Report, timed
from sandkeep import Sandbox
from sandkeep.runtime.driver import RUNSC
from sandkeep.sandbox.home import Home
from sandkeep.sandbox.machine import Machine

FILL = "import os,time; data=os.urandom({0} << 20); print('ready', flush=True); time.sleep(100000)"


def run(report: Report, quick: bool = False) -> None:
    with tempfile.TemporaryDirectory(prefix="sandkeep-bench-") as folder:
        size, rounds = (32, 2) if quick else (256, 7)
        ours, hand = [], []
        for _ in range(rounds):
            ours.append(by_us(Path(folder), size))
            hand.append(by_hand(Path(folder), size))
        mine = statistics.median(one.pause + one.resume for one in ours)
        peer = statistics.median(one.save + one.load for one in hand)
        report.add(f"pause + resume of {size} MB", mine, peer, "runsc checkpoint + restore", 1.5)
        report.add("bytes of the second pause", ours[-1].second, ours[-1].first, "the first", 0.1, unit="MB")


class Ours(NamedTuple):
    pause: float
    resume: float
    first: float  # MB stored
    second: float


class Hand(NamedTuple):
    save: float
    delete: float
    load: float


def filled(home: Path, size: int) -> Sandbox:
    sandbox = Sandbox(home=home, runtime="runsc")
    if size:
        process = sandbox.commands.run(f'exec python3 -c "{FILL.format(size)}"', background=True)
        for _, data in process.output():
            if b"ready" in data:
                break
    return sandbox


def by_us(home: Path, size: int) -> Ours:
    sandbox = filled(home, size)
    try:
        infos = []
        pause, resume = timed(lambda: infos.append(sandbox.pause())), timed(sandbox.resume)
        infos.append(sandbox.pause())
        return Ours(pause, resume, infos[0].new_bytes / 1e6, infos[1].new_bytes / 1e6)
    finally:
        sandbox.kill()


def by_hand(home: Path, size: int = 0) -> Hand:
    """The runtime's own save, end and restore of such a sandbox, with the flags that are quickest."""
    sandbox = filled(home, size)
    machine = Machine(Home(home), sandbox.id)
    record = machine.record()
    engine = RUNSC
    image = machine.folder / "by-hand"
    image.mkdir()
    flags = ["--compression=none", "--exclude-committed-zero-pages", "--image-path", str(image)]
    try:
        machine.link.call("sleep")
        machine.link.close()
        save = timed(lambda: engine._ask(machine.folder, "checkpoint", *flags, machine.id))
        delete = timed(lambda: engine._ask(machine.folder, "delete", "--force", machine.id))
        engine.stop(machine.id, machine.folder)
        machine.make_top(record.top + 1)
        return Hand(
            save, delete, timed(lambda: engine.restore(machine.plan(record, record.stack, record.top + 1), image))
        )
    finally:
        sandbox.kill()
