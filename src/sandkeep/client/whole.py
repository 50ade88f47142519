"""A file that appears whole, or not at all."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from sandkeep.errors import BadArgument, system


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
        partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
        try:
            with open(partial, "xb") as file:
                yield file
            partial.replace(path)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink()
