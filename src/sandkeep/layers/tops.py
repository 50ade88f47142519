"""What a live top holds, as far as it decides how it is saved."""

from __future__ import annotations

import os
from pathlib import Path


def linked(top: Path) -> bool:
    """Whether a file in it has more than one name. As a lower layer overlayfs would part them at the next write."""
    folders = [os.fspath(top)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_nlink > 1:
                    return True
    return False
