"""The pure decisions: how a row is made to agree with reality, when a sleeper ends, how long to wait."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandkeep.errors import BadArgument
from sandkeep.sessions import MOVES, Reality, Session, SessionState
from sandkeep.sessions.decisions import back_off, expiry, settle
from sandkeep.sessions.records import make_cursor, read_cursor

S = SessionState
ROW = Session(
    id="x",
    owner="ann",
    project=None,
    metadata={},
    config={},
    state=S.RUNNING,
    generation=1,
    host="a",
    checkpoint=None,
    store=None,
    created=0.0,
    updated=0.0,
    last_activity=0.0,
    auto_pause_timeout=600.0,
    paused_expiry=100.0,
    paused_at=0.0,
    warned_at=None,
    failures=0,
    next_try=0.0,
    last_error=None,
    removed=False,
)


def row(**fields: object) -> Session:
    return dataclasses.replace(ROW, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("checkpoint", [None, "c"])
@pytest.mark.parametrize("real", ["running", "paused", None])
def test_settling_takes_only_allowed_moves_and_ends_in_agreement(real: str | None, checkpoint: str | None) -> None:
    reality = None if real is None else Reality(real)  # type: ignore[arg-type]
    for state in S:
        path = (state, *settle(row(state=state, checkpoint=checkpoint), reality))
        assert all(to in MOVES[frm] for frm, to in itertools.pairwise(path))
        if state is S.KILLED:
            assert path == (S.KILLED,)
        elif real == "running":
            assert path[-1] is S.RUNNING
        elif real == "paused" or (checkpoint and state in (S.PAUSED, S.RESUMING)):
            assert path[-1] is S.PAUSED
        else:
            assert path[-1] is S.ERROR
        again = settle(row(state=path[-1], checkpoint=checkpoint), reality)
        assert again == ()


@given(st.integers(1, 10**8), st.integers(0, 10**9), st.integers(0, 10**7), st.integers(0, 2 * 10**9))
def test_a_sleeper_never_ends_before_its_time_nor_without_notice(
    lasts: int, slept: int, warn_before: int, warned: int
) -> None:
    warn, end = expiry(row(paused_expiry=lasts, paused_at=slept), warn_before)
    assert end is None
    assert slept <= warn <= slept + lasts
    _, end = expiry(row(paused_expiry=lasts, paused_at=slept, warned_at=warned), warn_before)
    assert end is not None
    assert end >= slept + lasts
    assert end >= warned + min(warn_before, lasts)


def test_back_off_doubles_up_to_a_limit() -> None:
    assert [back_off(n) for n in (0, 1, 2, 3, 7, 8, 10_000)] == [5, 5, 10, 20, 300, 300, 300]


@given(st.floats(0, 1e12), st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}", fullmatch=True))
def test_a_cursor_says_exactly_where_one_was(created: float, id: str) -> None:
    assert read_cursor(make_cursor(row(created=created, id=id))) == (created, id)


@given(st.text())
def test_any_other_cursor_is_refused(text: str) -> None:
    with pytest.raises(BadArgument):
        read_cursor(text)
