"""Deleting, pruning and copying threads. Each function runs inside a transaction of its caller: all of it happens, or none."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Sequence

from langgraph.checkpoint.serde.types import INTERRUPT

from sandkeep.errors import CheckpointNotFound, StateConflict
from sandkeep.langgraph.rows import Place, Rows


def delete_thread(connection: sqlite3.Connection, thread: str) -> None:
    for table in ("checkpoint", "content", "pending"):
        connection.execute(f"DELETE FROM {table} WHERE thread = ?", (thread,))


def delete_runs(rows: Rows, runs: Sequence[str]) -> None:
    doomed = rows.connection.execute(
        "SELECT sequence, thread, namespace FROM checkpoint WHERE run IN (SELECT value FROM json_each(?))",
        (json.dumps(runs),),
    ).fetchall()
    going = {sequence for sequence, _, _ in doomed}
    for thread, namespace in sorted({(thread, namespace) for _, thread, namespace in doomed}):
        for sequence, id in _of(rows.connection, thread, namespace):
            if sequence not in going and rows.foundations(Place(thread, namespace, id)) & going:
                raise StateConflict(
                    f"checkpoint {id} of thread {thread!r} has delta channels that are rebuilt from these runs; nothing was deleted",
                    "delete the later runs too, or the whole thread",
                )
    _delete(rows.connection, going)


def keep_latest(rows: Rows, thread: str) -> None:
    namespaces = rows.connection.execute(
        "SELECT DISTINCT namespace FROM checkpoint WHERE thread = ?", (thread,)
    ).fetchall()
    for (namespace,) in namespaces:
        everything = _of(rows.connection, thread, namespace)
        latest, id = everything[0]
        kept = {latest} | rows.foundations(Place(thread, namespace, id))
        _delete(rows.connection, {sequence for sequence, _ in everything} - kept)


def undo_step(rows: Rows, here: Place) -> None:
    """Of a checkpoint that nothing follows: what tasks of its step, and graphs inside them, had finished. They run again."""
    parent = (here.thread, here.namespace, here.id)
    if rows.connection.execute(
        "SELECT 1 FROM checkpoint WHERE (thread, namespace, parent) = (?,?,?)", parent
    ).fetchone():
        return
    rows.connection.execute(
        "DELETE FROM pending WHERE (thread, namespace, id) = (?,?,?) AND channel <> ?", (*parent, INTERRUPT)
    )
    inside = rows.connection.execute(
        "SELECT sequence, metadata_kind, metadata FROM checkpoint WHERE thread = ?1 AND namespace <> ?2"
        " AND (?2 = '' OR substr(namespace, 1, length(?2) + 1) = ?2 || '|')",
        (here.thread, here.namespace),
    ).fetchall()
    _delete(
        rows.connection,
        {
            sequence
            for sequence, kind, about in inside
            if rows.serde.loads_typed((kind, about)).get("parents", {}).get(here.namespace) == here.id
        },
    )


def copy_thread(connection: sqlite3.Connection, source: str, target: str) -> None:
    if not connection.execute("SELECT 1 FROM checkpoint WHERE thread = ?", (source,)).fetchone():
        raise CheckpointNotFound(f"thread {source!r} has no checkpoints to copy")
    for table in ("checkpoint", "pending"):
        if connection.execute(f"SELECT 1 FROM {table} WHERE thread = ?", (target,)).fetchone():
            raise StateConflict(f"thread {target!r} is not empty", "copy to a new thread, or delete this one first")
    names = {"source": source, "target": target}
    connection.execute(
        "INSERT INTO checkpoint (thread, namespace, id, parent, run, kind, body, metadata_kind, metadata)"
        " SELECT :target, namespace, id, parent, run, kind, body, metadata_kind, metadata FROM checkpoint"
        " WHERE thread = :source ORDER BY sequence",
        names,
    )
    connection.execute(
        "INSERT INTO content SELECT :target, digest, kind, data FROM content WHERE thread = :source", names
    )
    connection.execute(
        "INSERT INTO channel SELECT new.sequence, name, version, :target, digest FROM checkpoint AS old"
        " JOIN checkpoint AS new ON new.thread = :target AND new.namespace = old.namespace AND new.id = old.id"
        " JOIN channel ON channel.sequence = old.sequence WHERE old.thread = :source",
        names,
    )
    connection.execute(
        "INSERT INTO pending SELECT :target, namespace, id, task, place, path, channel, kind, data FROM pending"
        " WHERE thread = :source",
        names,
    )


def _of(connection: sqlite3.Connection, thread: str, namespace: str) -> list[tuple[int, str]]:
    return connection.execute(
        "SELECT sequence, id FROM checkpoint WHERE thread = ? AND namespace = ? ORDER BY sequence DESC",
        (thread, namespace),
    ).fetchall()


def _delete(connection: sqlite3.Connection, sequences: Collection[int]) -> None:
    """These checkpoints, their writes, and the content that nothing in their threads uses any more."""
    these = (json.dumps([*sequences]),)
    chosen = "FROM checkpoint WHERE sequence IN (SELECT value FROM json_each(?))"
    threads = connection.execute(f"SELECT DISTINCT thread {chosen}", these).fetchall()
    connection.execute(
        f"DELETE FROM pending WHERE (thread, namespace, id) IN (SELECT thread, namespace, id {chosen})", these
    )
    connection.execute(f"DELETE {chosen}", these)
    for thread in threads:
        connection.execute(
            "DELETE FROM content WHERE thread = ? AND NOT EXISTS (SELECT 1 FROM channel"
            " WHERE channel.thread = content.thread AND channel.digest = content.digest)",
            thread,
        )
