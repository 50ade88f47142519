"""When to look whether something is to be saved. Decides only; time and what moved are told to it.

`moved` is anything that changes whenever the sandbox may have changed (its processor time, its workflow file), or None
where nothing so cheap can be known. While it stands still nothing is looked at, but for a rare look to be sure.
"""

from __future__ import annotations

REASSURE = 30.0
REASSURE_MOST = 600.0


class Rhythm:
    def __init__(self, debounce: float, max_wait: float, now: float) -> None:
        self._debounce, self._max_wait = debounce, max_wait
        self._seen: object = None
        self._first: float | None = None  # when the first change after the last look was seen
        self._last = now
        self._looked = now
        self._patience = REASSURE

    def due(self, now: float, moved: object) -> bool:
        if moved is None:
            return now - self._looked >= self._max_wait
        if moved != self._seen:
            self._seen, self._last = moved, now
            if self._first is None:
                self._first = now
        if self._first is not None and (now - self._last >= self._debounce or now - self._first >= self._max_wait):
            return True
        return now - self._looked >= self._patience

    def looked(self, now: float, moved: object, saved: bool) -> None:
        """A look itself moves a little. Where something was found more may have come meanwhile: look once more."""
        self._seen, self._looked, self._last = moved, now, now
        self._first = now if saved else None
        self._patience = REASSURE if saved else min(2 * self._patience, REASSURE_MOST)
