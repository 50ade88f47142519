"""A file that appears whole, or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from sandkeep.errors import BadArgument, system
from sandkeep.owned import whole


@contextlib.contextmanager
def written(to: str | Path) -> Iterator[BinaryIO]:
    path = Path(to)
    if not str(to) or "\0" in str(to):
        raise BadArgument(f"{to!r} names no file")
    with system():
        if path.exists() and not path.is_file() and not path.is_dir():
            with open(path, "wb") as file:
                yield file
            return
        with whole(path, durable=False) as file:
            yield file
