"""The link of a sandbox that something saves behind its user's back: what went wrong there is raised by the next request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sandkeep.errors import SandkeepError
from sandkeep.runtime.link import AsyncLink


class AsyncWatchedLink(AsyncLink):
    def __init__(self, dir: Path, absent: Callable[[], SandkeepError], check: Callable[[], None]) -> None:
        super().__init__(dir, absent)
        self._check = check

    def stream(self, *what: Any, **how: Any) -> Any:
        self._check()
        return super().stream(*what, **how)
