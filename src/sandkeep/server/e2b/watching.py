"""Watches of folders: as a stream, or kept here for clients that ask from time to time.

E2B counts a write through its API as CREATE, CHMOD, WRITE. Ours is a file written aside and renamed, so a rename from such a file
is told in those words.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import posixpath
import secrets
from collections.abc import AsyncGenerator
from typing import Any

from sandkeep.errors import SandboxDead, SandkeepError
from sandkeep.server.e2b.box import Box
from sandkeep.server.e2b.errors import RpcError
from sandkeep.server.e2b.filesystem import where
from sandkeep.server.e2b.life import Gone
from sandkeep.server.e2b.rpc import Message

KEEP_ALIVE: Message = {"keepalive": {}}
_ASIDE = ".sandkeep-"
_MOST = 100_000
_PATIENCE = 30.0
_CREATE, _WRITE, _REMOVE, _RENAME, _CHMOD = (
    f"EVENT_TYPE_{word}" for word in ("CREATE", "WRITE", "REMOVE", "RENAME", "CHMOD")
)


class Watch:
    """The changes below one folder, as long as somebody iterates."""

    def __init__(self, box: Box, asked: Message) -> None:
        self._box = box
        self._path = where(box, asked)
        self._recursive = bool(asked.get("recursive"))
        self._entry = bool(asked.get("includeEntry"))
        self._names: set[str] = set()
        self._name = ""
        self._marks: dict[int, asyncio.Event] = {}
        self._count = itertools.count(1)
        self.begun = asyncio.Event()

    async def check(self) -> None:
        entry = (await self._box.link.call("file_stat", path=self._path, follow=True))["entry"]
        if entry["kind"] != "dir":
            raise RpcError("invalid_argument", f"path is not a directory: {self._path}")

    async def events(self) -> AsyncGenerator[list[Message], None]:
        """What belongs together is told together: a write's three words, say."""
        while True:
            try:
                async with contextlib.aclosing(self._changes()) as changes:
                    async for one in changes:
                        yield one
            except SandboxDead:
                await self._box.again()

    async def come_through(self) -> None:
        """Until all that had happened in the sandbox has been told by `events`, which somebody else iterates."""
        number, passed = next(self._count), asyncio.Event()
        self._marks[number] = passed
        try:
            if (await self._box.link.call("watch_mark", name=self._name, mark=number))["watched"]:
                await asyncio.wait_for(passed.wait(), _PATIENCE)
        except (SandboxDead, TimeoutError):
            return  # it is being saved or has gone; whoever iterates will hear of it
        finally:
            del self._marks[number]

    async def _changes(self) -> AsyncGenerator[list[Message], None]:
        self._name = secrets.token_hex(8)
        fields = {"path": self._path, "recursive": self._recursive, "name": self._name}
        async with self._box.link.stream("file_watch", fields, timeout=None) as found:
            await found.first_json()
            listed = await self._box.link.call("file_list", path=self._path, depth=1000 if self._recursive else 1)
            self._names = {one["path"] for one in listed["entries"] if not _aside(one["path"])}
            self.begun.set()
            async for _, told in found:
                if (number := told.get("mark")) is not None:
                    if number in self._marks:
                        self._marks[number].set()
                    continue
                if told.get("event") == "overflow":
                    raise RpcError("resource_exhausted", "more changed than could be told; list the folder")
                if seen := self._told(told):
                    yield await self._shown(seen)

    def _told(self, event: Message) -> list[tuple[str, str]]:
        path, before = event["path"], event.get("from")
        if _aside(path):
            return [(_RENAME, before)] if before is not None and not _aside(before) else []
        new = path not in self._names
        match event["event"]:
            case "moved" if _aside(before):
                told = [(_CREATE, path), (_CHMOD, path), (_WRITE, path)] if new else [(_CHMOD, path), (_WRITE, path)]
            case "moved":
                self._names.discard(before)
                told = [(_RENAME, before), (_CREATE, path)]
            case "removed":
                self._names.discard(path)
                return [(_REMOVE, path)]
            case "created":
                told = [(_CREATE, path)]
            case _:
                return [(_CHMOD if event.get("attributes") else _WRITE, path)]
        self._names.add(path)
        return told

    async def _shown(self, seen: list[tuple[str, str]]) -> list[Message]:
        entries: dict[str, dict[str, Any]] = {}
        for path in {path for kind, path in seen if self._entry and kind not in (_REMOVE, _RENAME)}:
            try:
                entries[path] = {"entry": await self._box.stat(path)}
            except SandkeepError:  # gone again: the event is true all the same
                entries[path] = {}
        return [
            {"name": posixpath.relpath(path, self._path), "type": kind, **entries.get(path, {})} for kind, path in seen
        ]


def _aside(path: str | None) -> bool:
    return path is not None and posixpath.basename(path).startswith(_ASIDE)


async def watch_dir(box: Box, asked: Message, _: float | None) -> AsyncGenerator[Message, None]:
    watch = Watch(box, asked)
    await watch.check()
    events = watch.events()
    pending = asyncio.ensure_future(anext(events))
    begun = asyncio.ensure_future(watch.begun.wait())
    try:
        await asyncio.wait({pending, begun}, return_when=asyncio.FIRST_COMPLETED)
        if begun.done():
            yield {"start": {}}
        for event in await pending:
            yield {"filesystem": event}
        async for together in events:
            for event in together:
                yield {"filesystem": event}
    finally:
        for task in (pending, begun):
            task.cancel()
        await asyncio.gather(pending, begun, return_exceptions=True)
        await events.aclose()


class Watchers:
    """Watches that are asked about: their events wait here."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], _Kept] = {}

    async def create(self, box: Box, asked: Message) -> Message:
        watch = Watch(box, asked)
        await watch.check()
        kept, id = _Kept(watch), secrets.token_hex(8)
        await kept.begin()
        self._kept[box.id, id] = kept
        return {"watcherId": id}

    def _find(self, box: Box, asked: Message) -> _Kept:
        found = self._kept.get((box.id, str(asked.get("watcherId"))))
        if found is None:
            raise RpcError("not_found", f"watcher {asked.get('watcherId')!r} not found")
        return found

    async def events(self, box: Box, asked: Message) -> Message:
        return {"events": await self._find(box, asked).take()}

    async def remove(self, box: Box, asked: Message) -> Message:
        await self._find(box, asked).stop()
        del self._kept[box.id, str(asked.get("watcherId"))]
        return {}

    def forget(self, id: str) -> None:
        for key in [key for key in self._kept if key[0] == id]:
            self._kept.pop(key).cancel()

    async def stop(self) -> None:
        await asyncio.gather(*(one.stop() for one in self._kept.values()))
        self._kept.clear()


class _Kept:
    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._events: list[Message] = []
        self._task = asyncio.create_task(self._collect())

    async def begin(self) -> None:
        begun = asyncio.ensure_future(self._watch.begun.wait())
        await asyncio.wait({self._task, begun}, return_when=asyncio.FIRST_COMPLETED)
        begun.cancel()
        if self._task.done():
            self._task.result()

    async def _collect(self) -> None:
        async with contextlib.aclosing(self._watch.events()) as events:
            async for together in events:
                if len(self._events) >= _MOST:
                    raise RpcError("resource_exhausted", f"nobody has asked for {_MOST} events")
                self._events += together

    async def take(self) -> list[Message]:
        """All that has happened since the last time, up to now; a watch that ended says why."""
        if not self._task.done():
            passing = asyncio.ensure_future(self._watch.come_through())
            await asyncio.wait({passing, self._task}, return_when=asyncio.FIRST_COMPLETED)
            passing.cancel()
            await asyncio.gather(passing, return_exceptions=True)
        if self._task.done() and not self._task.cancelled() and (error := self._task.exception()) is not None:
            if not isinstance(error, Gone):
                raise error
            self._task = asyncio.create_task(self._collect())
        taken, self._events = self._events, []
        return taken

    def cancel(self) -> None:
        self._task.cancel()

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
