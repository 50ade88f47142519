"""CheckpointSaver: LangGraph's checkpointer interface on our database, and the bond between a thread and a sandbox.

With a sandbox bound, each checkpoint of the graph carries in its metadata the id of a snapshot of the machine, taken between
two steps (`moments`); `rewind` puts the machine back to what a checkpoint recorded. The async methods are the sync ones in a thread.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    WRITES_IDX_MAP,
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    DeltaChannelHistory,
    PendingWrite,
    get_checkpoint_metadata,
)
from langgraph.checkpoint.serde.base import SerializerProtocol

from sandkeep.errors import BadArgument, CheckpointNotFound, SnapshotNotFound
from sandkeep.langgraph import moments, removal
from sandkeep.langgraph.database import Database
from sandkeep.langgraph.moments import Moments, Sandbox
from sandkeep.langgraph.rows import Place, Rows, digest_of, place, thread_name

SNAPSHOT_KEY = "sandkeep_snapshot"


class CheckpointSaver(BaseCheckpointSaver[int]):
    """Safe for threads and processes; durable when a call returns. `where` is a folder, or a file ending in .sqlite or .db."""

    def __init__(
        self,
        where: str | os.PathLike[str],
        sandbox: Sandbox | None = None,
        *,
        serde: SerializerProtocol | None = None,
    ) -> None:
        super().__init__(serde=serde)
        self.sandbox = sandbox
        self.database = Database(where)
        self._moments = Moments()

    def __enter__(self) -> CheckpointSaver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._moments.sweep()
        self.database.close()

    def rewind(self, config: RunnableConfig) -> RunnableConfig:
        """Restore the sandbox to what this checkpoint (or the thread's latest) recorded. Returns the config to go on from."""
        if self.sandbox is None:
            raise BadArgument("this saver has no sandbox to rewind", "make it with CheckpointSaver(where, sandbox=sb)")
        found = self.get_tuple(config)
        if found is None:
            raise CheckpointNotFound(f"no such checkpoint: {config.get('configurable')}", "see list(config)")
        snapshot = found.metadata.get(SNAPSHOT_KEY)
        if snapshot is None:
            raise SnapshotNotFound(
                f"checkpoint {found.checkpoint['id']} was saved without a sandbox", "rewind to one saved with it bound"
            )
        self.sandbox.restore(str(snapshot))
        with self.database.transaction() as connection:
            removal.undo_step(self._rows(connection), place(found.config))
        return found.config

    def get_next_version(self, current: int | None, channel: None) -> int:
        version = super().get_next_version(current, channel)
        if self.sandbox is not None:
            self._moments.step(self.sandbox, version)
        return version

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        described: dict[str, Any] = dict(get_checkpoint_metadata(config, metadata))
        described.pop(SNAPSHOT_KEY, None)
        if self.sandbox is None:
            return self._put(place(config), checkpoint, described, new_versions)
        snapshot = self._moments.claim(self.sandbox, place(config), checkpoint, described)
        try:
            put = self._put(place(config), checkpoint, {**described, SNAPSHOT_KEY: snapshot}, new_versions)
        except BaseException:
            self._moments.give_back(self.sandbox, snapshot)
            raise
        self._moments.sweep()
        return put

    def _put(
        self, here: Place, checkpoint: Checkpoint, described: Mapping[str, Any], new_versions: ChannelVersions
    ) -> RunnableConfig:
        body = self._dump({k: v for k, v in checkpoint.items() if k != "channel_values"}, "the checkpoint")
        about = self._dump(described, "its metadata")
        run = described.get("run_id")
        with self.database.transaction() as connection:
            known = self._rows(connection).channels(here)
            (sequence,) = connection.execute(
                "INSERT INTO checkpoint (thread, namespace, id, parent, run, kind, body, metadata_kind, metadata)"
                " VALUES (?,?,?,?,?,?,?,?,?) ON CONFLICT DO UPDATE SET parent = excluded.parent, run = excluded.run,"
                " kind = excluded.kind, body = excluded.body, metadata_kind = excluded.metadata_kind,"
                " metadata = excluded.metadata RETURNING sequence",
                (
                    here.thread,
                    here.namespace,
                    checkpoint["id"],
                    here.id,
                    None if run is None else str(run),
                    *body,
                    *about,
                ),
            ).fetchone()
            connection.execute("DELETE FROM channel WHERE sequence = ?", (sequence,))
            for name, value in checkpoint["channel_values"].items():
                version = repr(checkpoint["channel_versions"].get(name))
                digest = None if name in new_versions else known.get((name, version))
                if digest is None:
                    kind, data = self._dump(value, f"channel {name!r}")
                    digest = digest_of(kind, data)
                    connection.execute(
                        "INSERT OR IGNORE INTO content VALUES (?,?,?,?)", (here.thread, digest, kind, data)
                    )
                connection.execute(
                    "INSERT INTO channel VALUES (?,?,?,?,?)", (sequence, name, version, here.thread, digest)
                )
        return here._replace(id=checkpoint["id"]).config()

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        here = place(config)
        if here.id is None:
            raise BadArgument("writes belong to a checkpoint", "put checkpoint_id into the config")
        rows = [
            (
                *here,
                task_id,
                WRITES_IDX_MAP.get(channel, index),
                task_path,
                channel,
                *self._dump(value, f"channel {channel!r}"),
            )
            for index, (channel, value) in enumerate(writes)
        ]
        with self.database.transaction() as connection:
            for row in rows:
                again = "REPLACE" if row[4] < 0 else "IGNORE"
                connection.execute(f"INSERT OR {again} INTO pending VALUES (?,?,?,?,?,?,?,?,?)", row)

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        self._mark(config)
        return self._find(config)

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """Newest first, by arrival."""
        given = dict((config or {}).get("configurable") or {})
        thread = None if config is None else place(config).thread
        last = dict((before or {}).get("configurable") or {})
        with self.database.reading() as connection:
            sequences = connection.execute(
                "SELECT sequence FROM checkpoint WHERE (:thread IS NULL OR thread = :thread)"
                " AND (:namespace IS NULL OR namespace = :namespace) AND (:id IS NULL OR id = :id)"
                " AND (:before IS NULL OR sequence < coalesce((SELECT max(sequence) FROM checkpoint WHERE id = :before"
                " AND (:before_thread IS NULL OR thread = :before_thread)), 0)) ORDER BY sequence DESC",
                {
                    "thread": thread,
                    "namespace": given.get("checkpoint_ns"),
                    "id": given.get("checkpoint_id"),
                    "before": last.get("checkpoint_id"),
                    "before_thread": thread_name(last["thread_id"]) if "thread_id" in last else thread,
                },
            ).fetchall()
        left = len(sequences) if limit is None else limit
        for (sequence,) in sequences:
            if left <= 0:
                return
            with self.database.reading() as connection:
                found = self._rows(connection).checkpoint(sequence, filter)
            if found is not None:
                left -= 1
                yield found

    def get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """Reads only the rows of these channels, up to the nearest stored value of each."""
        here = place(config)
        writes: dict[str, list[PendingWrite]] = {name: [] for name in channels}
        seeds: dict[str, Any] = {}
        with self.database.reading() as connection:
            rows = self._rows(connection)
            for above in rows.ancestors(here):
                wanted = writes.keys() - seeds.keys()
                if not wanted:
                    break
                for write in reversed(rows.pending(here._replace(id=above.id), wanted)):
                    writes[write[1]].append(write)
                seeds.update(rows.values(above.sequence, wanted))
        history: dict[str, DeltaChannelHistory] = {name: {"writes": writes[name][::-1]} for name in channels}
        for name, seed in seeds.items():
            history[name]["seed"] = seed
        return history

    def delete_thread(self, thread_id: str) -> None:
        with self.database.transaction() as connection:
            removal.delete_thread(connection, str(thread_id))

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Refused, and nothing deleted, if a checkpoint that stays has delta channels that live on what would go."""
        with self.database.transaction() as connection:
            removal.delete_runs(self._rows(connection), [str(run) for run in run_ids])

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """The target must be new."""
        with self.database.transaction() as connection:
            removal.copy_thread(connection, str(source_thread_id), str(target_thread_id))

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """`keep_latest` also keeps the ancestors from which the latest one's delta channels are rebuilt."""
        if strategy not in ("keep_latest", "delete"):
            raise BadArgument(f"no pruning strategy {strategy!r}", "keep_latest or delete")
        with self.database.transaction() as connection:
            for thread in thread_ids:
                if strategy == "delete":
                    removal.delete_thread(connection, str(thread))
                else:
                    removal.keep_latest(self._rows(connection), str(thread))

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        self._mark(config)
        return await asyncio.to_thread(self._find, config)

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        found = self.list(config, filter=filter, before=before, limit=limit)
        while (each := await asyncio.to_thread(next, found, None)) is not None:
            yield each

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        return await asyncio.to_thread(self.put, config, checkpoint, metadata, new_versions)

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        await asyncio.to_thread(self.put_writes, config, writes, task_id, task_path)

    async def aget_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        return await asyncio.to_thread(self.get_delta_channel_history, config=config, channels=channels)

    async def adelete_thread(self, thread_id: str) -> None:
        await asyncio.to_thread(self.delete_thread, thread_id)

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        await asyncio.to_thread(self.delete_for_runs, run_ids)

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        await asyncio.to_thread(self.copy_thread, source_thread_id, target_thread_id)

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        await asyncio.to_thread(self.prune, thread_ids, strategy=strategy)

    async def arewind(self, config: RunnableConfig) -> RunnableConfig:
        return await asyncio.to_thread(self.rewind, config)

    def _mark(self, config: RunnableConfig) -> None:
        """A run that goes back in time saves its first checkpoint without a step before it."""
        if self.sandbox is None:
            return
        if not moments.runs(config):
            moments.forget()
        elif (here := place(config)).id is not None:
            self._moments.begin(self.sandbox, here)

    def _find(self, config: RunnableConfig) -> CheckpointTuple | None:
        with self.database.reading() as connection:
            rows = self._rows(connection)
            sequence = rows.sequence(place(config))
            return None if sequence is None else rows.checkpoint(sequence)

    def _rows(self, connection: sqlite3.Connection) -> Rows:
        return Rows(connection, self.serde)

    def _dump(self, value: Any, what: str) -> tuple[str, bytes]:
        try:
            return self.serde.dumps_typed(value)
        except (TypeError, ValueError) as error:
            raise BadArgument(f"{what} can't be serialised: {error}", "keep plain data in the graph's state") from error
