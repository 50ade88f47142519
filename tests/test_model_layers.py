"""Layers alone against the model: hundreds of copies, rotations, restores and squashes on real overlays, in seconds."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from model_layers import played, replayed


@pytest.mark.timeout(400)
@pytest.mark.parametrize("first", [0, None])
def test_what_layers_show_is_what_the_model_has(tmp_path: Path, first: int | None) -> None:
    """From a fixed seed, and from a fresh one. A failure is told as a history that is as short as was found."""
    seed = random.SystemRandom().randrange(1 << 32) if first is None else first
    until = time.monotonic() + 6
    while time.monotonic() < until:
        history, wrong, _ = played(tmp_path / f"world{seed}", seed, 40)
        if wrong:
            pytest.fail(f"seed {seed}: {wrong}\n" + "\n".join(map(repr, shorter(tmp_path, history))), pytrace=False)
        seed += 1


def shorter(folder: Path, history: list[list[object]]) -> list[list[object]]:
    """Without the steps that it goes wrong without."""
    at, tried = 0, 0
    while at < len(history) and tried < 200:
        fewer = history[:at] + history[at + 1 :]
        tried += 1
        if replayed(folder / f"again{tried}", fewer):
            history = fewer
        else:
            at += 1
    return history
