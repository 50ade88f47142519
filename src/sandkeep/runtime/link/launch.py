"""How process 1 is started: which interpreter, which folder of code."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from sandkeep.runtime.plan import CODE

_CODE = f"import sys; sys.path[:0] = [{str(Path(CODE).parent)!r}]; from guest.main import main; main()"


def guest_source() -> Path:
    """The guest's package on the host; shown inside, read-only, as a package called `guest`."""
    found = find_spec("sandkeep.guest")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


def guest_argv() -> list[str]:
    return [
        "/usr/bin/env",
        "-i",
        "PATH=/usr/local/bin:/usr/bin:/bin",
        "python3",
        "-I",
        "-S",
        "-B",
        "-X",
        "utf8",
        "-c",
        _CODE,
    ]
