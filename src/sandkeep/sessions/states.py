"""The life of a session: its states, the one table of allowed moves, and what a move may change. Pure.

Nothing else decides whether a move is allowed; `Sessions.move` is the only writer of the state column.
"""

from __future__ import annotations

from enum import StrEnum

from sandkeep.errors import StateConflict


class SessionState(StrEnum):
    CREATING = "CREATING"
    RUNNING = "RUNNING"
    PAUSING = "PAUSING"
    PAUSED = "PAUSED"
    RESUMING = "RESUMING"
    KILLED = "KILLED"
    ERROR = "ERROR"


_S = SessionState

MOVES: dict[SessionState, frozenset[SessionState]] = {
    _S.CREATING: frozenset({_S.RUNNING, _S.KILLED, _S.ERROR}),
    _S.RUNNING: frozenset({_S.PAUSING, _S.KILLED, _S.ERROR}),
    _S.PAUSING: frozenset({_S.PAUSED, _S.RUNNING, _S.KILLED, _S.ERROR}),
    _S.PAUSED: frozenset({_S.RESUMING, _S.KILLED, _S.ERROR}),
    _S.RESUMING: frozenset({_S.RUNNING, _S.PAUSED, _S.KILLED, _S.ERROR}),
    _S.ERROR: frozenset({_S.RESUMING, _S.KILLED}),
    _S.KILLED: frozenset(),
}

PASSING = frozenset({_S.CREATING, _S.PAUSING, _S.RESUMING})
"""States that only an operation under way may be in: each is that operation's journal entry."""

CHANGES = frozenset({"checkpoint", "store", "host", "failures", "next_try", "last_error"})
"""Columns that a move may set beside the state. Policy (time-outs, owner, metadata) is not among them."""


def check_move(frm: SessionState, to: SessionState) -> None:
    if to not in MOVES[frm]:
        remedy = (
            "it has ended; create a new one"
            if not MOVES[frm]
            else f"allowed from {frm}: {', '.join(sorted(MOVES[frm]))}"
        )
        raise StateConflict(f"a session can't move from {frm} to {to}", remedy, state=str(frm))
