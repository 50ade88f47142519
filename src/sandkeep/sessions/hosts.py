"""The servers on one database: who lives. A host is dead when its heartbeat is older than the time to live.

A server joins under its host id with a new incarnation. A second server under the same id replaces the first, whose next
heartbeat then raises: two servers can't both believe that they are the host.

After an outage of the database every heartbeat is old. So a server that has not itself been beating steadily for the time
to live calls nobody dead, except those who said that they leave.
"""

from __future__ import annotations

import math
import secrets
import time
from typing import Any

from sqlalchemy import Select, delete, insert, select, update

from sandkeep.errors import StateConflict
from sandkeep.sessions.database import Database
from sandkeep.sessions.records import Server, check_name
from sandkeep.sessions.tables import now, servers, uses

TIME_TO_LIVE = 30.0


class Hosts:
    def __init__(self, database: Database, time_to_live: float = TIME_TO_LIVE) -> None:
        self._db = database
        self.time_to_live = time_to_live
        self.steady_since = math.inf
        self._beaten = -math.inf

    def join(self, host: str, address: str | None = None) -> str:
        """Start as this host; the incarnation is what `heartbeat` wants. Uses left by an earlier one are ended."""
        check_name(host, "the host")
        incarnation = secrets.token_hex(16)
        values = {"incarnation": incarnation, "address": address, "started": now(), "heartbeat": now()}
        with self._db.write() as connection:
            if not connection.execute(update(servers).where(servers.c.host == host).values(**values)).rowcount:
                connection.execute(insert(servers).values(host=host, **values))
            connection.execute(delete(uses).where(uses.c.host == host))
        self._beat()
        return incarnation

    def heartbeat(self, host: str, incarnation: str) -> None:
        mine = [servers.c.host == host, servers.c.incarnation == incarnation]
        with self._db.write(durable=False) as connection:
            if not connection.execute(update(servers).where(*mine).values(heartbeat=now())).rowcount:
                raise StateConflict(
                    f"another server has joined as host {host!r}", "give each server a host id of its own"
                )
        self._beat()

    def leave(self, host: str, incarnation: str) -> None:
        """Stop in good order: dead at once, so that others need not wait for the heartbeat to age."""
        mine = [servers.c.host == host, servers.c.incarnation == incarnation]
        with self._db.write() as connection:
            if connection.execute(update(servers).where(*mine).values(heartbeat=0.0)).rowcount:
                connection.execute(delete(uses).where(uses.c.host == host))

    def servers(self) -> list[Server]:
        alive = (servers.c.heartbeat > self._oldest()).label("alive")
        with self._db.read() as connection:
            return [
                Server(**row) for row in connection.execute(select(servers, alive).order_by(servers.c.host)).mappings()
            ]

    def alive(self, host: str) -> bool:
        with self._db.read() as connection:
            return connection.execute(self.living().where(servers.c.host == host)).first() is not None

    def address(self, host: str) -> str | None:
        """How to reach a host that lives, as it said when it joined."""
        wanted = select(servers.c.address).where(servers.c.host == host, servers.c.heartbeat > self._oldest())
        with self._db.read() as connection:
            return connection.execute(wanted).scalar_one_or_none() or None

    def living(self) -> Select[tuple[str]]:
        """A query of the hosts that live."""
        return select(servers.c.host).where(servers.c.heartbeat > self._oldest())

    def _oldest(self) -> Any:
        """Heartbeats up to this one are a dead host's."""
        steady = time.monotonic() - self.steady_since >= self.time_to_live
        return now() - self.time_to_live if steady else 0.0

    def _beat(self) -> None:
        beaten = time.monotonic()
        if beaten - self._beaten > self.time_to_live:
            self.steady_since = beaten
        self._beaten = beaten
