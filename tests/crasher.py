"""A process that dies with SIGKILL at the n-th step of an operation. Run by test_crash.py; says the steps it passed."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from sandkeep import Sandbox
from sandkeep.sandbox import journal

OPERATIONS = (
    "create",
    "snapshot",
    "snapshot-busy",
    "restore",
    "restore-dead",
    "fork",
    "checkpoint",
    "restore-checkpoint",
    "kill",
    "pause",
    "resume",
)


def main() -> None:
    home, operation, at = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    argument = sys.argv[4:]
    passed = 0

    def step(name: str) -> None:
        nonlocal passed
        passed += 1
        print(name, flush=True)
        if passed == at:
            os.kill(os.getpid(), signal.SIGKILL)

    original = journal.step
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("sandkeep.") and getattr(module, "step", None) is original:
            module.step = step  # type: ignore[attr-defined]
    act(home, operation, argument)


def act(home: Path, operation: str, argument: list[str]) -> None:
    if operation == "create":
        Sandbox(home=home, runtime="runc")
        return
    sb = Sandbox.attach(argument[0], home=home)
    if operation in ("snapshot", "snapshot-busy"):
        sb.snapshot()
    elif operation in ("restore", "restore-checkpoint", "restore-dead"):
        sb.restore(argument[1])
    elif operation == "fork":
        sb.fork()
    elif operation == "checkpoint":
        sb.checkpoint()
    elif operation == "kill":
        sb.kill()
    elif operation == "pause":
        sb.pause()
    elif operation == "resume":
        sb.resume()


if __name__ == "__main__":
    main()
