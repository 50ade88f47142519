"""Plain files for people: a checkpoint, or what matches a pattern, written into an absent or empty folder."""

from __future__ import annotations

import os
from pathlib import Path

from sandkeep.checkpoints.capture import load_list, load_record
from sandkeep.checkpoints.globs import Glob
from sandkeep.checkpoints.merge import Progress
from sandkeep.checkpoints.nodes import DIR, WHITEOUT, Entry
from sandkeep.checkpoints.plan import Plan, check_groups, walk
from sandkeep.checkpoints.unpack import Unpacked, write_plan
from sandkeep.errors import FileMissing
from sandkeep.store.repository import Repository


def extract(
    repo: Repository, checkpoint: str, to: Path, pattern: str | None = None, progress: Progress | None = None
) -> Unpacked:
    """Whatever matches, all below it, and the folders above it. Deletions leave no trace; symlinks are made, never followed."""
    record = load_record(repo, checkpoint)
    plan = Plan(record.root._replace(flag=False))
    chosen: set[bytes] = set()
    glob = Glob(pattern) if pattern is not None else None
    folders: dict[bytes, Entry] = {}
    for path, entry in walk(repo, record.root):
        above = os.path.dirname(path)
        if entry.kind == WHITEOUT:
            continue
        if entry.kind == DIR:
            entry = entry._replace(flag=False)
            folders[path] = entry
        if glob is None or above in chosen or glob.matches(os.fsdecode(path)):
            if entry.kind == DIR:
                chosen.add(path)
            _add(plan, path, entry, folders)
    if glob is not None and not len(plan):
        raise FileMissing(f"nothing in checkpoint {checkpoint} matches {pattern!r}", "see what there is with find")
    written = {path for path, _ in plan.files}
    groups = [
        [path for path in group if path in written] for group in check_groups(load_list(repo, record.links), checkpoint)
    ]
    plan.groups = [group for group in groups if len(group) > 1]
    return write_plan(repo, plan, to, progress=progress)


def _add(plan: Plan, path: bytes, entry: Entry, folders: dict[bytes, Entry]) -> None:
    missing = []
    above = os.path.dirname(path)
    while above in folders:
        missing.append((above, folders.pop(above)))
        above = os.path.dirname(above)
    plan.folders += reversed(missing)
    if entry.kind != DIR:
        plan.put(path, entry)
    elif path in folders:
        plan.folders.append((path, folders.pop(path)))
