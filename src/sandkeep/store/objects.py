"""The seam to object storage: what every backend promises, and how a URL becomes one.

It knows names and bytes, nothing of packs or records. `tests/test_store_objects.py` is the conformance suite.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from sandkeep.errors import BadArgument

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")
_PREFIX = re.compile(r"([A-Za-z0-9_-][A-Za-z0-9._-]*/)*")


class Objects(Protocol):
    """Named, immutable-by-convention byte strings.

    - A name is made of segments of letters, digits, `.`, `_` and `-`, joined by `/`; no segment starts with a dot.
    - `put` (of one or more parts, in order) is whole or not at all, replaces what was there, and is durable when it returns.
      Unless `soon`, it will hardly be read before long: a cache is better used for other things.
    - What `put` stored or `delete` removed shows in every later `get`, `size` and `list`, from any process.
    - `get` gives exactly what was asked: `NotFound` if there is no such object, `Corrupt` if it ends too early.
    - `list` takes a prefix that is empty or ends in `/`; names come sorted, those up to and including `after` left out.
      Times are the backend's own clock: compare them only with each other.
    - `newest` gives the same names from the last to the first, at a cost that follows how many are taken. None: it can't.
    - Errors are `StoreError`s; transient ones were retried before they are raised.
    """

    url: str
    place: str  # where exactly that is; two copies of a store differ in it
    parallel: int  # how many requests at once pay
    direct: bool  # what a process has asked for is done by itself, and never after its death

    def put(self, name: str, *data: bytes | bytearray | memoryview, soon: bool = True) -> None: ...
    def get(self, name: str, offset: int = 0, length: int | None = None) -> bytes: ...
    def list(self, prefix: str, after: str = "") -> Iterator[tuple[str, int, float]]: ...
    def delete(self, names: Iterable[str]) -> None: ...
    def size(self, name: str) -> int | None: ...
    def newest(self, prefix: str) -> Iterator[str] | None: ...


def check_name(name: str) -> str:
    if not _NAME.fullmatch(name) or len(name) > 900:
        raise BadArgument(f"{name!r} is not an object name", "use letters, digits, '.', '_', '-' and '/'")
    return name


def check_prefix(prefix: str) -> str:
    if not _PREFIX.fullmatch(prefix):
        raise BadArgument(f"{prefix!r} is not a prefix", "it is empty or ends in '/'")
    return prefix


def open_objects(
    url: str | Path,
    *,
    region: str | None = None,
    endpoint: str | None = None,
    access_key: str | None = None,
    secret_key: str | None = None,
    **options: Any,
) -> Objects:
    """A folder's path or `file://` URL, `s3://bucket/prefix` (also `gs://`, `az://`), or `sandkeep://`. Contacts nothing yet."""
    from sandkeep.store.folder import Folder

    text = str(url)
    if isinstance(url, Path) or "://" not in text:
        parts, path = None, text
    else:
        parts = urlsplit(text)
        path = unquote(parts.path)
        if parts.query or parts.fragment or parts.username or parts.password:
            raise BadArgument("a store's URL has no user, query or fragment", "give keys as arguments or AWS variables")
    if parts is None or parts.scheme == "file":
        given = {"region": region, "endpoint": endpoint, "access_key": access_key, "secret_key": secret_key, **options}
        if extra := [key for key, value in given.items() if value is not None]:
            raise BadArgument(f"{extra[0]} means nothing for a folder", "give an s3:// URL, or leave it out")
        if not path or (parts is not None and (parts.netloc not in ("", "localhost") or not path.startswith("/"))):
            raise BadArgument(f"{text!r} names no folder")
        return Folder(Path(path))
    if parts.scheme == "sandkeep":
        from sandkeep.store.gateway import Gateway

        return Gateway(parts.netloc + path.rstrip("/"))
    from sandkeep.store.bucket import Bucket

    return Bucket(
        parts.scheme,
        parts.netloc,
        path.strip("/"),
        region=region,
        endpoint=endpoint,
        access_key=access_key,
        secret_key=secret_key,
        **options,
    )
