"""Who came from whom: readable even where ancestors were forgotten or damaged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgpack

from sandkeep.checkpoints import records
from sandkeep.checkpoints.capture import load_record
from sandkeep.errors import CheckpointNotFound, Corrupt, NotFound
from sandkeep.store.repository import Repository


@dataclass(frozen=True)
class Ancestor:
    id: str
    parent_id: str | None
    state: Literal["kept", "forgotten", "damaged", "missing"]
    tag: str | None = None
    comment: str | None = None
    hash: str | None = None


def ancestor(repo: Repository, checkpoint: str, cached: bool = True) -> Ancestor:
    """The short facts of a checkpoint that is, or was, in the store."""
    try:
        record = load_record(repo, checkpoint, cached=cached)
        return Ancestor(checkpoint, record.parent_id, "kept", record.tag, record.comment, record.hash)
    except Corrupt:
        return Ancestor(checkpoint, None, "damaged")
    except CheckpointNotFound:
        pass
    try:
        facts = msgpack.unpackb(repo.get_record(records.FORGOTTEN, checkpoint, cached=True))
        parent, *words = (facts.get(name) for name in ("parent_id", "tag", "comment", "hash"))
        records.check_told(parent, *words)
        return Ancestor(checkpoint, parent, "forgotten", *words)
    except NotFound:
        return Ancestor(checkpoint, None, "missing")
    except (Corrupt, ValueError, AttributeError, msgpack.UnpackException):
        return Ancestor(checkpoint, None, "damaged")


def lineage(repo: Repository, checkpoint: str) -> list[Ancestor]:
    """From the checkpoint up to its root."""
    found = [ancestor(repo, checkpoint, cached=False)]
    while (parent := found[-1].parent_id) is not None and parent < found[-1].id:  # a child is always newer
        found.append(ancestor(repo, parent))
    return found


def tree(repo: Repository) -> list[Ancestor]:
    """All checkpoints, and the forgotten ones above them, the oldest first: a parent comes before its children."""
    found: dict[str, Ancestor] = {}
    for checkpoint in list(repo.list_records(records.KIND, full=True)):
        at: str | None = checkpoint
        while at is not None and at not in found:
            found[at] = ancestor(repo, at)
            at = found[at].parent_id
    return [found[checkpoint] for checkpoint in sorted(found)]
