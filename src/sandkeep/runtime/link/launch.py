"""How process 1 is started: which interpreter, which folder of code."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from sandkeep import owned
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


@cache
def _sources() -> tuple[list[Path], str]:
    """The guest's modules, and a name for their content."""
    sources = sorted(guest_source().glob("*.py"))
    digest = hashlib.sha256(b"".join(path.name.encode() + b"\0" + path.read_bytes() for path in sources)).hexdigest()
    return sources, digest[:16]


def guest_code(home: Path) -> Path:
    """The guest's package as sandboxes of this home see it: a copy named by its content, compiled for this host's Python.

    A living sandbox keeps the code that it was started with, and starting one compiles nothing.
    """
    sources, name = _sources()
    made = home / "guest" / name
    if not made.is_dir():
        made.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with owned.folder(".making-", made.parent) as folder:
            fresh = folder / "guest"
            fresh.mkdir(mode=0o755)
            for path in sources:
                shutil.copyfile(path, fresh / path.name)
            _compile(fresh)
            try:
                os.rename(fresh, made)
            except OSError:
                if not made.is_dir():
                    raise
    return made


def _compile(folder: Path) -> None:
    """Never read again from the sources: their times mean nothing in a copy."""
    python = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable
    argv = [python, "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", str(folder)]
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, capture_output=True)
