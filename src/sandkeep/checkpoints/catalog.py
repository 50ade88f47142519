"""The store as a person holds it: find checkpoints, look into them, name them, compare them, let them go."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, takewhile
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from sandkeep.checkpoints import lineage as lines
from sandkeep.checkpoints import names, records, retention, transfer, undoing
from sandkeep.checkpoints.browse import Tree
from sandkeep.checkpoints.capture import load_json, load_list, load_record
from sandkeep.checkpoints.compare import Change, compare
from sandkeep.checkpoints.extract import extract
from sandkeep.checkpoints.health import Damage, verify
from sandkeep.checkpoints.lineage import Ancestor
from sandkeep.checkpoints.merge import Progress
from sandkeep.checkpoints.plan import check_groups
from sandkeep.checkpoints.records import Record
from sandkeep.checkpoints.remote import RepositorySpec
from sandkeep.checkpoints.retention import ForgetReport
from sandkeep.checkpoints.states import compare_states
from sandkeep.checkpoints.unpack import Unpacked
from sandkeep.errors import BadArgument, CheckpointNotFound, Corrupt, system
from sandkeep.model import CheckpointInfo, FileInfo, parse_size
from sandkeep.store.gc import GcReport
from sandkeep.store.repository import Repository

MOST = 500

Checkpoint = str | CheckpointInfo


class Store:
    """A store of checkpoints: a folder, or `s3://bucket/prefix`; without `url` the one in the home folder.

    Wherever a checkpoint is asked for, its id, an unambiguous beginning of it, a name, "latest", or what `checkpoint()` returned
    will do.
    """

    def __init__(
        self,
        url: str | Path | None = None,
        *,
        region: str | None = None,
        endpoint: str | None = None,
        access_key: str | None = None,
        secret_key: str | None = None,
        home: str | Path | None = None,
        create: bool = True,
    ) -> None:
        if url is not None and not isinstance(url, (str, Path)):
            raise BadArgument(f"a store is a folder or a URL, not {url!r}")
        if "\0" in str(url):
            raise BadArgument(f"{url!r} is not a store's place")
        where = Path(home or os.environ.get("SANDKEEP_HOME") or Path.home() / ".sandkeep").absolute()
        given = {"region": region, "endpoint": endpoint, "access_key": access_key, "secret_key": secret_key}
        options = {key: value for key, value in given.items() if value is not None}
        self.spec = RepositorySpec(_whole(url if url is not None else where / "store"), where / "cache", options)
        for folder in (where, where / "cache", *([where / "store"] if url is None and create else [])):
            with contextlib.suppress(OSError):  # who needs it says why it can't be had
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.repo: Repository = self.spec.open(create)

    def close(self) -> None:
        self.repo.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # finding

    def checkpoints(
        self, limit: int = 100, tag: str | None = None, before: Checkpoint | None = None
    ) -> list[CheckpointInfo]:
        """Newest first; `before` a checkpoint to page on. A damaged record is left out here and named by `verify`."""
        if not isinstance(limit, int) or isinstance(limit, bool) or not 0 < limit <= MOST:
            raise BadArgument(f"limit must be from 1 to {MOST}, not {limit!r}")
        found: list[CheckpointInfo] = []
        for record in self._newest_first(self.resolve(before) if before else None):
            if tag is None or record.tag == tag:
                found.append(record.info())
                if len(found) == limit:
                    break
        return found

    def latest(self) -> CheckpointInfo:
        """The newest of the whole store."""
        return self.record("latest").info()

    def get(self, checkpoint: Checkpoint) -> CheckpointInfo:
        return self.record(checkpoint).info()

    def record(self, checkpoint: Checkpoint) -> Record:
        return load_record(self.repo, self.resolve(checkpoint))

    def resolve(self, checkpoint: Checkpoint) -> str:
        """The id that an id, a beginning of one, a name or "latest" means."""
        if isinstance(checkpoint, CheckpointInfo):
            return checkpoint.id
        if not isinstance(checkpoint, str) or not checkpoint:
            raise BadArgument(f"{checkpoint!r} is not a checkpoint", "give an id, a name or 'latest'")
        if records.is_id(checkpoint):
            return checkpoint
        if checkpoint == "latest":
            return self._latest()
        if not checkpoint.startswith("ck_"):
            if checkpoint not in (known := names.read_names(self.repo)):
                raise CheckpointNotFound(f"no checkpoint is named {checkpoint!r}", _names(known))
            return known[checkpoint]
        later = self.repo.list_records(records.KIND, after=checkpoint)
        return _only(checkpoint, takewhile(lambda found: found.startswith(checkpoint), later), "checkpoint")

    def _latest(self) -> str:
        for checkpoint in self.repo.list_records(records.KIND, newest_first=True):
            try:
                return load_record(self.repo, checkpoint).id
            except CheckpointNotFound:
                continue  # forgotten elsewhere
        raise CheckpointNotFound("the store has no checkpoints", "save one first")

    def _newest_first(self, before: str | None) -> Iterator[Record]:
        for checkpoint in self.repo.list_records(records.KIND, newest_first=True):
            if before is not None and checkpoint >= before:
                continue
            try:
                yield load_record(self.repo, checkpoint, cached=True)
            except (CheckpointNotFound, Corrupt):
                continue

    # names and lineage

    def name(self, name: str, checkpoint: Checkpoint) -> None:
        names.check_name(name)
        names.move(self.repo, name, self.get(checkpoint).id)

    def unname(self, name: str) -> None:
        if name not in (known := names.read_names(self.repo)):
            raise CheckpointNotFound(f"no checkpoint is named {name!r}", _names(known))
        names.move(self.repo, name, None)

    def names(self) -> dict[str, str]:
        return names.read_names(self.repo)

    def lineage(self, checkpoint: Checkpoint) -> list[Ancestor]:
        """From the checkpoint up to its root, through those that were forgotten."""
        return lines.lineage(self.repo, self.record(checkpoint).id)

    def tree(self) -> list[Ancestor]:
        """All checkpoints, and the forgotten ones above them, each with its parent; the oldest first."""
        return lines.tree(self.repo)

    # looking inside

    def files(self, checkpoint: Checkpoint) -> Tree:
        """The files of a checkpoint, to look at many of them."""
        return Tree(self.repo, self.record(checkpoint).root)

    def ls(self, checkpoint: Checkpoint, path: str | bytes = "/") -> list[FileInfo]:
        return self.files(checkpoint).ls(path)

    def stat(self, checkpoint: Checkpoint, path: str | bytes) -> FileInfo:
        return self.files(checkpoint).stat(path)

    def read(self, checkpoint: Checkpoint, path: str | bytes, offset: int = 0, length: int | None = None) -> bytes:
        return self.files(checkpoint).read(path, offset, length)

    def find(self, checkpoint: Checkpoint, pattern: str) -> list[FileInfo]:
        return list(self.files(checkpoint).find(pattern))

    def extract(
        self, checkpoint: Checkpoint, to: str | Path, glob: str | None = None, progress: Progress | None = None
    ) -> Unpacked:
        if not isinstance(to, (str, Path)) or not str(to) or "\0" in str(to):
            raise BadArgument(f"{to!r} is not a folder", "name one that does not exist yet")
        with system():
            return extract(self.repo, self.resolve(checkpoint), Path(to), glob, progress)

    def diff(self, a: Checkpoint, b: Checkpoint, times: bool = True) -> list[Change]:
        """What changed from `a` to `b`: files by their paths, then session, workflow state, processes and memory by their names.
        `times=False` passes over what only was touched."""
        old, new = self.record(a), self.record(b)
        before, after = (check_groups(load_list(self.repo, record.links), record.id) for record in (old, new))
        found = compare(self.repo, old.root, new.root, before, after, times)
        pairs = ((old.session, new.session), (old.volatile, new.volatile))
        files = sorted(found, key=lambda change: (change.path, change.change))
        return [
            *files,
            *(row for was, now in pairs if was != now for row in compare_states(*map(self._json, (was, now)))),
        ]

    def _json(self, blob: bytes) -> dict[str, Any]:
        return load_json(self.repo, blob)

    def left_out(self, checkpoint: Checkpoint) -> dict[str, str]:
        """Everything the checkpoint left out, of which `excluded` has the first, and why: excluded, environment, socket, device."""
        record = self.record(checkpoint)
        try:
            return {"/" + os.fsdecode(path): str(why) for path, why in load_list(self.repo, record.left_out)}
        except (ValueError, TypeError):
            raise Corrupt(f"what checkpoint {record.id} left out is malformed", "run verify") from None

    def session(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """What was saved beside the files: session and volatile together."""
        record = self.record(checkpoint)
        return {**load_json(self.repo, record.volatile), **load_json(self.repo, record.session)}

    # care

    def verify(self, read_data: bool = True, progress: Callable[[int, int], None] | None = None) -> list[Damage]:
        """What is damaged, and who suffers; `progress` is told of packs: how many are done, and how many there are."""
        return verify(self.repo, read_data, progress)

    def gc(self, dry_run: bool = False, grace: str | None = None) -> GcReport:
        """Free the space of what was forgotten, and so make it final; with `grace` ("24h") only what was forgotten before that."""
        return retention.collect(self.repo, dry_run=dry_run, grace=grace)

    def forget(
        self,
        ids: Sequence[Checkpoint] | None = None,
        *,
        keep_last: int | None = None,
        keep_within: str | None = None,
        keep_tags: Sequence[str] = (),
        max_bytes: int | str | None = None,
        allow_empty: bool = False,
        dry_run: bool = False,
    ) -> ForgetReport:
        """Forget these checkpoints, or all that no rule keeps; then, oldest first, more until the store fits `max_bytes`.

        A named one is always kept, and so are kept tags. Unless `allow_empty`, rules keep the newest of each line, from which no
        other descends, and are refused if they would keep nothing or name a tag that no checkpoint has. The space is free after
        `gc`; until then `unforget` takes it back.
        """
        if isinstance(ids, str) or isinstance(keep_tags, str):
            raise BadArgument("checkpoints to forget, and tags to keep, are lists", "write ['one'], not 'one'")
        most = None if max_bytes is None else parse_size(max_bytes, "max_bytes")
        rules = keep_last is not None or keep_within is not None or bool(keep_tags)
        if (ids is not None) == (rules or most is not None):
            raise BadArgument(
                "say either which checkpoints to forget, or which rules keep some",
                "name them, or give a rule: how many to keep, how far back, which tags, how many bytes",
            )
        keep = retention.Keep(frozenset(self.names().values()), keep_last, keep_within, frozenset(keep_tags), most)
        if ids is None:
            return retention.forget(self.repo, keep, dry_run, allow_empty)
        return retention.forget_these(
            self.repo, keep, sorted({self.resolve(checkpoint) for checkpoint in ids}), dry_run
        )

    def unforget(self, checkpoint: Checkpoint) -> CheckpointInfo:
        """Take back that this one was forgotten; possible until `gc` has made it final."""
        return undoing.take_back(self.repo, self._forgotten(checkpoint))

    def forgotten(self) -> list[CheckpointInfo]:
        """What `unforget` can take back, newest first."""
        return [record.info() for record in undoing.forgotten(self.repo)]

    def _forgotten(self, checkpoint: Checkpoint) -> str:
        if isinstance(checkpoint, CheckpointInfo):
            return checkpoint.id
        if not isinstance(checkpoint, str) or not checkpoint.startswith("ck_"):
            raise BadArgument(f"{checkpoint!r} is not a checkpoint's id", "list what was forgotten")
        if records.is_id(checkpoint):
            return checkpoint
        return _only(checkpoint, (info.id for info in self.forgotten()), "forgotten checkpoint")

    def drop(self, checkpoint: Checkpoint) -> None:
        """Forget one for good, at the cost of one: for programs that keep a few and do not ask what that frees."""
        retention.drop(self.repo, self.names().values(), self.resolve(checkpoint))

    # carrying

    def export(self, checkpoint: Checkpoint, to: BinaryIO | str | Path, progress: Progress | None = None) -> None:
        """One self-contained file."""
        named = isinstance(to, (str, Path))
        if not (named and str(to) and "\0" not in str(to)) and not hasattr(to, "write"):
            raise BadArgument(f"{to!r} can't be written to", "give a path, or a file opened for writing bytes")
        found = self.resolve(checkpoint)
        if isinstance(to, (str, Path)):
            transfer.export_to_path(self.repo, found, Path(to), progress)
        else:
            transfer.export_checkpoint(self.repo, found, to, progress)

    def import_(self, file: BinaryIO | str | Path, progress: Progress | None = None) -> str:
        """The id of the checkpoint in an exported file, now in this store."""
        if isinstance(file, (str, Path)):
            if "\0" in str(file):
                raise BadArgument(f"{file!r} is not a path")
            return transfer.import_from_path(self.repo, Path(file), progress)
        if not hasattr(file, "read"):
            raise BadArgument(
                f"{file!r} is not an exported checkpoint", "give a path, or a file opened for reading bytes"
            )
        return transfer.import_checkpoint(self.repo, file, progress)


def _only(beginning: str, ids: Iterator[str], what: str) -> str:
    """The one of these that begins so."""
    fits = list(islice((id for id in ids if id.startswith(beginning)), 2))
    if len(fits) != 1:
        met = f"several {what}s begin" if fits else f"no {what} begins"
        remedy = "give more of the id" if fits else f"list the store's {what}s"
        raise CheckpointNotFound(f"{met} with {beginning}", remedy)
    return fits[0]


def _names(known: dict[str, str]) -> str:
    if known:
        return f"names here: {', '.join(known)}"
    return "there are no names here yet: `sandkeep checkpoint name NAME CHECKPOINT` gives one"


def _whole(url: str | Path) -> str:
    """A folder's path is what it meant when it was given, wherever this process, or the next one, stands later."""
    return url if isinstance(url, str) and (not url or "://" in url) else os.path.abspath(os.path.expanduser(url))


def list_checkpoints(
    url: str | Path | None = None, limit: int = 100, tag: str | None = None, **options: Any
) -> list[CheckpointInfo]:
    with Store(url, create=False, **options) as store:
        return store.checkpoints(limit, tag)
