"""Issue 4's figures: pause and resume of a process with 256 MB beside `runsc checkpoint` and `runsc restore` by hand."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.measure import Report, timed
from sandkeep import Sandbox
from sandkeep.runtime.driver import RUNSC
from sandkeep.sandbox.home import Home
from sandkeep.sandbox.machine import Machine

FILL = "import os,time; data=os.urandom({0} << 20); print('ready', flush=True); time.sleep(100000)"


QUICKEST = ["--compression=none", "--exclude-committed-zero-pages"]


def run(report: Report, quick: bool = False) -> None:
    size, rounds = (32, 2) if quick else (256, 5)
    ours: list[Ours] = []
    plain: list[Hand] = []
    flagged: list[Hand] = []
    with tempfile.TemporaryDirectory(prefix="sandkeep-bench-") as folder:
        home = Path(folder)
        turns: list[Callable[[], None]] = [
            lambda: ours.append(by_us(home, size)),
            lambda: plain.append(by_hand(home, size)),
            lambda: flagged.append(by_hand(home, size, QUICKEST)),
        ]
        for number in range(rounds):
            for turn in turns[number % 3 :] + turns[: number % 3]:
                turn()
    mine = statistics.median(one.pause + one.resume for one in ours)
    for peers, name in ((plain, "runsc checkpoint + restore"), (flagged, "the same with its quickest flags")):
        peer = statistics.median(one.save + one.load for one in peers)
        report.add(f"pause + resume of {size} MB", mine, peer, name, 1.5)
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


def by_hand(home: Path, size: int = 0, flags: Sequence[str] = ()) -> Hand:
    """The runtime's own save, end and restore of such a sandbox."""
    sandbox = filled(home, size)
    machine = Machine(Home(home), sandbox.id)
    record = machine.record()
    engine = RUNSC
    image = machine.folder / "by-hand"
    image.mkdir()
    try:
        machine.link.call("sleep")
        machine.link.close()
        save = timed(lambda: engine._ask(machine.folder, "checkpoint", *flags, "--image-path", str(image), machine.id))
        delete = timed(lambda: engine._ask(machine.folder, "delete", "--force", machine.id))
        engine.stop(machine.id, machine.folder)
        machine.make_top(record.top + 1)
        return Hand(
            save, delete, timed(lambda: engine.restore(machine.plan(record, record.stack, record.top + 1), image))
        )
    finally:
        sandbox.kill()
