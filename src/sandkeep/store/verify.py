"""Verification: reads everything again and names each object that is damaged or missing. Changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sandkeep.errors import Corrupt, NotFound
from sandkeep.store.format import (
    PACK,
    PackIndex,
    crc32,
    footer_length,
    read_footer,
    sha256,
    unblock,
)
from sandkeep.store.looking import LOOKS, again, read_index, read_payload
from sandkeep.store.objects import Objects

if TYPE_CHECKING:
    from sandkeep.store.repository import Repository

_SEALED = ("records/", "gc/", "writers/", "expired/")


@dataclass(frozen=True)
class Problem:
    """One damaged or missing object, and the blobs that can't be read from it."""

    object: str
    what: str
    blobs: tuple[bytes, ...] = ()


def read_pack_footer(objects: Objects, name: str, size: int) -> PackIndex:
    return again(lambda: _read_pack_footer(objects, name, size))


def _read_pack_footer(objects: Objects, name: str, size: int) -> PackIndex:
    if size < len(PACK) + 4:
        raise Corrupt(f"{name} is only {size} bytes", "run verify", object=name)
    length = footer_length(objects.get(name, size - 4, 4))
    if length > size - 4 - len(PACK):
        raise Corrupt(f"{name} has a damaged end", "run verify", object=name)
    return read_footer(name, objects.get(name, size - 4 - length, length))


def verify(repo: Repository, read_data: bool, progress: Callable[[int, int], None] | None) -> list[Problem]:
    objects = repo.objects
    problems = list(_sealed(objects))
    packs: dict[str, str] = {}  # pack -> an index object that names it
    for name, _, _ in objects.list("index/"):
        try:
            packs.update(dict.fromkeys((pack.name for pack in read_index(objects, name)), name))
        except NotFound:
            continue
        except Corrupt as error:
            problems.append(Problem(name, error.message))
    sizes = {name: size for name, size, _ in objects.list("packs/")}
    check = _check_pack if read_data else _check_footer
    by_source: dict[str, list[str]] = {}
    for pack, source in packs.items():
        by_source.setdefault(source, []).append(pack)
    done = 0
    with ThreadPoolExecutor(min(4, objects.parallel), "verify") as pool:
        for source, wanted in by_source.items():
            try:
                named = {pack.name: pack for pack in read_index(objects, source)}
            except (NotFound, Corrupt):
                named = {}  # merged away or damaged since it was listed
            jobs = [pool.submit(check, objects, named[pack], sizes.get(pack)) for pack in wanted if pack in named]
            for job in jobs:
                problem = job.result()
                done += 1
                if problem and not _collected(repo, problem):
                    problems.append(problem)
                if progress:
                    progress(done, len(packs))
    return problems


def _sealed(objects: Objects) -> Iterator[Problem]:
    for name in ("config", *(name for prefix in _SEALED for name, _, _ in objects.list(prefix))):
        try:
            read_payload(objects, name)
        except NotFound:
            if name == "config":
                yield Problem(name, "it is missing")
        except Corrupt as error:
            yield Problem(name, error.message)


def _collected(repo: Repository, problem: Problem) -> bool:
    """Whether a collector has just removed that pack, and the index no longer names it."""
    repo.index.sync(full=True)
    return not repo.index.rows("SELECT 1 FROM pack WHERE name=?", (problem.object,))


def _check_footer(objects: Objects, index: PackIndex, size: int | None) -> Problem | None:
    try:
        size = objects.size(index.name) if size is None else size
        if size is None:
            raise NotFound(f"pack {index.name} is missing")
        if read_pack_footer(objects, index.name, size) != index:
            raise Corrupt(f"pack {index.name} holds something else than its index says")
    except (NotFound, Corrupt) as error:
        return Problem(index.name, error.message, _ids(index))
    return None


def _check_pack(objects: Objects, index: PackIndex, size: int | None) -> Problem | None:
    """What is wrong with it each time that it is read."""
    problem = None
    for _ in range(LOOKS):
        if (problem := _look_through(objects, index)) is None:
            break
    return problem


def _look_through(objects: Objects, index: PackIndex) -> Problem | None:
    """Every byte: head, blocks by CRC and blobs by SHA-256, footer, end."""
    try:
        data = memoryview(objects.get(index.name))
    except (NotFound, Corrupt) as error:
        return Problem(index.name, "it is missing" if isinstance(error, NotFound) else error.message, _ids(index))
    bad: list[bytes] = []
    why = ""
    at = 0
    for block in index.blocks:
        ids = [index.ids[32 * k : 32 * k + 32] for k in range(at, at + block.blobs)]
        lengths = index.lengths[at : at + block.blobs]
        at += block.blobs
        stored = data[block.offset : block.offset + block.stored]
        if crc32(stored) != block.crc:
            why = f"a block at byte {block.offset} is damaged"
        try:
            raw, start = memoryview(unblock(stored, block.raw, index.name)), 0
        except Corrupt as error:
            bad, why = bad + ids, error.message
            continue
        for blob, length in zip(ids, lengths, strict=True):
            if sha256(raw[start : start + length]) != blob:
                bad.append(blob)
                why = f"blob {blob.hex()} is damaged"
            start += length
    try:
        if bytes(data[: len(PACK)]) != PACK:
            raise Corrupt("its head is damaged")
        footer = bytes(data[index.size : -4])
        if footer_length(bytes(data[-4:])) != len(footer) or read_footer(index.name, footer) != index:
            raise Corrupt("its end does not agree with the index")
    except Corrupt as error:
        why = why or error.message
    return Problem(index.name, why, tuple(bad)) if why else None


def _ids(index: PackIndex) -> tuple[bytes, ...]:
    return tuple(index.ids[at : at + 32] for at in range(0, len(index.ids), 32))
