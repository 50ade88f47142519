"""Histories against the reference model: what a sandbox shows, what was saved of it and what comes back are what the model says.

A failure is made shorter and told as a program that stands alone. `make soak` does the same for as long as is wanted.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

import ordinary_user
from model_history import made_up, play, shrunk
from model_script import script
from model_world import Rules

STEPS, SECONDS = 40, 12.0
FIXED = [0, 1, 2]

AS_USER = """
import os, sys
from pathlib import Path
from test_model import checked
from model_world import Rules
checked(Rules(Path(os.environ["HOME"]), sys.argv[1], frozenset({"usr"})), int(sys.argv[2]))
"""


def checked(rules: Rules, seed: int) -> None:
    played = play(rules, made_up(seed, STEPS), time.monotonic() + SECONDS)
    if played.wrong is not None:
        short = shrunk(rules, played, 60)
        pytest.fail(f"seed {seed}: {short.wrong}\n\n{script(rules, short)}", pytrace=False)
    assert played.steps


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", FIXED)
@pytest.mark.parametrize("runtime", ["runc", "runsc"])
def test_a_history(tmp_path: Path, runtime: str, seed: int) -> None:
    checked(Rules(tmp_path, runtime), seed)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("runtime", ["runc", "crun", "runsc"])
def test_a_fresh_history(tmp_path: Path, runtime: str) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    checked(Rules(tmp_path, runtime), seed)


@pytest.mark.rootless
@pytest.mark.timeout(600)
@pytest.mark.parametrize("runtime", ["runc", "runsc"])
def test_a_history_of_an_ordinary_user(runtime: str) -> None:
    with ordinary_user.home() as home:
        ordinary_user.run(AS_USER, runtime, "3", home=home, timeout=500)
