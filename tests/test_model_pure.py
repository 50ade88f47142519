"""The parts that decide, without a sandbox: what retention lets go, and what leases keep whoever is slow or dies."""

from __future__ import annotations

import time
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_store import history
from sandkeep.checkpoints import records
from sandkeep.checkpoints.retention import Keep, choose
from trees import quick_folder

NOW = 1_000_000


def id_at(seconds: int, number: int) -> str:
    stamp = (seconds * 1000 + number) << 80
    return records._PREFIX + "".join(records._DIGITS[(stamp >> shift) & 31] for shift in range(125, -1, -5))


ages = st.lists(st.tuples(st.integers(0, 900_000), st.sampled_from([None, "a", "b"])), max_size=12)
spans = st.sampled_from([None, "1s", "10m", "2h", "5d"])
SECONDS = {"1s": 1, "10m": 600, "2h": 7200, "5d": 432_000}


@given(
    ages,
    st.none() | st.integers(0, 13),
    spans,
    st.sets(st.sampled_from(["a", "b", "c"])),
    st.sets(st.integers(0, 11)),
    st.data(),
)
def test_what_retention_lets_go(
    made: list[tuple[int, str | None]],
    last: int | None,
    within: str | None,
    tags: set[str],
    named: set[int],
    data: st.DataObject,
) -> None:
    """Against the same rules said plainly, for one checkpoint at a time."""
    newest_first = [(id_at(NOW - age, at), tag) for at, (age, tag) in enumerate(sorted(made, key=lambda one: -one[0]))][
        ::-1
    ]
    ids = [checkpoint for checkpoint, _ in newest_first]
    chosen = frozenset(ids[at] for at in named if at < len(ids))
    newest = frozenset(data.draw(st.sets(st.sampled_from(ids)))) if ids else frozenset()
    going, spare = choose(newest_first, Keep(chosen, last, within, frozenset(tags), None, newest), NOW)
    ruled = last is not None or within is not None or bool(tags)
    for at, (checkpoint, tag) in enumerate(newest_first):
        held = checkpoint in chosen or checkpoint in newest or tag in tags
        recent = (last is not None and at < last) or (
            within is not None and records.time_of(checkpoint) >= (NOW - SECONDS[within]) * 1000
        )
        assert (checkpoint in going) == (ruled and not held and not recent)
        assert (checkpoint in spare) == (not held and (recent or not ruled) and at > 0)
    assert going == sorted(going)
    assert spare == sorted(spare)


@pytest.mark.timeout(300)
def test_writers_and_collectors_on_a_clock_of_their_own(tmp_path: Path) -> None:
    """From seed 0 on, as many as there is time for: nothing acknowledged is lost, whoever dawdles, dies, or comes between."""
    until = time.monotonic() + 8
    with quick_folder() as folder:
        for seed in count():
            history(seed, folder / str(seed))
            if time.monotonic() > until:
                break
