"""Rows of the database as LangGraph's nouns, within one transaction: checkpoints, values, pending writes, ancestors."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import Checkpoint, CheckpointTuple, PendingWrite
from langgraph.checkpoint.serde.base import SerializerProtocol

from sandkeep.errors import BadArgument, Corrupt


class Place(NamedTuple):
    """Where a config points; `id` is None for "the latest"."""

    thread: str
    namespace: str
    id: str | None

    def config(self) -> RunnableConfig:
        return {"configurable": {"thread_id": self.thread, "checkpoint_ns": self.namespace, "checkpoint_id": self.id}}


class Ancestor(NamedTuple):
    sequence: int
    id: str


def place(config: RunnableConfig) -> Place:
    given = config.get("configurable") or {}
    thread = given.get("thread_id")
    if thread is None or thread == "":
        raise BadArgument("the config names no thread", "put {'configurable': {'thread_id': …}} into the config")
    return Place(thread_name(thread), given.get("checkpoint_ns") or "", given.get("checkpoint_id") or None)


def thread_name(thread: Any) -> str:
    name = str(thread)
    try:
        name.encode()
    except UnicodeEncodeError:
        raise BadArgument(f"the thread id {name!r} is no valid text")
    return name


def digest_of(kind: str, data: bytes) -> bytes:
    return hashlib.sha256(kind.encode() + b"\0" + data).digest()


@dataclass(frozen=True)
class Rows:
    connection: sqlite3.Connection
    serde: SerializerProtocol

    def sequence(self, where: Place) -> int | None:
        row = self.connection.execute(
            "SELECT sequence FROM checkpoint WHERE thread = ?1 AND namespace = ?2 AND (?3 IS NULL OR id = ?3)"
            " ORDER BY sequence DESC LIMIT 1",
            where,
        ).fetchone()
        return row[0] if row else None

    def checkpoint(self, sequence: int, filter: Mapping[str, Any] | None = None) -> CheckpointTuple | None:
        """None if it is gone, or if its metadata is not what the filter asks."""
        row = self.connection.execute(
            "SELECT thread, namespace, id, parent, kind, body, metadata_kind, metadata FROM checkpoint WHERE sequence = ?",
            (sequence,),
        ).fetchone()
        if row is None:
            return None
        thread, namespace, id, parent, kind, body, metadata_kind, about = row
        metadata = self.serde.loads_typed((metadata_kind, about))
        if any(key not in metadata or metadata[key] != value for key, value in (filter or {}).items()):
            return None
        here = Place(thread, namespace, id)
        checkpoint: Checkpoint = self.serde.loads_typed((kind, body))
        checkpoint["channel_values"] = self.values(sequence)
        return CheckpointTuple(
            config=here.config(),
            checkpoint=checkpoint,
            metadata=metadata,
            parent_config=here._replace(id=parent).config() if parent else None,
            pending_writes=self.pending(here),
        )

    def values(self, sequence: int, only: Iterable[str] | None = None) -> dict[str, Any]:
        rows = self.connection.execute(
            "SELECT name, digest, kind, data FROM channel LEFT JOIN content USING (thread, digest) WHERE sequence = ?1"
            " AND (?2 IS NULL OR name IN (SELECT value FROM json_each(?2)))",
            (sequence, _names(only)),
        )
        values = {}
        for name, digest, kind, data in rows:
            if data is None or digest_of(kind, data) != digest:
                raise Corrupt(
                    f"the value of channel {name!r} is damaged", "go on from an older checkpoint", channel=name
                )
            values[name] = self.serde.loads_typed((kind, data))
        return values

    def pending(self, where: Place, only: Iterable[str] | None = None) -> list[PendingWrite]:
        """In the order in which a live run applies them."""
        rows = self.connection.execute(
            "SELECT task, channel, kind, data FROM pending WHERE thread = ?1 AND namespace = ?2 AND id = ?3"
            " AND (?4 IS NULL OR channel IN (SELECT value FROM json_each(?4))) ORDER BY path, task, place",
            (*where, _names(only)),
        )
        return [(task, channel, self.serde.loads_typed((kind, data))) for task, channel, kind, data in rows]

    def channels(self, where: Place) -> dict[tuple[str, str], bytes]:
        """Content by channel and version, of one checkpoint."""
        rows = self.connection.execute(
            "SELECT name, version, digest FROM channel JOIN checkpoint USING (sequence)"
            " WHERE checkpoint.thread = ? AND namespace = ? AND id = ?",
            where,
        )
        return {(name, version): digest for name, version, digest in rows}

    def ancestors(self, where: Place) -> Iterator[Ancestor]:
        """From the parent up, as far as the chain is there."""
        row = self.connection.execute(
            "SELECT parent FROM checkpoint WHERE sequence = ?", (self.sequence(where),)
        ).fetchone()
        seen: set[str] = set()
        while row and row[0] and row[0] not in seen:
            id = row[0]
            seen.add(id)
            row = self.connection.execute(
                "SELECT parent, sequence FROM checkpoint WHERE thread = ? AND namespace = ? AND id = ?",
                (where.thread, where.namespace, id),
            ).fetchone()
            if row:
                yield Ancestor(row[1], id)

    def foundations(self, where: Place) -> set[int]:
        """The ancestors without which the delta channels of this checkpoint could not be rebuilt."""
        row = self.connection.execute(
            "SELECT sequence, kind, body, metadata_kind, metadata FROM checkpoint WHERE thread = ? AND namespace = ? AND id = ?",
            where,
        ).fetchone()
        sequence, kind, body, metadata_kind, about = row
        counters = self.serde.loads_typed((metadata_kind, about)).get("counters_since_delta_snapshot")
        if not counters:
            return set()
        missing = set(counters) & set(self.serde.loads_typed((kind, body))["channel_versions"]) - self._stored(sequence)
        needed = set()
        for above in self.ancestors(where):
            if not missing:
                break
            needed.add(above.sequence)
            missing -= self._stored(above.sequence)
        return needed

    def _stored(self, sequence: int) -> set[str]:
        return {name for (name,) in self.connection.execute("SELECT name FROM channel WHERE sequence = ?", (sequence,))}


def _names(only: Iterable[str] | None) -> str | None:
    return None if only is None else json.dumps([*only])
