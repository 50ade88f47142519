"""What differs between async and sync by nature. Written by hand on both sides."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from sandkeep.errors import system

T = TypeVar("T")


async def blocking(function: Callable[..., T], *args: Any, **options: Any) -> T:
    """Run a blocking function without stopping the loop; what the system refuses it is one of our errors."""
    with system():
        return await asyncio.to_thread(function, *args, **options)


def begin_now(_sandbox: Any) -> None:
    """An async sandbox is created on entering its block, or by `create`."""


class EnvItems:
    """No `env[...]` here: reading it is a round trip, so it is awaited (`get`, `set`)."""
