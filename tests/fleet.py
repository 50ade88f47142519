"""For tests of several servers: two on one PostgreSQL, with a store that both reach.

(PYTEST_DONT_REWRITE, as in `serving`.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from websockets.sync.client import connect

from postgres import Postgres, postgres  # noqa: F401
from serving import PATIENCE, Served, serving


class Fleet:
    """Two servers; `here` runs the sandboxes that tests make, `there` is asked about them."""

    def __init__(self, one: Served, other: Served) -> None:
        self.one, self.other = one, other
        self.key = one.key()
        self.here, self.there = one.api(self.key), other.api(self.key)
        self.host = one.options[one.options.index("--host-id") + 1]

    def socket(self, server: Served, path: str, **options: Any) -> Any:
        options.setdefault("additional_headers", {"Authorization": f"Bearer {self.key}"})
        return connect("ws" + server.url.removeprefix("http") + path, open_timeout=PATIENCE, proxy=None, **options)

    def rows(self, query: str, *values: object) -> list[Any]:
        with psycopg.connect(self.one.database, autocommit=True) as connection:
            found = connection.execute(query, values)  # type: ignore[call-overload]
            return found.fetchall() if found.description else []


@pytest.fixture(scope="module")
def fleet(postgres: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:  # noqa: F811
    folder = tmp_path_factory.mktemp("fleet")
    database = postgres.url(postgres.create())
    options = ("--runtime", "runc", "--store", str(folder / "store"), "--sweep-interval", "0.5")
    with (
        serving(folder / "a", *options, database=database) as one,
        serving(folder / "b", *options, database=database) as other,
    ):
        yield Fleet(one, other)
