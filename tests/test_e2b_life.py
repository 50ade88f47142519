"""The life of E2B's sandboxes, without any."""

from __future__ import annotations

import asyncio
import gc
import warnings
from pathlib import Path

from sandkeep.server.e2b.life import Life
from sandkeep.server.services import Services
from sandkeep.server.settings import Settings
from sandkeep.sessions import Database


def test_who_stops_waiting_for_a_turn_leaves_nothing_half_begun(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    database = Database(settings.database)

    async def wait() -> None:
        services = Services(settings, database)
        async with services._turn("x"):
            waiting = asyncio.create_task(Life(services).still("x"))
            while services._turns["x"].wanted < 2:
                await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        assert services._turns == {}

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        asyncio.run(wait())
        gc.collect()
    database.close()
    assert [str(one.message) for one in said if one.category is RuntimeWarning] == []
