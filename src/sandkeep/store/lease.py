"""Leases: how writers and collectors know of each other without locks and without comparing clocks.

docs/design.md, section 7, says why this is right.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from typing import Any

import msgpack

from sandkeep.errors import Corrupt, NotFound, StateConflict, StoreError
from sandkeep.store import holder
from sandkeep.store.format import seal, unique
from sandkeep.store.index import Marks, read_marks
from sandkeep.store.looking import read_payload
from sandkeep.store.objects import Objects

LEASE = 900.0  # seconds; a collector takes a lease as lapsed at this age, its holder already at two thirds of it


def now() -> float:
    """Seconds that go on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def read_sealed(objects: Objects, name: str) -> Any:
    return msgpack.unpackb(read_payload(objects, name), strict_map_key=False)


def read_condemned(objects: Objects, name: str) -> list[str]:
    return [str(pack) for pack in read_sealed(objects, name)["packs"]]


def seal_value(name: str, value: Any) -> bytes:
    return seal(name, msgpack.packb(value))


def put_sealed(objects: Objects, name: str, value: Any) -> None:
    objects.put(name, seal_value(name, value))


class Lease:
    """Held from before the condemned packs are read until the last record is put."""

    def __init__(self, objects: Objects, role: str, duration: float = LEASE) -> None:
        self.objects, self.role, self.duration = objects, role, duration
        self.id = unique()
        self.name = f"writers/{self.id}"
        self.seen: list[str] = []
        self.condemned: frozenset[str] = frozenset()  # packs to be treated as absent
        self.marks: Marks | None = None
        self._holder = {**holder.here(), "direct": objects.direct}
        self._stop = threading.Event()
        self._renewed = now()
        self._keeper = threading.Thread(target=self._keep, name=f"lease-{self.id}", daemon=True)

    def begin(self) -> None:
        self._renew()
        try:
            while True:
                marks = read_marks(self.objects)
                if self.role == "gc":
                    _remove_damaged(self.objects, marks.condemned)
                    marks = read_marks(self.objects)
                try:
                    named = {name: read_condemned(self.objects, name) for name in marks.condemned}
                    self.marks = marks
                    break
                except NotFound:
                    continue  # a collector has just finished with it
                except Corrupt as error:
                    raise Corrupt(
                        f"{error.message}: what it condemns is unknown", "run gc, which removes it", **error.details
                    ) from error
            if named:
                self.seen = sorted(named)
                self.condemned = frozenset(pack for packs in named.values() for pack in packs)
                self._renew()
        except BaseException:
            self.end()
            raise
        self._keeper.start()

    def end(self) -> None:
        self._stop.set()
        if self._keeper.is_alive():
            self._keeper.join()
        try:
            self.objects.delete([self.name])
        except StoreError:
            pass  # it lapses by itself

    def _renew(self) -> None:
        asked = now()
        put_sealed(self.objects, self.name, {"role": self.role, "seen": self.seen, "holder": self._holder})
        self._renewed = asked

    def _keep(self) -> None:
        wait = self.duration / 4
        while not self._stop.wait(wait):
            try:
                if self.lapsed() or self.objects.size(f"expired/{self.id}") is not None:
                    return
                self._renew()
                wait = self.duration / 4
            except StoreError:
                wait = self.duration / 40

    def lapsed(self) -> bool:
        return now() - self._renewed > self.duration * 2 / 3

    def check(self) -> None:
        if self.lapsed():
            raise _lost()

    def check_twice(self) -> None:
        """Also whether a collector has given this lease up."""
        if self.lapsed() or self.objects.size(f"expired/{self.id}") is not None:
            raise _lost()

    def put(self, name: str, data: bytes) -> None:
        """Put an object that names packs. Withdrawn if a collector has meanwhile given this lease up: the collector marks the
        lease before it looks, we look for the mark after we have put, so one of the two sees the other."""
        self.check()
        self.objects.put(name, data)
        if self.lapsed() or self.objects.size(f"expired/{self.id}") is not None:
            self.objects.delete([name])
            raise _lost()


def clock(objects: Objects) -> float:
    """The backend's own time: no other can be compared with that of an object."""
    mine = Lease(objects, "writer")
    mine._renew()
    try:
        return max(at for name, _, at in objects.list("writers/") if name == mine.name)
    finally:
        mine.end()


def _remove_damaged(objects: Objects, condemned: tuple[str, ...]) -> None:
    """A mark that can't be read condemns nothing: packs are deleted only after the index has ceased to name them."""
    for name in condemned:
        try:
            read_condemned(objects, name)
        except Corrupt:
            objects.delete([name])
        except NotFound:
            pass


@dataclass(frozen=True)
class Other:
    """Somebody else's lease, as a collector sees it."""

    id: str
    role: str
    seen: frozenset[str]
    lapsed: bool


def others(mine: Lease) -> list[Other]:
    """Ages are differences of the backend's own times, one of them that of the lease this collector keeps fresh."""
    listed = list(mine.objects.list("writers/"))
    clock = max((at for name, _, at in listed if name == mine.name), default=0.0)
    found = []
    for name, _, at in listed:
        if name == mine.name:
            continue
        try:
            value = read_sealed(mine.objects, name)
            role, seen = str(value["role"]), frozenset(value["seen"])
            most = mine.duration * _patience(value.get("holder"))
        except NotFound:
            continue
        except Corrupt:
            role, seen, most = "writer", frozenset(), mine.duration
        found.append(Other(name.removeprefix("writers/"), role, seen, clock - at > most))
    return found


def _patience(whose: Any) -> float:
    """The part of a lease's time after which it has lapsed. What a dead process asked of a server may still be under way there: until
    the next renewal is overdue by a while. A folder knows nothing of that kind."""
    if not holder.has_died(whose):
        return 1.0
    return -math.inf if whose.get("direct") is True else 1 / 3


def _lost() -> StateConflict:
    return StateConflict(
        "the store was out of reach, or this machine asleep, for so long that what was written may have been collected; nothing was published",
        "do it again",
    )
