"""What the tests of collecting share: saving, collecting and checking; as a program, one writer or collector at work."""

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
        found += [data[at : at + 32] for at in range(0, len(data), 32)]
    return found


def collect(repo: Repository, dry_run: bool = False) -> GcReport:
    return repo.gc(lambda: live(repo), dry_run)


def blobs_of(seed: int, count: int = 12) -> list[bytes]:
    dice = random.Random(seed)
    return [dice.randbytes(dice.randrange(1, 400)) for _ in range(count)]


def save(repo: Repository, name: str, blobs: list[bytes]) -> None:
    with repo.writer() as writer:
        writer.publish("t", name, b"".join([writer.add(blob) for blob in blobs]))


def check_all(repo: Repository) -> int:
    """Every blob of every visible record can be read."""
    count = 0
    for name in repo.list_records("t", full=True):
        try:
            data = repo.get_record("t", name)
        except NotFound:
            continue
        ids = [data[at : at + 32] for at in range(0, len(data), 32)]
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
            for _, found in repo.read_many([data[at : at + 32] for at in range(0, len(data), 32)]):
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
