"""Long requests as generators: they take turns with everything else, and their end is the answer."""

from __future__ import annotations

import sys
import time

from .problems import Problem, file_problem
from .wire import Task

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from typing import Any, Dict

    from .wire import Connection

    Steps = Generator[None, None, Dict[str, Any]]


_TELL_SECONDS = 5.0


class Pulse:
    """Tells who waits for a long request, every few seconds, that it goes on: else it would be given up."""

    def __init__(self, conn: Connection, word: str) -> None:
        self._conn, self._word = conn, word
        self._told = time.monotonic()

    def beat(self, count: int) -> None:
        if time.monotonic() > self._told + _TELL_SECONDS:
            self._told = time.monotonic()
            self._conn.send_json({self._word: count})


def outcome(call: Callable[[], Any]) -> Any:
    """What the call gives, or the answer that tells what went wrong. Nothing that a request does may end the guest."""
    try:
        return call()
    except Problem as problem:
        return problem.answer()
    except OSError as error:
        return file_problem(error).answer()
    except Exception as error:
        import traceback  # rarely needed, and not small

        traceback.print_exc(file=sys.stderr)
        return {"ok": False, "code": "GUEST_FAILED", "message": repr(error)[:1000], "errno": None}


class Job(Task):
    in_files = True

    def __init__(self, conn: Connection, steps: Steps) -> None:
        self._conn = conn
        conn.task = self
        conn.loop.job(self._run(steps))

    def _run(self, steps: Steps) -> Generator[None, None, None]:
        answer = None
        while answer is None:
            answer = outcome(lambda: _step(steps))
            if self._conn.task is not self:
                steps.close()
                return
            yield
        self._conn.finish(answer)


def _step(steps: Steps) -> Any:
    try:
        return next(steps)
    except StopIteration as end:
        return end.value
