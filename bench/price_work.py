"""One round of what `bench.price` compares, as milliseconds by name in JSON. Uses only what both sources have; its arguments are a
folder for homes and one with a workspace."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from sandkeep import Sandbox
from sandkeep.model import WORKSPACE
from sandkeep.sandbox.home import Home
from sandkeep.sandbox.machine import Machine
from sandkeep.sandbox.sweeping import gc

times: dict[str, list[float]] = {}


def timed(what: str, act: Callable[[], object]) -> object:
    begun = time.perf_counter()
    done = act()
    times.setdefault(what, []).append((time.perf_counter() - begun) * 1000)
    return done


def main(home: Path, tree: Path) -> None:
    sb = Sandbox(home=home, runtime="runc")
    for _ in range(30):
        timed("commands.run('true')", lambda: sb.commands.run("true"))
    for _ in range(5):
        timed("10 MB of output", lambda: sb.commands.run("head -c 10000000 /dev/zero"))
        timed("write of 1 MB", lambda: sb.files.write("/tmp/f", bytes(1 << 20)))
    for _ in range(5):
        made = timed("create", lambda: Sandbox(home=home, runtime="runc"))
        assert isinstance(made, Sandbox)
        timed("kill", made.kill)
    for number in range(8):
        sb.commands.run(f"mkdir d{number}; echo x > d{number}/f")
        timed("snapshot, rotated", sb.snapshot)
    for _ in range(3):
        copied = timed("fork", sb.fork)
        assert isinstance(copied, Sandbox)
        copied.kill()
    sb.kill()
    workspace(home, tree)


def workspace(home: Path, tree: Path) -> None:
    """A workspace in the top: first save, edits, with a process running, and back where no layer is left."""
    sb = Sandbox(home=home, runtime="runc")
    sb.files.write(f"{WORKSPACE}/one", b"x")
    top = home / "sandboxes" / sb.id / "tops" / str(Machine(Home(home), sb.id).record().top) / "tree"
    subprocess.run(["cp", "-a", f"{tree}/.", str(top / WORKSPACE.lstrip("/"))], check=True)
    timed("first checkpoint", sb.checkpoint)
    for number in range(5):
        timed("checkpoint, no change", sb.checkpoint)
        sb.commands.run(f"for f in $(ls src/pkg0/*/*.py | head -3); do echo '# {number}' >> $f; done")
        timed("checkpoint, 3 edits", sb.checkpoint)
    running = sb.commands.run("sleep 1000", background=True)
    sb.snapshot()
    for number in range(5):
        sb.commands.run(f"echo {number} >> one")
        timed("snapshot, copied", sb.snapshot)
    running.kill()
    last = sb.checkpoint()
    sb.kill()
    gc(Home(home), cache=True)
    again = timed("restore, no layers here", lambda: Sandbox.create(from_checkpoint=last.id, home=home, runtime="runc"))
    assert isinstance(again, Sandbox)
    again.kill()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    print(json.dumps({what: statistics.median(values) for what, values in times.items()}))
