"""The tables of the sessions' database. `migrations/` makes them; a test holds the two equal.

Times are seconds since 1970 by the database's clock (`now`), so hosts need not agree on theirs. Secrets are here only as
SHA-256, but for E2B's tokens (`server.e2b.rows` says why).
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    UniqueConstraint,
    text,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

NAMES = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}
metadata = MetaData(naming_convention=NAMES)


class now(FunctionElement[float]):
    """The database's clock."""

    type = Double()
    inherit_cache = True


@compiles(now, "sqlite")
def _sqlite_now(element: Any, compiler: Any, **_: Any) -> str:
    return "sandkeep_now()"


@compiles(now, "postgresql")
def _postgres_now(element: Any, compiler: Any, **_: Any) -> str:
    return "CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS DOUBLE PRECISION)"


_Serial = BigInteger().with_variant(Integer(), "sqlite")
_Json = JSON(none_as_null=True)

sessions = Table(
    "sessions",
    metadata,
    Column("id", String(128), primary_key=True),
    Column("owner", String(200), nullable=False),
    Column("project", String(200)),
    Column("metadata", _Json, nullable=False),
    Column("config", _Json, nullable=False),
    Column("state", String(16), nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("host", String(200)),
    Column("checkpoint", String(200)),
    Column("store", String(2000)),
    Column("created", Double, nullable=False),
    Column("updated", Double, nullable=False),
    Column("last_activity", Double, nullable=False),
    Column("auto_pause_timeout", Double, nullable=False),
    Column("paused_expiry", Double, nullable=False),
    Column("paused_at", Double),
    Column("warned_at", Double),
    Column("failures", Integer, nullable=False),
    Column("next_try", Double, nullable=False),
    Column("last_error", _Json),
    Column("removed", Boolean, nullable=False),
    Index(None, "owner", "created", "id"),
    Index(None, "created", "id"),
    Index(None, "state", "host"),
)

servers = Table(
    "servers",
    metadata,
    Column("host", String(200), primary_key=True),
    Column("incarnation", String(64), nullable=False),
    Column("address", String(2000)),
    Column("started", Double, nullable=False),
    Column("heartbeat", Double, nullable=False),
)

uses = Table(
    "uses",
    metadata,
    Column("sandbox", ForeignKey("sessions.id"), primary_key=True),
    Column("host", String(200), primary_key=True),
    Column("since", Double, nullable=False),
    Index(None, "host"),
)

keys = Table(
    "keys",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("prefix", String(16), nullable=False, index=True),
    Column("sha256", String(64), nullable=False, unique=True),
    Column("user", String(200), nullable=False),
    Column("project", String(200)),
    Column("created", Double, nullable=False),
    Column("last_used", Double),
    Column("revoked", Double),
)

tokens = Table(
    "tokens",
    metadata,
    Column("sandbox", ForeignKey("sessions.id"), primary_key=True),
    Column("sha256", String(64), primary_key=True),
    Column("created", Double, nullable=False),
)

audit = Table(
    "audit",
    metadata,
    Column("id", _Serial, primary_key=True, autoincrement=True),
    Column("at", Double, nullable=False),
    Column("who", String(200), nullable=False),
    Column("action", String(100), nullable=False),
    Column("sandbox", String(128), index=True),
    Column("outcome", String(100), nullable=False),
    Column("detail", _Json, nullable=False),
    Index(None, "who", "id"),
)

events = Table(
    "events",
    metadata,
    Column("id", _Serial, primary_key=True, autoincrement=True),
    Column("sandbox", ForeignKey("sessions.id"), nullable=False),
    Column("at", Double, nullable=False),
    Column("kind", String(100), nullable=False),
    Column("detail", _Json, nullable=False),
    Index(None, "sandbox", "id"),
)

requests = Table(
    "requests",
    metadata,
    Column("sha256", String(64), primary_key=True),
    Column("sandbox", ForeignKey("sessions.id"), nullable=False),
    Index(None, "sandbox"),
)

_unseen = text("name IS NULL")
objects = Table(
    "objects",
    metadata,
    Column("place", String(32), primary_key=True),
    Column("owner", String(200), nullable=False),
    Column("project", String(200), nullable=False),  # empty: none
    Column("name", String(900).with_variant(String(900, collation="C"), "postgresql")),  # null: arriving or leaving
    Column("size", BigInteger, nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("at", Double, nullable=False),
    UniqueConstraint("owner", "project", "name"),
    Index(None, "at", sqlite_where=_unseen, postgresql_where=_unseen),
)

e2b = Table(
    "e2b",
    metadata,
    Column("sandbox", String(128), primary_key=True),
    Column("token", String(64), nullable=False),
    Column("traffic", String(64)),
    Column("generation", BigInteger, nullable=False),
    Column("deadline", Double),
    Column("timeout", Double, nullable=False),
    Column("policy", _Json, nullable=False),
)
