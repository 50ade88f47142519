"""The event loop: file descriptors, timers and generators that take turns, on one thread."""

from __future__ import annotations

import heapq
import os
import select
import signal
import time
from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Deque, Dict, Generator, List, Optional, Set, Tuple

READ = select.EPOLLIN
WRITE = select.EPOLLOUT
BROKEN = select.EPOLLHUP | select.EPOLLERR
_TURN = 0.01


class Timer:
    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Optional[Callable[[], None]] = call

    def cancel(self) -> None:
        self.call = None


class Loop:
    def __init__(self) -> None:
        self.stopped = False
        self._poll = select.epoll()
        self._calls: Dict[int, Callable[[int], None]] = {}
        self._fresh: Set[int] = set()
        self._timers: List[Tuple[float, int, Timer]] = []
        self._count = 0
        self._jobs: Deque[Generator[None, None, None]] = deque()

    def watch(self, fd: int, mask: int, call: Callable[[int], None]) -> None:
        self._poll.register(fd, mask)
        self._calls[fd] = call
        self._fresh.add(fd)

    def change(self, fd: int, mask: int) -> None:
        self._poll.modify(fd, mask)

    def forget(self, fd: int) -> None:
        """Before the descriptor is closed."""
        if self._calls.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def later(self, seconds: float, call: Callable[[], None]) -> Timer:
        timer = Timer(call)
        self._count += 1
        heapq.heappush(self._timers, (time.monotonic() + seconds, self._count, timer))
        return timer

    def job(self, steps: Generator[None, None, None]) -> None:
        """Run a generator to its end, a turn at a time between events."""
        self._jobs.append(steps)

    def on_child(self, call: Callable[[], None]) -> None:
        """Call when a child has changed; every other signal that can be caught is ignored, children get the defaults."""
        read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1,
                       signal.SIGUSR2, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGIO,
                       signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU):  # fmt: skip
            signal.signal(number, _nothing)

        def drain(_mask: int) -> None:
            os.read(read, 4096)
            call()

        self.watch(read, READ, drain)

    def run(self) -> None:
        while not self.stopped:
            for fd, mask in self._poll.poll(self._timeout()):
                call = self._calls.get(fd)
                if call is not None and fd not in self._fresh:
                    call(mask)
            self._fresh.clear()
            self._ring()
            self._work()

    def _timeout(self) -> float:
        if self._jobs:
            return 0
        while self._timers and self._timers[0][2].call is None:
            heapq.heappop(self._timers)
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else -1

    def _ring(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            if timer.call is not None:
                timer.call()

    def _work(self) -> None:
        until = time.monotonic() + _TURN
        while self._jobs and time.monotonic() < until:
            steps = self._jobs.popleft()
            for _ in steps:
                if time.monotonic() >= until:
                    self._jobs.append(steps)
                    break


def _nothing(_number: int, _frame: Any) -> None:
    pass
