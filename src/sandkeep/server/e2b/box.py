"""A running sandbox as one request to it sees it: the way to its guest, who asks, and what paths and names mean inside."""

from __future__ import annotations

import base64
import binascii
import posixpath
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from sandkeep.errors import FileMissing, SandboxDead
from sandkeep.runtime.link import AsyncLink
from sandkeep.sandbox import AsyncSandbox
from sandkeep.server.e2b.errors import RpcError
from sandkeep.server.e2b.forms import entry_info
from sandkeep.server.e2b.life import Life


@dataclass
class People:
    """Who is who inside, as its files say; read again when somebody is not known."""

    default: str = ""
    homes: dict[str, str] = field(default_factory=dict)
    users: dict[int, str] = field(default_factory=dict)
    groups: dict[int, str] = field(default_factory=dict)

    async def read(self, sandbox: AsyncSandbox) -> None:
        self.default = (await sandbox._link.call("user_default"))["user"]
        for row in await _rows(sandbox, "/etc/passwd", 7):
            self.homes[row[0]] = row[5] or "/"
            self.users.setdefault(int(row[2]), row[0])
        for row in await _rows(sandbox, "/etc/group", 4):
            self.groups.setdefault(int(row[2]), row[0])


async def _rows(sandbox: AsyncSandbox, path: str, width: int) -> list[list[str]]:
    try:
        text = (await sandbox.files.read(path, length=1 << 20)).decode(errors="replace")
    except FileMissing:
        return []
    rows = [line.split(":") for line in text.splitlines()]
    return [row for row in rows if len(row) >= width and row[2].isdigit()]


class Houses:
    """The people of each sandbox, as last read."""

    def __init__(self) -> None:
        self._known: dict[str, People] = {}

    async def people(self, sandbox: AsyncSandbox, *, again: bool = False) -> People:
        found = self._known.get(sandbox.id)
        if found is None or again:
            found = People()
            await found.read(sandbox)
            self._known[sandbox.id] = found
        return found

    def forget(self, id: str) -> None:
        self._known.pop(id, None)


class Box:
    def __init__(self, life: Life, houses: Houses, sandbox: AsyncSandbox, people: People, user: str) -> None:
        self.life = life
        self._houses = houses
        self.sandbox = sandbox
        self._people = people
        self.user = user
        self.home = people.homes.get(user, "/")

    @property
    def id(self) -> str:
        return self.sandbox.id

    @property
    def link(self) -> AsyncLink:
        return self.sandbox._link

    @property
    def acting(self) -> dict[str, str]:
        """Files are touched with root's rights and given to the user, as E2B does; the guest's own user needs no word."""
        return {} if self.user == self._people.default else {"user": self.user}

    def path(self, given: str) -> str:
        """Relative to the user's home; `~` is that home."""
        if given == "~" or given.startswith("~/"):
            given = self.home + given[1:]
        return posixpath.normpath(posixpath.join(self.home, given or "."))

    async def again(self) -> None:
        """Take hold of it anew after its guest hung up; `Gone` if it no longer runs."""
        self.sandbox = await self.life.still(self.id)

    async def entries(self, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if any(one["uid"] not in self._people.users or one["gid"] not in self._people.groups for one in found):
            self._people = await self._houses.people(self.sandbox, again=True)
        return [await self._entry(one) for one in found]

    async def _entry(self, entry: dict[str, Any]) -> dict[str, Any]:
        kind = entry["kind"]
        if kind == "symlink":
            try:
                kind = (await self.link.call("file_stat", path=entry["path"], follow=True))["entry"]["kind"]
            except FileMissing:
                kind = "file"
        users, groups = self._people.users, self._people.groups
        owner, group = users.get(entry["uid"], str(entry["uid"])), groups.get(entry["gid"], str(entry["gid"]))
        return entry_info(entry, kind, owner, group)

    async def stat(self, path: str) -> dict[str, Any]:
        answer = await self.link.call("file_stat", path=path, xattrs=True)
        return (await self.entries([answer["entry"]]))[0]


def asked_user(request: Request) -> str | None:
    """The user in `Authorization: Basic`, or in the query of a file's address."""
    if given := request.query_params.get("username"):
        return given
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        return base64.b64decode(value).decode().partition(":")[0] or None
    except (binascii.Error, ValueError):
        raise RpcError("unauthenticated", "the user can't be read") from None


async def open_box(life: Life, houses: Houses, id: str, user: str | None) -> Box:
    sandbox = await life.running(id)
    try:
        people = await houses.people(sandbox)
    except SandboxDead:
        sandbox = await life.still(id)
        people = await houses.people(sandbox)
    if user is not None and user not in people.homes:
        people = await houses.people(sandbox, again=True)
        if user not in people.homes:
            raise RpcError("unauthenticated", f"invalid username: '{user}'")
    return Box(life, houses, sandbox, people, user or people.default)
