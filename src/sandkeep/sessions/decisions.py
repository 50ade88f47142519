"""What to do about a session, decided without I/O: how to make a row agree with reality, when a sleeper is warned and
removed, how long to wait after a failure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sandkeep.sessions.records import Session
from sandkeep.sessions.states import SessionState

_S = SessionState

WARN_BEFORE = 3 * 86400.0
BACK_OFF = (5.0, 300.0)


@dataclass(frozen=True)
class Reality:
    """What a host really has of a sandbox; `checkpoint` and `store` say where a paused one sleeps."""

    state: Literal["running", "paused"]
    checkpoint: str | None = None
    store: str | None = None


_RUNS: dict[SessionState, tuple[SessionState, ...]] = {
    _S.CREATING: (_S.RUNNING,),
    _S.RUNNING: (),
    _S.PAUSING: (_S.RUNNING,),
    _S.PAUSED: (_S.RESUMING, _S.RUNNING),
    _S.RESUMING: (_S.RUNNING,),
    _S.ERROR: (_S.RESUMING, _S.RUNNING),
    _S.KILLED: (),
}
_SLEEPS: dict[SessionState, tuple[SessionState, ...]] = {
    _S.CREATING: (_S.RUNNING, _S.PAUSING, _S.PAUSED),
    _S.RUNNING: (_S.PAUSING, _S.PAUSED),
    _S.PAUSING: (_S.PAUSED,),
    _S.PAUSED: (),
    _S.RESUMING: (_S.PAUSED,),
    _S.ERROR: (_S.RESUMING, _S.PAUSED),
    _S.KILLED: (),
}


def settle(session: Session, reality: Reality | None) -> tuple[SessionState, ...]:
    """The moves that make a row, with no operation under way, agree with what its host really has.

    Nothing there: what was asleep or waking still sleeps in its checkpoint; the rest is an ERROR, which keeps its last
    checkpoint and can be resumed from it by someone who knows what that means, but not by a mere touch.
    """
    if reality is not None:
        return (_RUNS if reality.state == "running" else _SLEEPS)[session.state]
    if session.state in (_S.ERROR, _S.KILLED):
        return ()
    if session.checkpoint is not None and session.state in (_S.PAUSED, _S.RESUMING):
        return () if session.state is _S.PAUSED else (_S.PAUSED,)
    return (_S.ERROR,)


def expiry(session: Session, warn_before: float = WARN_BEFORE) -> tuple[float, float | None]:
    """When a paused session is to be warned of, and when removed: never before its warning has stood for a while.

    So a server that was down past the expiry warns first and gives the whole notice, then removes.
    """
    if session.paused_at is None:
        raise ValueError(f"{session.id} does not sleep")
    notice = min(warn_before, session.paused_expiry)
    end = session.paused_at + session.paused_expiry
    return end - notice, None if session.warned_at is None else max(end, session.warned_at + notice)


def back_off(failures: int, limits: tuple[float, float] = BACK_OFF) -> float:
    """Seconds to wait after this many failures in a row."""
    first, most = limits
    return float(min(most, first * 2 ** min(max(failures, 1) - 1, 30)))
