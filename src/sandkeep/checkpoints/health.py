"""Verification seen from the checkpoints: which of them suffer from what is damaged or missing in the store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sandkeep.checkpoints import nodes, records
from sandkeep.checkpoints.capture import load_record
from sandkeep.checkpoints.lost import lost
from sandkeep.checkpoints.nodes import DIR, FILE, INLINE, Entry
from sandkeep.errors import CheckpointNotFound, Corrupt, NotFound
from sandkeep.store.format import record_name
from sandkeep.store.repository import Repository


@dataclass
class Damage:
    object: str  # the store's object, or the blob that is nowhere
    what: str
    checkpoints: list[str] = field(default_factory=list)


def verify(
    repo: Repository, read_data: bool = True, progress: Callable[[int, int], None] | None = None
) -> list[Damage]:
    """Everything that is wrong, and for each thing the checkpoints that can't be restored whole because of it."""
    check = _Check(repo)
    for problem in repo.verify(read_data, progress):
        check.add(problem.object, problem.what, problem.blobs)
    seen = len(check.damages)
    checkpoints = list(repo.list_records(records.KIND, full=True))
    repo.refresh()  # after the listing: what a listed checkpoint needs was in the store's index before it
    parents: dict[str, str | None] = dict.fromkeys(checkpoints)
    for checkpoint in checkpoints:
        try:
            record = load_record(repo, checkpoint)
        except CheckpointNotFound:
            continue
        except Corrupt as error:
            found = {check.add(record_name(records.KIND, checkpoint), error.message)}
        else:
            parents[checkpoint] = record.parent_id
            loose = [blob for blob in (record.session, record.volatile, record.links, record.left_out) if blob]
            found = check.blobs(loose)
            for root in (record.root, *record.attachments.values()):
                found |= check.tree(root)
        for number in found if _is_there(repo, checkpoint) else ():
            check.damages[number].checkpoints.append(checkpoint)
    for checkpoint in lost(repo, parents):
        number = check.add(record_name(records.KIND, checkpoint), "it is missing: it was deleted, and not by forget")
        check.damages[number].checkpoints.append(checkpoint)
    return [damage for number, damage in enumerate(check.damages) if number < seen or damage.checkpoints]


def _is_there(repo: Repository, checkpoint: str) -> bool:
    """Whether it was not forgotten, and what it needs collected, while we looked."""
    try:
        repo.get_record(records.KIND, checkpoint)
    except NotFound:
        return False
    except Corrupt:
        pass
    return True


class _Check:
    def __init__(self, repo: Repository) -> None:
        self._repo = repo
        self.damages: list[Damage] = []
        self._by_object: dict[str, int] = {}
        self._bad: dict[bytes, int] = {}
        self._known: dict[bytes, frozenset[int]] = {}  # node → the damages below it

    def add(self, name: str, what: str, blobs: tuple[bytes, ...] = ()) -> int:
        number = self._by_object.setdefault(name, len(self.damages))
        if number == len(self.damages):
            self.damages.append(Damage(name, what))
        for blob in blobs:
            self._bad.setdefault(blob, number)
        return number

    def blobs(self, blobs: list[bytes]) -> set[int]:
        """The damages among these blobs."""
        there = self._repo.index.known(blobs)
        for blob in blobs:
            if blob not in there and blob not in self._bad:
                self.add(blob.hex(), "it is missing", (blob,))
        return {self._bad[blob] for blob in blobs if blob in self._bad}

    def tree(self, root: Entry) -> frozenset[int]:
        """The damages below a directory; every directory is looked at once, whoever has it."""
        todo: list[tuple[Entry, list[Entry] | None, set[int]]] = [(root, None, set())]
        while todo:
            folder, entries, found = todo.pop()
            if folder.node in self._known:
                continue
            if entries is None:
                entries, found = self._look(folder)
                todo.append((folder, entries, found))
                todo += [(below, None, set()) for below in entries]
            else:
                self._known[folder.node] = frozenset(found).union(*(self._known[below.node] for below in entries))
        return self._known[root.node]

    def _look(self, folder: Entry) -> tuple[list[Entry], set[int]]:
        """The folders in a directory, and the damages of the rest."""
        asked: list[bytes] = []

        def read(blob: bytes) -> bytes:
            asked.append(blob)
            return self._repo.read(blob)

        found = self.blobs([folder.node])
        if found:
            return [], found
        try:
            entries = nodes.load(folder, read)
            wanted = []
            for entry in entries:
                if entry.kind == FILE and entry.size > INLINE:
                    wanted += nodes.segment_ids(entry)
                    wanted += [blob for _, blob in nodes.data_chunks(entry, read)]
        except (Corrupt, NotFound) as error:
            last = asked[-1] if asked else folder.node
            number = self._bad.get(last)
            return [], {self.add(last.hex(), error.message, (last,)) if number is None else number}
        return [e for e in entries if e.kind == DIR], self.blobs(wanted)
