"""What differs between async and sync by nature. Written by hand on both sides."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from sandkeep.sandbox._async.bridge import blocking

__all__ = ["STOPPED", "all_of", "blocking", "pause_for", "value_of"]

T = TypeVar("T")
STOPPED: tuple[type[BaseException], ...] = (asyncio.CancelledError, KeyboardInterrupt)


async def value_of(value: Any) -> Any:
    """What a caller's function gave, which may have to be waited for."""
    return await value if inspect.isawaitable(value) else value


async def all_of(acts: Sequence[Callable[[], Awaitable[T]]], at_once: int) -> list[T | Exception]:
    """All of them, some at a time; one entry each, its value or what it raised."""
    gate = asyncio.Semaphore(at_once)

    async def one(act: Callable[[], Awaitable[T]]) -> T | Exception:
        async with gate:
            try:
                return await act()
            except Exception as error:
                return error

    return list(await asyncio.gather(*(one(act) for act in acts)))


async def pause_for(seconds: float) -> None:
    await asyncio.sleep(seconds)
