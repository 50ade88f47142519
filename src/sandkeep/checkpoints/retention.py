"""Which checkpoints to let go, and what that frees. `choose` is a pure function; forgetting leaves a tombstone so that
lineages stay readable."""

from __future__ import annotations

import re
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import msgpack

from sandkeep.checkpoints import records, undoing
from sandkeep.checkpoints.capture import load_record
from sandkeep.checkpoints.lineage import ancestor
from sandkeep.checkpoints.lost import lost
from sandkeep.checkpoints.needs import needed
from sandkeep.checkpoints.nodes import describes
from sandkeep.checkpoints.records import Record
from sandkeep.errors import BadArgument, Busy, CheckpointNotFound, Corrupt, NotFound, StateConflict
from sandkeep.model import CheckpointInfo
from sandkeep.store.gc import GcReport
from sandkeep.store.lease import clock
from sandkeep.store.repository import Repository

_ANYWAY = "allow_empty=True (--allow-empty) if that is meant"
_SPAN = re.compile(r"(\d+)\s*([smhdwy])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400, "y": 365 * 86400}


@dataclass(frozen=True)
class Forgotten:
    """A checkpoint that goes, or would go. `info` is None if its record is damaged."""

    id: str
    info: CheckpointInfo | None
    bytes: int  # its part of what gc will free


@dataclass(frozen=True)
class ForgetReport:
    forgotten: list[Forgotten]
    kept: int
    bytes: int  # what gc will free
    dry_run: bool
    notes: list[str]


def parse_span(text: str) -> int:
    """Seconds from "90m", "12h", "7d", "2w"."""
    match = _SPAN.fullmatch(text.strip())
    if not match or not int(match[1]):
        raise BadArgument(f"{text!r} is not a span of time", "write '90m', '12h', '7d' or '2w'")
    return int(match[1]) * _SECONDS[match[2]]


@dataclass(frozen=True)
class Keep:
    """The rules: who is named, and what else stays."""

    named: frozenset[str] = frozenset()
    last: int | None = None
    within: str | None = None
    tags: frozenset[str] = frozenset()
    max_bytes: int | None = None
    newest: frozenset[str] = frozenset()  # of each line: they stay, too

    @property
    def rules(self) -> bool:
        return self.last is not None or self.within is not None or bool(self.tags)


def choose(checkpoints: Sequence[tuple[str, str | None]], keep: Keep, now: float) -> tuple[list[str], list[str]]:
    """Of (id, tag) pairs, newest first: the ids that no rule keeps, and those that only `max_bytes` may take; oldest first."""
    if keep.last is not None and keep.last < 0:
        raise BadArgument("keep_last must not be negative")
    since = (now - parse_span(keep.within)) * 1000 if keep.within else None
    going, spare = [], []
    for number, (checkpoint, tag) in reversed(list(enumerate(checkpoints))):
        if checkpoint in keep.named or checkpoint in keep.newest or tag in keep.tags:
            continue
        recent = (keep.last is not None and number < keep.last) or (
            since is not None and records.time_of(checkpoint) >= since
        )
        if keep.rules and not recent:
            going.append(checkpoint)
        elif number:
            spare.append(checkpoint)
    return going, spare


def forget(repo: Repository, keep: Keep, dry_run: bool, allow_empty: bool = False) -> ForgetReport:
    """Let go of what no rule keeps. Unless `allow_empty`, the newest of each line stays, and rules that look like a slip are refused."""
    known = _records(repo)
    newest_first = [(checkpoint, record.tag if record else None) for checkpoint, record in reversed(known.items())]
    now = time.time()
    notes: list[str] = []
    if not allow_empty:
        _refuse_slips(newest_first, keep, now)
        kept = newest(repo, known)
        if held := kept.intersection(choose(newest_first, keep, now)[0]):
            notes.append(f"{len(held)} that no rule keeps stay: the newest of their lines (name them, or allow_empty)")
        keep = replace(keep, newest=kept)
    going, spare = choose(newest_first, keep, now)
    if keep.max_bytes is not None:
        number = _until_it_fits(repo, going, spare, keep.max_bytes)
        if number > len(spare):
            notes.append(f"more than {keep.max_bytes} bytes remain: the newest, named and kept ones need them")
        going += spare[:number]
    return _forget(repo, known, going, dry_run, notes)


def _refuse_slips(newest_first: Sequence[tuple[str, str | None]], keep: Keep, now: float) -> None:
    """Rules that keep nothing of what is there, and tags that nothing has."""
    tags = {tag for _, tag in newest_first if tag is not None}
    if newest_first and (unknown := sorted(keep.tags - tags)):
        raise BadArgument(
            f"no checkpoint has the tag {unknown[0]!r}", f"tags here: {', '.join(sorted(tags)) or 'none'}; {_ANYWAY}"
        )
    going, _ = choose(newest_first, replace(keep, named=frozenset()), now)
    if newest_first and len(going) == len(newest_first):
        raise BadArgument(f"these rules keep none of {len(going)} checkpoints", f"keep more; {_ANYWAY}")


def newest(repo: Repository, known: Mapping[str, Record | None]) -> frozenset[str]:
    """The newest of each line: those that no checkpoint descends from, be it through forgotten ones."""
    above: set[str] = set()
    for record in known.values():
        at = record.parent_id if record else None
        while at is not None and at not in above:
            above.add(at)
            at = None if at in known else ancestor(repo, at).parent_id
    return frozenset(checkpoint for checkpoint, record in known.items() if record and checkpoint not in above)


def forget_these(repo: Repository, keep: Keep, going: Sequence[str], dry_run: bool) -> ForgetReport:
    known = _records(repo)
    if set(going).difference(known):  # one that was deleted by hand may be forgotten: then it is missed no more
        parents = {checkpoint: record.parent_id if record else None for checkpoint, record in known.items()}
        known |= dict.fromkeys(set(going).intersection(lost(repo, parents)))
    for checkpoint in going:
        if checkpoint not in known:
            raise CheckpointNotFound(f"no checkpoint {checkpoint}", "list the store's checkpoints")
        _refuse_named(checkpoint, keep.named)
    return _forget(repo, known, going, dry_run, [])


def drop(repo: Repository, named: Collection[str], checkpoint: str) -> None:
    """Let go of one without a look at what that frees, and for good."""
    _refuse_named(checkpoint, named)
    try:
        record = load_record(repo, checkpoint)
    except Corrupt:
        record = None
    bury(repo, checkpoint, record, undo=False)


def _refuse_named(checkpoint: str, named: Collection[str]) -> None:
    if checkpoint in named:
        raise StateConflict(
            f"checkpoint {checkpoint} has a name", "take the name away first: `sandkeep checkpoint name NAME --remove`"
        )


def _records(repo: Repository) -> dict[str, Record | None]:
    """Every checkpoint, the oldest first; None for a damaged record."""
    found: dict[str, Record | None] = {}
    for checkpoint in repo.list_records(records.KIND, full=True):
        try:
            found[checkpoint] = load_record(repo, checkpoint, cached=True)
        except CheckpointNotFound:
            continue
        except Corrupt:
            found[checkpoint] = None
    return found


def collect(
    repo: Repository, without: Collection[str] = (), dry_run: bool = False, grace: str | None = None
) -> GcReport:
    """Run the collector, as if these checkpoints were not there. What was forgotten is final then, but for what was within `grace`."""
    seconds = parse_span(grace) if grace is not None else 0
    now = clock(repo.objects) if seconds and not dry_run else time.time()
    kept, final = undoing.split(repo, seconds, now)
    report = repo.gc(live(repo, frozenset(without), kept), dry_run, describes)
    if not dry_run:
        undoing.make_final(repo, final)
    return replace(report, final=tuple(final))


def freed_without(repo: Repository, gone: Collection[str]) -> int:
    """What gc would free if these were forgotten, garbage of before included."""
    return collect(repo, gone, dry_run=True).freed_bytes


def _until_it_fits(repo: Repository, going: Sequence[str], spare: Sequence[str], most: int) -> int:
    """How many of `spare` must go, too, for the store to have `most` bytes after gc; one more than there are if all don't suffice."""
    stored = sum(size for _, size, _ in repo.objects.list(""))

    def fits(number: int) -> bool:
        return stored - freed_without(repo, [*going, *spare[:number]]) <= most

    return bisect_left(range(len(spare) + 1), True, key=fits)


def _forget(
    repo: Repository, known: dict[str, Record | None], going: Sequence[str], dry_run: bool, notes: list[str]
) -> ForgetReport:
    gone = frozenset(going)
    damaged = frozenset(checkpoint for checkpoint, record in known.items() if record is None)
    total = 0
    parts = [0 for _ in going]
    try:
        if going:
            total = max(0, freed_without(repo, gone) - freed_without(repo, damaged))
            staying = [record for checkpoint, record in known.items() if record and checkpoint not in gone]
            parts = scaled(shares(repo, going, staying), total)
    except (Corrupt, Busy) as error:
        notes.append(f"what this frees can't be told: {error.message}")
    forgotten = []
    for checkpoint, part in zip(going, parts, strict=True):
        record = known[checkpoint]
        forgotten.append(Forgotten(checkpoint, record.info() if record else None, part))
        if not dry_run:
            bury(repo, checkpoint, record)
    return ForgetReport(forgotten, len(known) - len(going), total, dry_run, notes)


def live(repo: Repository, without: Collection[str] = (), aside: Collection[str] = ()) -> Callable[[], Iterator[bytes]]:
    """For a collector: every blob that any visible checkpoint needs, and those kept aside; raises if that can't be known."""

    def blobs() -> Iterator[bytes]:
        seen: set[bytes] = set()
        for checkpoint in repo.list_records(records.KIND, full=True):
            if checkpoint in without:
                continue
            try:
                record = load_record(repo, checkpoint, cached=True)
            except CheckpointNotFound:
                continue
            yield from _needed_if_there(repo, record, seen)
        yield from undoing.needed_aside(repo, aside)

    return blobs


def _needed_if_there(repo: Repository, record: Record, seen: set[bytes]) -> Iterator[bytes]:
    """What a checkpoint needs, unless it is forgotten and collected meanwhile."""
    try:
        yield from needed(repo, record, seen)
    except (Corrupt, NotFound) as error:
        try:
            load_record(repo, record.id)
        except CheckpointNotFound:
            seen.clear()  # some directories in it were not looked into
            return
        raise Corrupt(f"checkpoint {record.id} is damaged: {error.message}", "forget it, then collect again")


def shares(repo: Repository, going: Sequence[str], staying: Iterable[Record]) -> list[int]:
    """For each of `going`, in this order, the stored bytes nobody needs once it and those before it are gone."""
    seen: set[bytes] = set()
    kept = {blob for record in staying for blob in _needed_if_there(repo, record, seen)}
    freed: list[int] = []
    for checkpoint in reversed(going):
        found: set[bytes] = set()
        try:
            found.update(blob for blob in needed(repo, load_record(repo, checkpoint), seen) if blob not in kept)
        except (Corrupt, NotFound):
            pass  # what is damaged or gone can't be counted; it can be forgotten all the same
        kept |= found
        freed.append(sum(place.stored * place.length // max(place.raw, 1) for place in repo.index.places(list(found))))
    return freed[::-1]


def scaled(parts: list[int], total: int) -> list[int]:
    """Whole numbers in the proportion of `parts` that add up to `total`."""
    whole = sum(parts)
    if not whole:
        return [0 for _ in parts]
    ends = [total * sofar // whole for sofar in accumulate(parts)]
    return [end - start for start, end in pairwise([0, *ends])]


def bury(repo: Repository, checkpoint: str, record: Record | None, undo: bool = True) -> None:
    """Forget a checkpoint: the tombstone first, then what takes it back, then the record goes."""
    facts: dict[str, Any] = {"id": checkpoint}
    if record is not None:
        facts |= {"parent_id": record.parent_id, "tag": record.tag, "comment": record.comment, "hash": record.hash}
    try:
        repo.put_record(records.FORGOTTEN, checkpoint, msgpack.packb(facts))
    except StateConflict:
        pass  # a forget that was interrupted has put it
    if record is not None and undo:
        undoing.set_aside(repo, record)
    repo.delete_record(records.KIND, checkpoint)
