"""Writers, collectors and deleters on one store in memory, on a clock of its own: who acts next, and how late it is by then,
is drawn from a seed.

Each actor is a thread that stops before each request until it is its turn; what an actor's own pools ask goes through with it.
Leases are not renewed here (their keepers sleep by the real clock), so actors that dawdle lose theirs.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from faulty import Crash
from sandkeep.errors import NotFound, SandkeepError
from sandkeep.store import lease
from sandkeep.store.repository import Repository
from store_work import blobs_of, check, collect, ids_in, save

PAUSES = [0.0] * 60 + [30.0] * 4 + [700.0, 1000.0]


class Schedule:
    """Whose turn it is, and the time."""

    def __init__(self, seed: int) -> None:
        self.rng, self.clock = random.Random(seed), 1000.0
        self._slow = self.rng.random() < 0.5
        self._gates: dict[int, threading.Semaphore] = {}
        self._waiting: list[int] = []
        self._order: list[int] = []  # as they began
        self._moved = threading.Semaphore(0)
        self.doomed: dict[int, int] = {}  # actors that die before this many requests more

    def turn(self) -> None:
        me = threading.get_ident()
        if me not in self._gates:
            return
        self._waiting.append(me)
        self._moved.release()
        self._gates[me].acquire()
        if me in self.doomed:
            self.doomed[me] -= 1
            if self.doomed[me] < 0:
                raise Crash

    def run(self, actors: list[Callable[[], None]]) -> None:
        threads = [threading.Thread(target=self._act, args=(actor,)) for actor in actors]
        for thread in threads:
            thread.start()
            self._moved.acquire()
        while self._waiting:
            self.clock += self.rng.choice(PAUSES) if self._slow else 0.0
            self._waiting.sort(key=self._order.index)
            self._gates[self._waiting.pop(self.rng.randrange(len(self._waiting)))].release()
            self._moved.acquire()
        for thread in threads:
            thread.join()

    def _act(self, actor: Callable[[], None]) -> None:
        me = threading.get_ident()
        self._gates[me] = threading.Semaphore(0)
        self._order.append(me)
        try:
            self.turn()
            if self.rng.random() < 0.1:
                self.doomed[me] = self.rng.randrange(30)
            actor()
        except (Crash, SandkeepError):
            pass
        finally:
            del self._gates[me]
            self._moved.release()


class Simulated:
    """Objects in memory; times are the schedule's."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.url, self.place, self.parallel = schedule, "memory://", "memory://", 1
        self.direct = False
        self.held: dict[str, tuple[bytes, float]] = {}

    def put(self, name: str, *data: bytes | bytearray | memoryview, soon: bool = True) -> None:
        self.schedule.turn()
        self.held[name] = b"".join(bytes(part) for part in data), self.schedule.clock

    def get(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        self.schedule.turn()
        if name not in self.held:
            raise NotFound(f"no object {name}")
        data = self.held[name][0]
        return data[offset:] if length is None else data[offset : offset + length]

    def list(self, prefix: str, after: str = "") -> Iterator[tuple[str, int, float]]:
        self.schedule.turn()
        found = sorted(name for name in self.held if name.startswith(prefix) and name > after)
        return iter([(name, len(self.held[name][0]), self.held[name][1]) for name in found])

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            self.schedule.turn()
            self.held.pop(name, None)

    def size(self, name: str) -> int | None:
        self.schedule.turn()
        return len(self.held[name][0]) if name in self.held else None

    def newest(self, prefix: str) -> Iterator[str] | None:
        return None


def history(seed: int, folder: Path) -> int:
    """A few actors at once, some one after another; then every record that was acknowledged and not deleted must be whole."""
    schedule, rng = Schedule(seed), random.Random(seed)
    objects = Simulated(schedule)
    with Repository.open(objects, folder / "first") as repo:
        for draw in range(rng.randrange(3)):
            save(repo, f"first{draw}", blobs_of(draw, 3))
            repo.delete_record("t", f"first{draw}")
        if rng.random() < 0.7:
            collect(repo)  # what nobody needs is condemned; the next one removes it
    told: dict[str, tuple[list[bytes], list[bytes]]] = {}
    deleted: set[str] = set()
    was, lease.now = lease.now, lambda: schedule.clock

    def actor(number: int) -> Callable[[], None]:
        kinds = [rng.choice(["write", "write", "collect", "delete"]) for _ in range(rng.randint(1, 5))]
        draws = [rng.randrange(3) for _ in kinds]

        def act() -> None:
            with Repository.open(objects, folder / f"cache{number}") as repo:
                for at, (kind, draw) in enumerate(zip(kinds, draws, strict=True)):
                    if kind == "collect":
                        collect(repo)
                    elif kind == "write":
                        blobs = blobs_of(draw, 3) + blobs_of(100 * number + at + 10, at % 2)
                        name = f"r{number}-{at}"
                        told[name] = save(repo, name, blobs), blobs
                    else:
                        for name in sorted(told.keys() - deleted)[: draw % 3]:
                            deleted.add(name)
                            repo.delete_record("t", name)

        return act

    try:
        schedule.run([actor(number) for number in range(rng.randint(2, 4))])
        with Repository.open(objects, folder / "last") as repo:
            for _ in range(2):
                there = set(repo.list_records("t", full=True))
                assert told.keys() - deleted <= there, f"seed {seed}: records are gone"
                for name in there & told.keys():
                    check(repo, *told[name])
                for name in there - told.keys():
                    assert all(repo.read(blob) is not None for blob in ids_in(repo.get_record("t", name)))
                schedule.clock += 2000
                collect(repo)
    finally:
        lease.now = was
    return len(objects.held)
