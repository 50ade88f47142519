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
        return Ancestor(
            checkpoint, facts.get("parent_id"), "forgotten", facts.get("tag"), facts.get("comment"), facts.get("hash")
        )
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


@dataclass(frozen=True)
class Branch:
    """A checkpoint in the drawing of all, with its children, the oldest first."""

    node: Ancestor
    children: list[Branch]


def tree(repo: Repository) -> list[Branch]:
    """All checkpoints, and the forgotten ones above them, from their roots, the oldest first."""
    found: dict[str, Branch] = {}
    for checkpoint in list(repo.list_records(records.KIND, full=True)):
        at: str | None = checkpoint
        while at is not None and at not in found:
            found[at] = Branch(ancestor(repo, at), [])
            at = found[at].node.parent_id
    roots: list[Branch] = []
    for checkpoint, branch in sorted(found.items()):
        parent = branch.node.parent_id
        (found[parent].children if parent is not None and parent < checkpoint else roots).append(branch)
    return roots
