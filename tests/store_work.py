"""What the tests of the store share: saving, collecting and checking; as a program, one writer or collector at work."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

from sandkeep.errors import Busy, NotFound
from sandkeep.store.gc import GcReport
from sandkeep.store.objects import open_objects
from sandkeep.store.repository import Repository


def live(repo: Repository) -> list[bytes]:
    found = []
    for name in repo.list_records("t", full=True):
        try:
            data = repo.get_record("t", name)
        except NotFound:
            continue
        found += ids_in(data)
    return found


def collect(repo: Repository, dry_run: bool = False) -> GcReport:
    return repo.gc(lambda: live(repo), dry_run)


def blobs_of(seed: int, count: int = 12) -> list[bytes]:
    dice = random.Random(seed)
    return [dice.randbytes(dice.randrange(1, 400)) for _ in range(count)]


def mixed(seed: int, count: int = 40, large: int = 2) -> list[bytes]:
    """Small and large ones, some that shrink."""
    dice = random.Random(seed)
    made = [dice.randbytes(dice.randrange(0, 3000)) * dice.randrange(1, 4) for _ in range(count)]
    return made + [dice.randbytes(150_000) for _ in range(large)] + [bytes([seed % 256]) * 200_000]


def save(repo: Repository, name: str, blobs: list[bytes]) -> list[bytes]:
    with repo.writer() as writer:
        ids = [writer.add(blob) for blob in blobs]
        writer.publish("t", name, b"".join(ids))
    return ids


def ids_in(data: bytes) -> list[bytes]:
    return [data[at : at + 32] for at in range(0, len(data), 32)]


def kept(repo: Repository, name: str, blobs: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    return ids_in(repo.get_record("t", name)), blobs


def check(repo: Repository, ids: list[bytes], blobs: list[bytes]) -> None:
    """These blobs can be read, each once."""
    expected = dict(zip(ids, blobs, strict=True))
    found = list(repo.read_many(ids))
    assert len(found) == len(expected)
    assert dict(found) == expected


def check_all(repo: Repository) -> int:
    """Every blob of every visible record can be read."""
    count = 0
    for name in repo.list_records("t", full=True):
        try:
            data = repo.get_record("t", name)
        except NotFound:
            continue
        ids = ids_in(data)
        assert len(dict(repo.read_many(ids))) == len(set(ids)), name
        count += 1
    return count


def writes(folder: Path, seed: int, until: float) -> None:
    dice = random.Random(seed)
    saved = 0
    mine: list[str] = []
    with Repository.open(open_objects(folder / "store"), folder / f"cache{seed % 3}") as repo:
        while time.time() < until or not saved:
            blobs = [b"shared %d" % dice.randrange(30) * 9 for _ in range(5)] + [dice.randbytes(50)]
            name = f"{seed}-{saved:05}"
            save(repo, name, blobs)
            data = repo.get_record("t", name)
            for _, found in repo.read_many(ids_in(data)):
                assert found in blobs
            mine.append(name)
            if len(mine) > 3:
                repo.delete_record("t", mine.pop(0))
            saved += 1
            if saved == 1:
                print("begun", flush=True)
    print(*mine)


def collects(folder: Path, seed: int, until: float) -> None:
    rounds = 0
    with Repository.open(open_objects(folder / "store"), folder / f"gc{seed}") as repo:
        while time.time() < until or not rounds:
            try:
                collect(repo)
            except Busy:
                time.sleep(0.01)
            rounds += 1
            if rounds == 1:
                print("begun", flush=True)


if __name__ == "__main__":
    verb, where, number, end = sys.argv[1:]
    (writes if verb == "write" else collects)(Path(where), int(number), float(end))
