"""Bases: the lowest, read-only folder of a sandbox's root.

"host" is a made skeleton (a small /etc, empty folders) under which the host's /usr shows; a folder is used as it is; a
tar is unpacked once. What is made lives in home/bases/<name>, complete or not there at all: it is built in a temporary
folder beside it and renamed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import zstandard

from sandkeep.errors import BadArgument
from sandkeep.runtime import kernel, skeleton
from sandkeep.runtime.elevate import elevated, id_map

_NEITHER = "neither /usr nor /bin is in it"
_PROGRAMS = ("usr/local/bin", "usr/bin", "bin")  # where process 1 looks for its interpreter


@dataclass(frozen=True)
class Base:
    kind: Literal["host", "dir", "tar"]
    spec: str
    root: Path
    usr: bool
    fingerprint: str

    def roots(self) -> dict[str, str]:
        """The folders of this host that it consists of, by where each shows inside."""
        return {"/": str(self.root), **({"/usr": "/usr"} if self.usr else {})}


def resolve(spec: str, home: Path) -> Base:
    """The base that `spec` names: "host", a folder with a root filesystem, or a tar of one."""
    if not isinstance(spec, str) or not spec or "\0" in spec:
        raise BadArgument(f"base {spec!r} is not a name", "use 'host', a folder or a tar file")
    if spec == "host":
        version = skeleton.version(id_map())
        root = _once(home, f"host-{version}", skeleton.build, id_map())
        return Base("host", spec, root, True, f"host-{version}")
    path = Path(spec).expanduser().absolute()
    if path.is_dir():
        if not _is_root(path):
            raise BadArgument(f"base {spec!r} holds no root filesystem: {_NEITHER}", "name the folder that is to be /")
        return Base("dir", spec, path, False, f"dir-{_folder_print(path)}")
    if path.is_file():
        digest = _digest(path)
        return Base("tar", spec, _once(home, digest, _unpack, str(path)), False, f"tar-{digest}")
    raise BadArgument(f"base {spec!r} does not exist", "use 'host', a folder or a tar file")


def lacks(base: Base) -> str:
    """What process 1 needs and this base has not; nothing where it has all, or can't be looked into."""
    if base.kind == "host":
        return ""
    needed = {"/usr/bin/env": ["usr/bin/env"], "python3": [f"{place}/python3" for place in _PROGRAMS]}
    return " and ".join(name for name, paths in needed.items() if not any(_found(base.root, path) for path in paths))


def _found(root: Path, path: str) -> bool:
    folder = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.close(kernel.open_in_root(folder, path, os.O_PATH))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    finally:
        os.close(folder)
    return True


def _is_root(folder: Path) -> bool:
    return any((folder / name).is_dir() for name in ("usr", "bin"))


def _once(home: Path, name: str, build: Callable[..., None], *arguments: str) -> Path:
    done = home / "bases" / name
    if _is_root(done):
        return done
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    done.parent.mkdir(exist_ok=True)
    with _locked(done.parent):
        if not _is_root(done):
            making = tempfile.mkdtemp(prefix=".making-", dir=done.parent)
            try:
                if done.exists():  # what a removal of the home left that was not allowed everything
                    elevated(remove, str(done))
                elevated(build, making, *arguments)
                os.rename(making, done)
            except BaseException:
                elevated(remove, making)
                raise
    return done


def unfinished(home: Path, away: Callable[[Path], object]) -> list[Path]:
    """What was being made when its maker died is removed."""
    folder = home / "bases"
    if not folder.is_dir():
        return []
    with open(folder / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return []
        found = sorted(folder.glob(".making-*"))
        for path in found:
            away(path)
        return found


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def remove(folder: str) -> None:
    shutil.rmtree(folder)


def _folder_print(path: Path) -> str:
    """A folder's identity: where it is and which. Its contents are the owner's promise to leave alone."""
    found = path.stat()
    return hashlib.sha256(f"{path}\0{found.st_dev}\0{found.st_ino}".encode(errors="surrogateescape")).hexdigest()[:32]


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unpack(into: str, archive: str) -> None:
    try:
        with open(archive, "rb") as file, _tar(file) as tar:
            tar.extractall(into, filter=_safe)
    except (tarfile.TarError, EOFError, zstandard.ZstdError, KeyError, OSError) as error:
        raise BadArgument(f"base {archive!r} can't be unpacked: {error}", "give a whole tar of a root filesystem")
    if not _is_root(Path(into)):
        raise BadArgument(f"base {archive!r} holds no root filesystem: {_NEITHER}")
    os.chmod(into, 0o755)


@contextmanager
def _tar(file: IO[bytes]) -> Iterator[tarfile.TarFile]:
    magic = file.read(4)
    file.seek(0)
    if magic == zstandard.FRAME_HEADER:
        with zstandard.ZstdDecompressor().stream_reader(file) as plain:
            with tarfile.open(fileobj=plain, mode="r|") as tar:
                yield tar
    else:
        with tarfile.open(fileobj=file, mode="r:*") as tar:
            yield tar


def _safe(member: tarfile.TarInfo, into: str) -> tarfile.TarInfo | None:
    """Inside the folder only, no device nodes; modes (setuid too) and numeric owners as they were."""
    if member.ischr() or member.isblk():
        return None
    checked = tarfile.tar_filter(member, into)
    if member.islnk():
        # link(2) does not follow a last symlink; where the others lead is what counts.
        link = os.path.join(into, member.linkname.lstrip("/"))
        place = os.path.realpath(os.path.dirname(link))
        if os.path.commonpath([os.path.realpath(into), place]) != os.path.realpath(into) or link.endswith("/.."):
            raise tarfile.LinkOutsideDestinationError(member, link)
        checked = checked.replace(linkname=member.linkname.lstrip("/"), deep=False)
    return checked.replace(mode=member.mode, uname="", gname="", deep=False)
