"""Checkpoints that are spoken of, and neither are here nor were forgotten nor come from elsewhere: deleted behind our back.

A record tells of its parent, a name of what it names. Of a checkpoint without name or children nothing is left to tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from sandkeep.checkpoints import records
from sandkeep.checkpoints.names import read_names
from sandkeep.errors import Corrupt, NotFound, StateConflict
from sandkeep.store.repository import Repository

ELSEWHERE = "elsewhere"  # a kind of record: parents that were never in this store


def note_parent(repo: Repository, parent: str | None) -> None:
    """Before a child is published: one that was never here is not missed later."""
    if parent is None or any(_has(repo, kind, parent) for kind in (records.KIND, records.FORGOTTEN, ELSEWHERE)):
        return
    with suppress(StateConflict):
        repo.put_record(ELSEWHERE, parent, b"")


def lost(repo: Repository, parents: Mapping[str, str | None]) -> list[str]:
    """`parents` has every checkpoint that was listed, and its parent if that is known."""
    told = {parent for parent in parents.values() if parent is not None}
    with suppress(Corrupt):
        told.update(read_names(repo).values())
    missed = told.difference(parents)
    for kind in (records.FORGOTTEN, ELSEWHERE):
        missed = missed.difference(repo.list_records(kind, full=True)) if missed else missed
    return sorted(checkpoint for checkpoint in missed if not _has(repo, records.KIND, checkpoint))


def _has(repo: Repository, kind: str, name: str) -> bool:
    try:
        repo.get_record(kind, name)
    except NotFound:
        return False
    except Corrupt:
        pass
    return True
