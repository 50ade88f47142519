"""What the server gives back to the machine."""

from __future__ import annotations

import subprocess
import sys

from waiting import PATIENCE

GROWN = """
from sandkeep.server.trimming import Trimmer, resident
before = resident()
held = [bytes(2000) for _ in range(50_000)]
kept = held[::500]
del held
left = resident()
trimmer = Trimmer()
trimmer.look()
after = resident()
assert left - before > 50 << 20, (before, left)
assert after - before < (left - before) / 4, (before, left, after)
assert trimmer._last <= after
"""


def test_what_is_free_between_what_is_used_goes_back() -> None:
    done = subprocess.run([sys.executable, "-c", GROWN], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
