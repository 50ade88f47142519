"""What differs between async and sync by nature. Written by hand on both sides."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from sandkeep.sandbox._sync.bridge import blocking

__all__ = ["STOPPED", "all_of", "blocking", "pause_for", "value_of"]

T = TypeVar("T")
STOPPED: tuple[type[BaseException], ...] = (KeyboardInterrupt,)


def value_of(value: Any) -> Any:
    return value


def all_of(acts: Sequence[Callable[[], T]], at_once: int) -> list[T | Exception]:
    """All of them, some at a time; one entry each, its value or what it raised."""

    def one(act: Callable[[], T]) -> T | Exception:
        try:
            return act()
        except Exception as error:
            return error

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(one, acts))


def pause_for(seconds: float) -> None:
    time.sleep(seconds)
