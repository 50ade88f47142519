"""kill -9 at any instant, a bounded number of times; `make soak` goes on for as long as is wanted."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import pytest

from model_kills import Killer

# Temporaries of a killed process that nothing removes yet.
NOT_YET = re.compile(r"/cache/carry-|/\.[a-z_0-9]+\.json\.|/sandboxes/sb-[0-9a-f]{12}$")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("runtime", ["runc", "runsc"])
def test_nothing_is_lost_and_nothing_left(tmp_path: Path, runtime: str) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    with Killer(tmp_path, runtime, seed) as killer:
        killer.run(time.monotonic() + 20, kills=60)
        assert killer.lost == []
        assert [path for path in killer.left if not NOT_YET.search(path)] == []
