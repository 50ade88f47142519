"""Saving a sandbox's state as a checkpoint. Owns the order of writing: chunks and nodes, then lists and session, then all of
it durable, then the record."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgpack

from sandkeep.checkpoints import records
from sandkeep.checkpoints.attachments import attach
from sandkeep.checkpoints.base import Base
from sandkeep.checkpoints.filters import Filter
from sandkeep.checkpoints.merge import Merge, PartsUnknown, Progress
from sandkeep.checkpoints.nodes import Entry
from sandkeep.checkpoints.records import Record, canonical
from sandkeep.errors import BadArgument, CheckpointNotFound, Corrupt, NotFound
from sandkeep.model import CheckpointInfo
from sandkeep.store.repository import Repository
from sandkeep.store.writer import Writer


@dataclass(frozen=True)
class Source:
    """What to save: `trees` are overlay uppers, the lowest first, on top of checkpoint `parent` (None: of the base), which the
    layers `below` show, read only if what the parent left out is to be kept now.

    The trees must not change while they are captured.
    """

    trees: Sequence[Path]
    parent: str | None = None
    base: Base = field(default_factory=Base)
    below: Sequence[Path] | None = None


def load_record(repo: Repository, checkpoint: str, cached: bool = False) -> Record:
    """From the store; with `cached`, maybe one that another machine has forgotten."""
    if not records.is_id(checkpoint):
        raise CheckpointNotFound(f"{checkpoint!r} is not the id of a checkpoint", "list the store's checkpoints")
    try:
        data = repo.get_record(records.KIND, checkpoint, cached=cached)
    except NotFound:
        raise CheckpointNotFound(f"no checkpoint {checkpoint}", "list the store's checkpoints")
    return records.unpack_record(checkpoint, data)


def load_list(repo: Repository, blob: bytes | None) -> list[Any]:
    """A packed list kept as a blob: link groups, or what was left out."""
    if blob is None:
        return []
    try:
        found = msgpack.unpackb(repo.read(blob))
    except (ValueError, msgpack.UnpackException) as error:
        raise Corrupt(f"list {blob.hex()} is malformed: {error}", "run verify to see which checkpoints suffer")
    if not isinstance(found, list):
        raise Corrupt(f"list {blob.hex()} is malformed", "run verify to see which checkpoints suffer")
    return found


def load_json(repo: Repository, blob: bytes) -> dict[str, Any]:
    try:
        found = json.loads(repo.read(blob))
    except ValueError as error:
        raise Corrupt(f"session {blob.hex()} is malformed: {error}", "run verify to see which checkpoints suffer")
    if not isinstance(found, dict):
        raise Corrupt(f"session {blob.hex()} is malformed", "run verify to see which checkpoints suffer")
    return found


def capture(
    repo: Repository,
    source: Source,
    *,
    base: Mapping[str, Any],
    session: Mapping[str, Any],
    volatile: Mapping[str, Any] | None = None,
    tag: str | None = None,
    comment: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    scope: str = "all",
    exclude: Sequence[str] | None = None,
    parent_id: str | None = None,
    attachments: Mapping[str, Path] | None = None,
    unless: str | None = None,
    progress: Progress | None = None,
) -> CheckpointInfo:
    """Save a state; the checkpoint exists when this returns, whole, or not at all.

    `base` says at least its name and fingerprint. `session` is part of the state's hash, `volatile` (what differs
    between equal states: times, process ids) is only kept. `attachments` are folders of files kept beside the tree, such
    as a memory image. `parent_id` is the checkpoint's parent in the lineage, `source.parent` unless said otherwise.
    `unless` names a checkpoint: if the state equals that one's, nothing is saved and it is the answer.
    """
    records.check_words(tag, comment, metadata, base)
    if parent_id is not None and not records.is_id(parent_id):
        raise BadArgument(f"{parent_id!r} is not the id of a checkpoint")
    rules = Filter(scope, exclude)
    facts, loose = canonical(dict(session), "session"), canonical(dict(volatile or {}), "volatile")
    with (
        _opened([*source.trees][::-1]) as trees,
        _opened([] if rules.idle else [*(source.below or ())][::-1]) as below,
        repo.writer() as writer,
    ):
        # The parent is read while the writer is announced: from here on a collector keeps what it names.
        parent = load_record(repo, source.parent) if source.parent else None
        if parent is not None and (parent.scope, parent.exclude) != (rules.scope, rules.exclude):
            raise BadArgument(
                "the parent was saved with another scope or other exclusions",
                "capture all the sandbox's layers on top of its base (parent None), and name the parent by parent_id",
            )
        merge = partial(_merge, repo, writer, source.base, rules, progress)
        try:
            root, links, left_out = merge(trees, below, parent)
        except PartsUnknown:
            if source.below is None:
                raise BadArgument(
                    "what the parent left out is to be kept now, and its layers are not given", "give them as `below`"
                )
            root, links, left_out = merge([*trees, *below], [], None)
        attached = {name: attach(writer, folder) for name, folder in (attachments or {}).items()}
        session_blob = writer.add(facts)
        if unless is not None and (same := _same(repo, unless, root, links, base, session_blob, attached)):
            return same
        volatile_blob = writer.add(loose)
        all_left_out = _add_list(writer, sorted(left_out.items()))
        writer.flush()
        lineage = parent_id or source.parent
        record = Record(
            id=records.new_id(after=lineage),
            parent_id=lineage,
            tag=tag,
            comment=comment,
            metadata=dict(metadata or {}),
            base=dict(base),
            scope=rules.scope,
            exclude=rules.exclude,
            excluded=[_shown(path) for path in sorted(left_out)[: records.SHOWN]],
            excluded_count=len(left_out),
            left_out=all_left_out,
            root=root,
            links=links,
            session=session_blob,
            volatile=volatile_blob,
            attachments=attached,
            new_bytes=writer.new_bytes,
        )
        writer.publish(records.KIND, record.id, record.pack())
    return record.info()


def _merge(
    repo: Repository, writer: Writer, base: Base, rules: Filter, progress: Progress | None,
    trees: list[int], below: list[int], parent: Record | None,
) -> tuple[Entry, bytes | None, dict[bytes, str]]:  # fmt: skip
    before = load_list(repo, parent.left_out) if parent else []
    groups = load_list(repo, parent.links) if parent else []
    merge = Merge(trees, base, rules, repo.read, writer, progress, below)
    root = merge.run(parent.root if parent else None, (path for path, why in before if why == "environment"))
    return root, _add_list(writer, merge.groups(groups)), merge.all_left_out(map(tuple, before))


def _same(
    repo: Repository, other: str, root: Entry, links: bytes | None, base: Mapping[str, Any], session: bytes, attached: Mapping[str, Entry]
) -> CheckpointInfo | None:  # fmt: skip
    try:
        info = load_record(repo, other).info()
    except (CheckpointNotFound, Corrupt):
        return None
    return info if info.hash == records.state_hash(root, links, base, session, attached) else None


def _shown(path: bytes) -> str:
    return "/" + path.decode(errors="replace")


def _add_list(writer: Writer, items: Sequence[Any]) -> bytes | None:
    return writer.add(msgpack.packb(items)) if items else None


@contextmanager
def _opened(folders: Sequence[Path]) -> Iterator[list[int]]:
    fds: list[int] = []
    try:
        for folder in folders:
            fds.append(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
        yield fds
    finally:
        for fd in fds:
            os.close(fd)
