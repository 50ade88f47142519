"""One operation of an agent at a time: the second is refused, at once and by name. Never waits, so it serves threads and tasks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from sandkeep.errors import Busy


class Holding:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.operation: str | None = None

    @contextmanager
    def during(self, operation: str) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise Busy(
                f"{operation} is refused: this agent is busy with {self.operation or 'another operation'}",
                "wait until it is done, or interrupt() the run",
            )
        try:
            self.operation = operation
            yield
        finally:
            self.operation = None
            self._lock.release()
