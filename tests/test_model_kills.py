"""kill -9 at any instant, a bounded number of times; `make soak` goes on for as long as is wanted."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from model_kills import Killer


@pytest.mark.timeout(400)
@pytest.mark.parametrize("runtime", ["runc", "runsc"])
def test_nothing_is_lost_and_nothing_left(tmp_path: Path, runtime: str) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    with Killer(tmp_path, runtime, seed) as killer:
        killer.run(time.monotonic() + 20, kills=60)
        assert killer.lost == []
        assert killer.left == []
