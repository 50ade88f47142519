"""A driver that may die at any moment and, started again, goes on at the very step: files and variables are one commit.

python examples/resumable.py STORE                 run to the end, or go on where the last run was killed
python examples/resumable.py STORE --die-after 2   kill -9 this process between the 2nd and the 3rd step
python examples/resumable.py STORE --die-in 3      kill -9 it in the middle of the 3rd step
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal

from sandkeep import Sandbox
from sandkeep.errors import CheckpointNotFound, SandboxNotFound

STEPS = ["collect", "clean", "count", "compare", "conclude"]


def begin(store: str) -> Sandbox:
    try:
        sb = Sandbox.create(store=store, from_checkpoint="latest")
    except CheckpointNotFound:
        return Sandbox.create(store=store)
    with contextlib.suppress(SandboxNotFound):
        Sandbox.attach(sb.workflow.get_state("sandbox")).kill()  # the one that the dead driver left running
    return sb


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(store: str, die_after: int, die_in: int) -> None:
    with begin(store) as sb:
        sb.workflow.set_state("sandbox", sb.id)
        first = sb.workflow.get_state("done", 0) + 1
        print(f"begins at step {first}", flush=True)
        for number, step in enumerate(STEPS[first - 1 :], first):
            with sb.turn(step) as turn:
                sb.commands.run(f"echo {number} {step} >> report.txt; export LAST={step}")
                if number == die_in:
                    die()
                sb.workflow.update({"done": number, "last": step})
            print(f"{step}: {turn.reason}", flush=True)
            if number == die_after:
                die()
        print(sb.commands.run("cat report.txt; echo last: $LAST").stdout, end="")
        print(f"variables: {sb.workflow.get_state('done')} {sb.workflow.get_state('last')}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("store")
    parser.add_argument("--die-after", type=int, default=0)
    parser.add_argument("--die-in", type=int, default=0)
    given = parser.parse_args()
    main(given.store, given.die_after, given.die_in)
