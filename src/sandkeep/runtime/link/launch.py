"""How process 1 is started: which interpreter, which folder of code."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from sandkeep.runtime.plan import CODE

_CODE = (
    f"import sys; sys.path = [{str(Path(CODE).parent)!r}, *filter(None, sys.path)]; from guest.main import main; main()"
)


def guest_source() -> Path:
    """The guest's package on the host; shown inside, read-only, as a package called `guest`."""
    found = find_spec("sandkeep.guest")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


def guest_argv(*, forgetful: bool = False) -> list[str]:
    """`forgetful`: what the guest frees is overwritten, so that a memory image holds no secret it has let go of."""
    # -I would also ignore PYTHONMALLOC; the environment is ours alone, and the code replaces the current folder in the path.
    how = ["PYTHONMALLOC=pymalloc_debug", "python3", "-s"] if forgetful else ["python3", "-I"]
    return ["/usr/bin/env", "-i", "PATH=/usr/local/bin:/usr/bin:/bin", *how, "-S", "-B", "-X", "utf8", "-c", _CODE]
