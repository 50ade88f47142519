"""Users of the sandbox: who they are, which can be used here, and acting with their rights."""

from __future__ import annotations

import os

from .problems import BAD_ARGUMENT, UNSUPPORTED, Problem

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional, Tuple, Union

SESSION_USER = "user"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Person:
    def __init__(self, name: str, uid: int, gid: int, home: str, shell: str, groups: List[int]) -> None:
        self.name = name
        self.uid = uid
        self.gid = gid
        self.home = home
        self.shell = shell
        self.groups = groups

    def environment(self) -> Dict[str, str]:
        return {"HOME": self.home, "USER": self.name, "LOGNAME": self.name, "SHELL": self.shell}


class Acting:
    """With this, calls and new processes have the person's ids (None: our own); process 1 keeps its saved ids to come back."""

    def __init__(self, person: Optional[Person]) -> None:
        self._person = person
        self._same = person is None or person.uid == os.geteuid()
        self._groups: List[int] = []

    def __enter__(self) -> None:
        if self._same or self._person is None:
            return
        if os.geteuid() != 0:
            raise Problem(UNSUPPORTED, "uid {} can't be used: the guest is not root".format(self._person.uid))
        self._groups = os.getgroups()
        try:
            os.setgroups(self._person.groups)
            os.setresgid(self._person.gid, self._person.gid, 0)
            os.setresuid(self._person.uid, self._person.uid, 0)
        except OSError as error:
            self.__exit__()
            raise Problem(UNSUPPORTED, "uid {} can't be used in this sandbox".format(self._person.uid), error.errno)

    def __exit__(self, *_: Any) -> None:
        if not self._same:
            os.setresuid(0, 0, 0)
            os.setresgid(0, 0, 0)
            os.setgroups(self._groups)


def _rows(path: str) -> List[List[str]]:
    try:
        with open(path, errors="surrogateescape") as source:
            return [line.rstrip("\n").split(":") for line in source if not line.startswith("#")]
    except OSError:
        return []


def _person(row: List[str]) -> Person:
    name, uid, gid = row[0], int(row[2]), int(row[3])
    groups = {gid}
    groups.update(int(g[2]) for g in _rows("/etc/group") if len(g) > 3 and g[2].isdigit() and name in g[3].split(","))
    return Person(name, uid, gid, row[5] or "/", row[6] or "/bin/sh", sorted(groups))


def lookup(who: Union[str, int]) -> Person:
    """A person by name or uid; a uid without a name is a person as well."""
    for row in _rows("/etc/passwd"):
        if len(row) >= 7 and row[2].isdigit() and row[3].isdigit() and who in (row[0], int(row[2])):
            return _person(row)
    if isinstance(who, int):
        return Person(str(who), who, who, "/", "/bin/sh", [who])
    raise Problem(BAD_ARGUMENT, "there is no user {!r} in this sandbox".format(who))


def usable(person: Person) -> bool:
    try:
        with Acting(person):
            return True
    except Problem:
        return False


def default() -> Person:
    """The session's user: "user" where there is one and its ids can be used, else whoever we are."""
    try:
        person: Optional[Person] = lookup(SESSION_USER)
    except Problem:
        person = None
    if person is not None and usable(person):
        return person
    return lookup(os.geteuid())


def mapped() -> List[Tuple[int, int]]:
    """Ranges of uids that exist in this sandbox, as (first, count)."""
    try:
        with open("/proc/self/uid_map") as source:
            rows = [line.split() for line in source]
    except OSError:
        return []
    return [(int(row[0]), int(row[2])) for row in rows if len(row) == 3]
