"""The link of a sandbox that something saves behind its user's back: what went wrong there is raised by the next request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sandkeep.runtime.link import AsyncLink
from sandkeep.runtime.link.protocol import Host


class AsyncWatchedLink(AsyncLink):
    def __init__(self, dir: Path, host: Host, check: Callable[[], None]) -> None:
        super().__init__(dir, host)
        self._check = check

    def stream(self, *what: Any, **how: Any) -> Any:
        self._check()
        return super().stream(*what, **how)
