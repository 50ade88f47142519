"""Taking back what was forgotten, until a collector has made it final. Owns the records that are kept aside for that."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from sandkeep.checkpoints import records
from sandkeep.checkpoints.needs import needed
from sandkeep.checkpoints.nodes import describes
from sandkeep.checkpoints.records import Record
from sandkeep.errors import CheckpointNotFound, Corrupt, NotFound, StateConflict
from sandkeep.model import CheckpointInfo
from sandkeep.store.repository import Repository
from sandkeep.store.writer import Writer

KIND = "aside"


def set_aside(repo: Repository, record: Record) -> None:
    try:
        repo.put_record(KIND, record.id, record.pack())
    except StateConflict:
        pass  # a forget that was interrupted has done it


def take_back(repo: Repository, checkpoint: str) -> CheckpointInfo:
    """The record is there again, or nothing has changed. As any writer it counts on no pack that is condemned, and stores again
    what only such packs hold."""
    try:
        with repo.writer() as writer:
            record = _load(repo, checkpoint)
            _keep(repo, writer, record)
            writer.publish(records.KIND, checkpoint, record.pack())
    except NotFound:
        if not _is_there(repo, checkpoint):
            raise _final(repo, checkpoint) from None
    except StateConflict:
        if not _is_there(repo, checkpoint):
            raise
    for kind in (KIND, records.FORGOTTEN):
        repo.delete_record(kind, checkpoint)
    return records.unpack_record(checkpoint, repo.get_record(records.KIND, checkpoint)).info()


def _keep(repo: Repository, writer: Writer, record: Record) -> None:
    """Everything the record needs is in packs that stay, or is stored again."""
    for blob in needed(repo, record, set()):
        if not writer.has(blob):
            data = repo.read(blob)
            writer.add(data, meta=describes(data))


def _is_there(repo: Repository, checkpoint: str) -> bool:
    try:
        repo.get_record(records.KIND, checkpoint)
    except NotFound:
        return False
    return True


def _final(repo: Repository, checkpoint: str) -> CheckpointNotFound:
    try:
        repo.get_record(records.FORGOTTEN, checkpoint)
    except NotFound:
        return CheckpointNotFound(f"no checkpoint {checkpoint} was forgotten here", "list what can be taken back")
    return CheckpointNotFound(
        f"checkpoint {checkpoint} can't be taken back: gc has run since it was forgotten, or nothing was kept of it",
        "import it from an exported file, if there is one",
    )


def forgotten(repo: Repository) -> Iterator[Record]:
    """What can be taken back, the newest first."""
    there = set(repo.list_records(records.KIND, full=True))
    for checkpoint in sorted(repo.list_records(KIND, full=True), reverse=True):
        if checkpoint not in there:
            try:
                yield _load(repo, checkpoint)
            except (NotFound, Corrupt):
                continue


def split(repo: Repository, grace: float, now: float) -> tuple[list[str], list[str]]:
    """Of what was forgotten: what a collector still keeps, forgotten less than `grace` seconds before `now`, and what it makes final."""
    there = set(repo.list_records(records.KIND, full=True))
    kept: list[str] = []
    final: list[str] = []
    for name, _, at in repo.objects.list(f"records/{KIND}/"):
        checkpoint = name.rsplit("/", 1)[1]
        if checkpoint not in there:
            (kept if now - at < grace else final).append(checkpoint)
    return kept, final


def needed_aside(repo: Repository, kept: Collection[str]) -> Iterator[bytes]:
    """For a collector: what these need. One of which something is damaged or gone can't be taken back, and needs nothing."""
    for checkpoint in kept:
        try:
            yield from needed(repo, _load(repo, checkpoint), set())
        except (NotFound, Corrupt):
            continue


def make_final(repo: Repository, final: Collection[str]) -> None:
    for checkpoint in final:
        repo.delete_record(KIND, checkpoint)


def _load(repo: Repository, checkpoint: str) -> Record:
    return records.unpack_record(checkpoint, repo.get_record(KIND, checkpoint))
