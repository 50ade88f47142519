"""An object store that fails as told: errors, hangs, short answers, lost connections, and a process that dies mid-way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from sandkeep.errors import Corrupt, StoreUnreachable
from sandkeep.store.objects import Objects


class Crash(SystemExit):
    """The process is dead: nothing after this reaches the store. A thread that is told so ends without a word."""


class Faulty:
    """`fault(n, verb, name)` is asked before operation n and answers None or what goes wrong: "fail" (nothing happened), "lost"
    (it happened, the answer got lost), "crash", "crash after", "short" (a get that ends early), "flip" (one whose bytes change on the wire), or seconds to hang."""

    def __init__(
        self, inner: Objects, fault: Callable[[int, str, str], str | float | None] = lambda n, verb, name: None
    ) -> None:
        self.inner, self.fault = inner, fault
        self.url, self.place, self.parallel, self.direct = inner.url, inner.place, inner.parallel, inner.direct
        self.log: list[tuple[str, str]] = []
        self.dead = False

    def _before(self, verb: str, name: str) -> str | None:
        if self.dead:
            raise Crash
        found = self.fault(len(self.log), verb, name)
        self.log.append((verb, name))
        if isinstance(found, float):
            time.sleep(found)
            return None
        if found == "fail":
            raise StoreUnreachable(f"could not {verb} {name}", "this is a test")
        if found == "crash":
            self.dead = True
            raise Crash
        return found

    def _after(self, found: str | None, verb: str, name: str) -> None:
        if found == "lost":
            raise StoreUnreachable(f"no answer to {verb} {name}", "this is a test")
        if found == "crash after":
            self.dead = True
            raise Crash

    def put(self, name: str, *data: bytes | bytearray | memoryview, soon: bool = True) -> None:
        found = self._before("put", name)
        self.inner.put(name, *data, soon=soon)
        self._after(found, "put", name)

    def get(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        found = self._before("get", name)
        data = self.inner.get(name, offset, length)
        self._after(found, "get", name)
        if found == "short":
            raise Corrupt(f"{name} gave {len(data) // 2} bytes, {len(data)} were expected")
        if found == "flip" and data:
            at = len(data) // 2
            return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        return data

    def list(self, prefix: str, after: str = "") -> Iterator[tuple[str, int, float]]:
        found = self._before("list", prefix)
        yield from self.inner.list(prefix, after)
        self._after(found, "list", prefix)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            found = self._before("delete", name)
            self.inner.delete([name])
            self._after(found, "delete", name)

    def newest(self, prefix: str) -> Iterator[str] | None:
        self._before("newest", prefix)
        return self.inner.newest(prefix)

    def size(self, name: str) -> int | None:
        found = self._before("size", name)
        answer = self.inner.size(name)
        self._after(found, "size", name)
        return answer
