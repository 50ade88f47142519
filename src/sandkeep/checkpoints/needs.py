"""Which blobs a checkpoint needs: what a collector must keep, an export must carry, a verification must look at."""

from __future__ import annotations

from collections.abc import Iterator

from sandkeep.checkpoints import nodes
from sandkeep.checkpoints.nodes import DIR, FILE, INLINE, Entry
from sandkeep.checkpoints.records import Record
from sandkeep.store.repository import Repository

_BATCH = 512


def needed(repo: Repository, record: Record, seen: set[bytes]) -> Iterator[bytes]:
    """Every blob `record` names, nodes before what they name. Directories in `seen` are passed over, and added to it."""
    yield record.session
    yield record.volatile
    for blob in (record.links, record.left_out):
        if blob is not None:
            yield blob
    for root in (record.root, *record.attachments.values()):
        yield from _tree(repo, root, seen)


def _tree(repo: Repository, root: Entry, seen: set[bytes]) -> Iterator[bytes]:
    level = [root]
    while level:
        below: list[Entry] = []
        for start in range(0, len(level), _BATCH):
            batch = {folder.node: folder for folder in level[start : start + _BATCH] if folder.node not in seen}
            seen.update(batch)
            found = dict(repo.read_many(batch))
            for folder in batch.values():
                yield from _folder(repo, folder, found, below)
        level = below


def _folder(repo: Repository, folder: Entry, found: dict[bytes, bytes], below: list[Entry]) -> Iterator[bytes]:
    asked: list[bytes] = []

    def read(blob: bytes) -> bytes:
        asked.append(blob)
        return found[blob] if blob in found else repo.read(blob)

    entries = nodes.load(folder, read)
    yield from asked
    for entry in entries:
        if entry.kind == DIR:
            below.append(entry)
        elif entry.kind == FILE and entry.size > INLINE:
            yield from nodes.segment_ids(entry)
            yield from (blob for _, blob in nodes.data_chunks(entry, repo.read))
