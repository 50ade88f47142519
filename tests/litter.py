"""Processes that are killed at any instant of their work. Run by test_leftovers.py; the order of the work is drawn from a seed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from pathlib import Path

from sandkeep import Sandbox
from sandkeep.errors import SandkeepError


def work(home: Path, beside: Path, runtime: str, id: str, draw: random.Random) -> None:
    sb = Sandbox.attach(id, home=home)
    verbs = [
        lambda: sb.snapshot(),
        lambda: sb.checkpoint(memory=runtime == "runsc"),
        lambda: sb.export_state(),
        lambda: sb.export_state(beside / "state"),
        lambda: sb.restore(sb.snapshots()[-1]),
        lambda: sb.fork().kill(),
        lambda: Sandbox(home=home, runtime=runtime).kill(),
        lambda: (sb.pause(), sb.resume()),
    ]
    while True:
        with contextlib.suppress(SandkeepError, IndexError):
            draw.choice(verbs)()


def main() -> None:
    home, beside, runtime, id = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
    draw = random.Random(int(sys.argv[5]))
    for _ in range(int(sys.argv[6])):
        seed, seconds = draw.random(), draw.uniform(0.01, 0.4)
        child = os.fork()
        if child == 0:
            work(home, beside, runtime, id, random.Random(seed))
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
