"""Writing a checkpoint's tree as a layer (overlay upper format) into a fresh folder, exactly, or not at all.

Safe whatever the store says: names are checked before anything is written, every entry is made, never opened, and no
symlink exists in the folder until all files are written. Nothing is synced to disk: that is the caller's commit.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from sandkeep.checkpoints import plan as planning
from sandkeep.checkpoints.attachments import detach
from sandkeep.checkpoints.base import Base
from sandkeep.checkpoints.beside import Beside, Files, Supply, beside
from sandkeep.checkpoints.capture import load_list, load_record
from sandkeep.checkpoints.layerfiles import LayerFiles
from sandkeep.checkpoints.merge import Progress
from sandkeep.checkpoints.nodes import CHUNK, HOLE, INLINE, chunk_count, data_chunks
from sandkeep.checkpoints.plan import OutOfReach, Plan
from sandkeep.checkpoints.records import Record
from sandkeep.errors import BadArgument, Corrupt, NotFound, StoreFull
from sandkeep.store.repository import Repository


@dataclass(frozen=True)
class Unpacked:
    on: str | None  # the checkpoint the layer lies on; None: the base
    entries: int
    bytes: int
    notes: list[str]  # what this host could not give


def unpack(
    repo: Repository,
    checkpoint: str,
    to: Path,
    *,
    since: str | None = None,
    base: Base | None = None,
    limit: int | None = None,
    progress: Progress | None = None,
) -> Unpacked:
    """Write checkpoint `checkpoint` into the absent or empty folder `to`.

    With `since` only the difference over that checkpoint is written, if a layer can say it (`base` tells what shows
    below both); the answer's `on` says which it was. `limit` bounds the bytes of all files.
    """
    record = load_record(repo, checkpoint)
    groups = planning.check_groups(load_list(repo, record.links), checkpoint)
    made = _difference(repo, record, groups, since, base) if since is not None else None
    on = since if made is not None else None
    if made is None:
        made = planning.whole(repo, record.root, groups, base)
    return write_plan(repo, made, to, on, limit, progress)


def _difference(
    repo: Repository, record: Record, groups: list[list[bytes]], since: str, base: Base | None
) -> Plan | None:
    """The difference over `since`; None if a layer can't say it, or `since` can't be read to the end: it may be forgotten,
    collected or damaged, and then all is written."""
    try:
        below = load_record(repo, since)
        if below.base["fingerprint"] != record.base["fingerprint"]:
            return None
        below_groups = planning.check_groups(load_list(repo, below.links), since)
        return planning.difference(repo, record.root, groups, below.root, below_groups, base)
    except (OutOfReach, NotFound, Corrupt):
        return None


def unpack_attachment(repo: Repository, checkpoint: str, name: str, to: Path) -> Unpacked:
    """Write an attached folder into the folder `to`, which must not exist; on any failure it does not."""
    record = load_record(repo, checkpoint)
    if name not in record.attachments:
        raise NotFound(f"checkpoint {checkpoint} has nothing attached as {name!r}")
    root = record.attachments[name]
    room = os.statvfs(to.parent)
    if root.size > room.f_bavail * room.f_frsize:
        raise StoreFull(f"{root.size} bytes do not fit on the target's file system", "free some space there")
    making = Path(tempfile.mkdtemp(prefix=f".{to.name}-", dir=to.parent))
    try:
        size = detach(repo, root, making)
        making.rename(to)
    except BaseException:
        shutil.rmtree(making)
        raise
    return Unpacked(None, root.below, size, [])


def write_plan(
    repo: Repository,
    plan: Plan,
    to: Path,
    on: str | None = None,
    limit: int | None = None,
    progress: Progress | None = None,
) -> Unpacked:
    """Write what a plan says into the absent or empty folder `to`; on any failure it is left as it was."""
    existed = os.path.lexists(to)
    if existed and (to.is_symlink() or not to.is_dir() or any(to.iterdir())):
        raise BadArgument(f"{to} is not an empty folder", "name a folder that does not exist yet")
    if not existed:
        to.mkdir(parents=True)
    before = os.stat(to)
    try:
        entries, size, notes = _write(repo, plan, to, limit, progress)
    except BaseException:
        subprocess.run(["rm", "-rf", "--", *([str(to)] if not existed else map(str, to.iterdir()))], check=True)
        if existed:
            os.chown(to, before.st_uid, before.st_gid)
            os.chmod(to, before.st_mode & 0o7777)
        raise
    return Unpacked(on, entries, size, notes)


def _write(
    repo: Repository, plan: Plan, to: Path, limit: int | None, progress: Progress | None
) -> tuple[int, int, list[str]]:
    root = os.open(to, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        with beside(root, len(plan.files)) as process:
            linked = _links(plan)
            plan.files = [item for item in plan.files if item[0] not in linked]
            _check_room(repo, root, plan, limit)
            layer = LayerFiles(root, plan.files, progress)
            try:
                _fill(repo, layer, plan, process)
                layer.finish(linked, plan.others, [(b"", plan.root), *plan.folders])
            finally:
                layer.close()
            return len(plan) + len(linked), sum(e.size for _, e in plan.files), layer.notes()
    finally:
        os.close(root)


def _links(plan: Plan) -> dict[bytes, bytes]:
    """Path → the path it is a hard link to."""
    files = dict(plan.files) if plan.groups else {}
    linked: dict[bytes, bytes] = {}
    for first, *rest in plan.groups:
        for path in rest:
            if (
                first not in files
                or path not in files
                or files[first]._replace(name=b"") != files[path]._replace(name=b"")
            ):
                raise Corrupt(f"{os.fsdecode(path)} is linked to what it is not", "run verify")
            linked[path] = first
    return linked


Chunks = dict[bytes, list[tuple[int, int]]]  # blob → (file number, chunk number)


def _wanted(repo: Repository, plan: Plan) -> tuple[Files, Chunks, set[int]]:
    """The files of one chunk, the chunks of larger ones, and the numbers of those that have chunks of zeros."""
    small: Files = {}
    large: Chunks = {}
    holey: set[int] = set()
    for number, (path, entry) in enumerate(plan.files):
        if entry.size <= CHUNK:
            if entry.size > INLINE and entry.data != HOLE:
                small.setdefault(entry.data, []).append((path, entry))
            continue
        placed = 0
        for chunk, blob in data_chunks(entry, repo.read):
            large.setdefault(blob, []).append((number, chunk))
            placed += 1
        if placed < chunk_count(entry.size):
            holey.add(number)
    return small, large, holey


def _fill(repo: Repository, layer: LayerFiles, plan: Plan, process: Beside | None) -> None:
    """A thread writes the large files; this one makes the small ones, and shares them with the process if there is one."""
    with ThreadPoolExecutor(2, "unpack") as threads, layer.or_give_up():
        folders = threads.submit(layer.make_folders, [path for path, _ in plan.folders])
        small, large, holey = _wanted(repo, plan)
        supply = Supply(repo, small)
        folders.result()
        layer.start(holey)
        jobs = [threads.submit(_fill_large, repo, layer, large)]
        if process is not None:
            jobs.append(threads.submit(process.work, supply, layer))
        for task in supply:
            if layer.given_up:
                break
            supply.made(task.make(layer))
        for job in jobs:
            job.result()
        for blob, data in repo.read_many(supply.missing):
            for path, entry in small[blob]:
                layer.whole(path, entry, data)


def _fill_large(repo: Repository, layer: LayerFiles, chunks: Chunks) -> None:
    with layer.or_give_up():
        for blob, data in repo.read_many(chunks):
            if layer.given_up:
                return
            for number, chunk in chunks[blob]:
                layer.chunk(number, chunk, data)


def _check_room(repo: Repository, root: int, plan: Plan, limit: int | None) -> None:
    """Before anything that grows with what the checkpoint says of itself."""
    total = sum(entry.size for _, entry in plan.files)
    if limit is not None and total > limit:
        raise StoreFull(f"the checkpoint holds {total} bytes, the limit is {limit}", "raise the disk limit")
    room = os.fstatvfs(root)
    free = room.f_bavail * room.f_frsize
    need = sum(entry.size for _, entry in plan.files if not entry.flag)
    for _, entry in plan.files:
        if entry.flag:
            need += CHUNK * sum(1 for _ in islice(data_chunks(entry, repo.read), max(0, free - need) // CHUNK + 2))
        if need > free:
            break
    if need > free or (room.f_files and len(plan) > room.f_favail):
        raise StoreFull(
            f"{need} bytes in {len(plan)} entries do not fit on the target's file system", "free some space there"
        )
