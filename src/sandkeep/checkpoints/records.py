"""A checkpoint's record: the small immutable object whose existence is the commit point. Owns ids, the record's format and
the hash of a state."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

import msgpack

from sandkeep.checkpoints.nodes import DIR, Entry
from sandkeep.errors import BadArgument, Corrupt
from sandkeep.model import CheckpointInfo, check_metadata

KIND = "checkpoints"
FORGOTTEN = "forgotten"
SHOWN = 100  # excluded paths named in the record itself
_VERSION = 1
_DIGITS = "0123456789abcdefghjkmnpqrstvwxyz"
_PREFIX = "ck_"
_lock = threading.Lock()
_last = 0


def new_id(after: str | None = None) -> str:
    """A unique id that sorts by time of creation, and after `after` whatever this machine's clock says."""
    global _last
    with _lock:
        stamp = max(time.time_ns() // 1_000_000, _last + 1, 1 + (time_of(after) if after else 0))
        _last = stamp
    number = (stamp << 80) | int.from_bytes(os.urandom(10))
    return _PREFIX + "".join(_DIGITS[(number >> shift) & 31] for shift in range(125, -1, -5))


def time_of(checkpoint: str) -> int:
    """Milliseconds since 1970 in an id."""
    number = 0
    for digit in checkpoint[len(_PREFIX) :]:
        number = number << 5 | _DIGITS.index(digit)
    return number >> 80


def is_id(text: str) -> bool:
    return text.startswith(_PREFIX) and len(text) == 29 and all(c in _DIGITS for c in text[3:])


def canonical(value: Any, what: str) -> bytes:
    """JSON bytes that are equal for equal values."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise BadArgument(
            f"{what} can't be kept as JSON: {error}", "use texts, numbers, lists and dicts with text keys"
        )


def state_hash(
    root: Entry, links: bytes | None, base: Mapping[str, Any], session: bytes, attachments: Mapping[str, Entry]
) -> str:
    attached = sorted((name, entry.data) for name, entry in attachments.items())
    facts = canonical(dict(base), "base")
    return sha256(msgpack.packb([list(root[:10]), links, facts, session, attached])).hexdigest()


@dataclass(frozen=True)
class Record:
    id: str
    parent_id: str | None
    tag: str | None
    comment: str | None
    metadata: dict[str, Any]
    base: dict[str, Any]
    scope: str
    exclude: list[str] | None
    excluded: list[str]  # the first of them; all are in the blob `left_out`
    excluded_count: int
    left_out: bytes | None
    root: Entry
    links: bytes | None  # blob: groups of paths that are one file
    session: bytes  # blob: canonical JSON
    volatile: bytes  # blob: canonical JSON that is kept, but not part of the hash
    attachments: dict[str, Entry] = field(default_factory=dict)
    new_bytes: int = 0

    @property
    def hash(self) -> str:
        """Of the state: the tree without its times, the base, the session, what is attached."""
        return state_hash(self.root, self.links, self.base, self.session, self.attachments)

    def info(self) -> CheckpointInfo:
        when = datetime.fromtimestamp(time_of(self.id) / 1000, UTC)
        more = self.excluded_count - len(self.excluded)
        return CheckpointInfo(
            id=self.id,
            hash=self.hash,
            parent_id=self.parent_id,
            tag=self.tag,
            comment=self.comment,
            timestamp=when.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            size_bytes=self.root.size + sum(a.size for a in self.attachments.values()),
            new_bytes=self.new_bytes,
            base=str(self.base["name"]),
            scope=self.scope,
            excluded=[*self.excluded, *([f"… and {more} more"] if more > 0 else [])],
            memory="memory" in self.attachments,
            metadata=self.metadata,
        )

    def pack(self) -> bytes:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return msgpack.packb({"version": _VERSION, "hash": self.hash, **values})  # type: ignore[no-any-return]


def unpack_record(checkpoint: str, data: bytes) -> Record:
    """The record with this id; anything but a well-formed one that hashes to what it says is Corrupt."""
    remedy = "forget it, or restore the store's folder or bucket from a copy"
    try:
        values = msgpack.unpackb(data)
        version = values.pop("version")
        if version != _VERSION:
            raise Corrupt(
                f"checkpoint {checkpoint} has format {version}", "it was written by a newer Sandkeep: upgrade"
            )
        stated = values.pop("hash")
        values["root"] = _entry(values["root"])
        values["attachments"] = {name: _entry(row) for name, row in values["attachments"].items()}
        record = Record(**values)
        if record.id != checkpoint or record.hash != stated:
            raise ValueError("id or hash is not the one it states")
        check_told(record.parent_id, record.tag, record.comment)
        _check_kinds(record)
        record.info()
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, msgpack.UnpackException) as error:
        raise Corrupt(f"the record of checkpoint {checkpoint} is malformed: {error}", remedy)
    return record


def check_told(parent: Any, *words: Any) -> None:
    """What a store says of a checkpoint's parent, and texts about it."""
    if parent is not None and not (isinstance(parent, str) and is_id(parent)):
        raise ValueError("its parent is not a checkpoint")
    if not all(word is None or isinstance(word, str) for word in words):
        raise ValueError("a text is not a text")


def _check_kinds(record: Record) -> None:
    texts = [record.scope, *(record.exclude or ()), *record.excluded, *record.attachments]
    numbers = [record.excluded_count, record.new_bytes]
    blobs = [record.session, record.volatile, *(blob for blob in (record.links, record.left_out) if blob is not None)]
    if (
        not all(isinstance(text, str) for text in texts)
        or not all(type(number) is int and number >= 0 for number in numbers)
        or not all(isinstance(blob, bytes) and len(blob) == 32 for blob in blobs)
        or not isinstance(record.metadata, dict)
    ):
        raise ValueError("a field is not what it should be")


def _entry(row: list[Any]) -> Entry:
    entry = Entry(*row)
    numbers = (entry.mode, entry.uid, entry.gid, entry.size, entry.below)
    if any(type(number) is not int or number < 0 for number in numbers) or type(entry.mtime) is not int:
        raise ValueError("a root has bad numbers")
    if entry.mode > 0o7777 or max(entry.uid, entry.gid) >= 1 << 32 or not -(1 << 63) <= entry.mtime < 1 << 63:
        raise ValueError("a root has numbers out of range")
    if entry.kind != DIR or len(entry.data) != 32 or len(entry.node) != 32:
        raise ValueError("a root is not a directory")
    xattrs = entry.xattrs and tuple((bytes(k), bytes(v)) for k, v in entry.xattrs)
    return entry._replace(name=b"", xattrs=xattrs or None)


def check_comment(comment: str | None) -> None:
    if comment is not None and not (isinstance(comment, str) and len(comment) <= 10_000 and "\0" not in comment):
        raise BadArgument("a comment is a text of at most 10000 characters without NUL")
    if comment is not None and comment.encode(errors="ignore").decode() != comment:
        raise BadArgument("the comment has characters that no text may have", "remove the lone surrogates")


def _plain(tag: str) -> bool:
    return tag == tag.strip() and not tag.startswith("-")


def check_words(
    tag: str | None, comment: str | None, metadata: Mapping[str, Any] | None, base: Mapping[str, Any]
) -> None:
    if tag is not None and not (isinstance(tag, str) and 0 < len(tag) <= 200 and tag.isprintable() and _plain(tag)):
        raise BadArgument(
            f"{tag!r} can't be a tag",
            "use 1 to 200 characters that can be printed; not a space at an end, not '-' at the beginning",
        )
    check_comment(comment)
    check_metadata(metadata)
    if not isinstance(base.get("name"), str) or not isinstance(base.get("fingerprint"), str):
        raise BadArgument("base must say its name and fingerprint")
