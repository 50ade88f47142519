"""Many at once, at a small size; `python -m bench load` does the same with 200 sandboxes and 1,000 streams."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from bench.crowd import Crowd

from serving import Served, served  # noqa: F401
from waiting import until

SANDBOXES, STREAMS, SLOW, MEGABYTES = 10, 50, 6, 16


def crowded(server: Served, act: Callable[[Crowd], Awaitable[None]]) -> None:
    assert server.process is not None
    pid = server.process.pid

    async def go() -> None:
        async with Crowd(server.url.removeprefix("http://"), server.key(), pid) as crowd:
            await act(crowd)

    asyncio.run(go())


def test_many_sandboxes_answer_and_many_streams_get_every_line(served: Served) -> None:  # noqa: F811
    async def act(crowd: Crowd) -> None:
        ids = await crowd.make(SANDBOXES)
        assert len(await crowd.answer(ids)) == SANDBOXES
        before = crowd.load()
        held = await crowd.follow(ids[:5], STREAMS)
        assert held.descriptors > before.descriptors
        await asyncio.gather(crowd.answer(ids), crowd.follow(ids[5:], STREAMS // 5))
        await crowd.end(ids)
        until(lambda: crowd.load().descriptors < held.descriptors - STREAMS, "the streams' descriptors are closed")

    crowded(served, act)


def test_slow_readers_do_not_grow_the_server_and_lose_nothing(served: Served) -> None:  # noqa: F811
    async def act(crowd: Crowd) -> None:
        (id,) = await crowd.make(1)
        before, held = await crowd.slow(id, SLOW, MEGABYTES)
        assert held.megabytes - before.megabytes < SLOW * MEGABYTES / 2, (before, held)
        await crowd.end([id])

    crowded(served, act)


def test_clients_that_vanish_lose_nothing(served: Served) -> None:  # noqa: F811
    async def act(crowd: Crowd) -> None:
        (id,) = await crowd.make(1)
        await crowd.vanish(id, 5)
        await crowd.end([id])

    crowded(served, act)
