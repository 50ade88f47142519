"""Objects in a local folder: one file each, written beside the others in `tmp/`, synced, renamed, synced again."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path

from sandkeep.errors import Corrupt, NotFound, StoreDenied, StoreError, StoreFull, StoreMissing
from sandkeep.store.objects import check_name, check_prefix

TEMP = "tmp"  # what a crash leaves here is listed like any object, and gc removes it


@contextmanager
def _typed(what: str, place: Path) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull(f"no space left to {what}", "free some disk space, or forget checkpoints and run gc").at(
                place
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise StoreDenied(
                f"not allowed to {what}: {os.strerror(error.errno)}", "check the folder's owner and mode"
            ).at(place) from error
        raise StoreError(f"could not {what}: {error.strerror}", "check the disk under the store's folder").at(
            place
        ) from error


class Folder:
    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.abspath(os.path.expanduser(root)))
        self.url = self.place = str(self.root)
        self.parallel = 2
        self.direct = True

    def put(self, name: str, *data: bytes | bytearray | memoryview, soon: bool = True) -> None:
        target = self.root / check_name(name)
        temp = self.root / TEMP / secrets.token_hex(12)
        with _typed("write an object", target):
            try:
                self._write(temp, data, soon)
            except FileNotFoundError:
                self._begin(temp, data, soon)
            except NotADirectoryError as error:
                raise self._no_folder(error) from error
            try:
                self._place(temp, target)
            except OSError:
                temp.unlink(missing_ok=True)
                raise
            try:
                _sync(target.parent)
            except FileNotFoundError:
                pass  # somebody has already deleted the object, and its folder

    def _begin(self, temp: Path, data: tuple[bytes | bytearray | memoryview, ...], soon: bool) -> None:
        try:
            _make(temp.parent)
            self._write(temp, data, soon)
        except (FileNotFoundError, FileExistsError, NotADirectoryError) as error:
            raise self._no_folder(error) from error

    def _no_folder(self, error: OSError) -> StoreMissing:
        return StoreMissing(
            f"the store's folder is none, and can't be made one: {error.strerror}", "choose another folder"
        ).at(self.url)

    @staticmethod
    def _place(temp: Path, target: Path) -> None:
        for _ in range(100):
            try:
                os.rename(temp, target)
                return
            except FileNotFoundError:
                _make(target.parent)  # a `delete` may take it away again, as long as it is empty
        os.rename(temp, target)

    @staticmethod
    def _write(temp: Path, data: tuple[bytes | bytearray | memoryview, ...], soon: bool) -> None:
        handle = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            for part in data:
                rest = memoryview(part).cast("B")
                while rest:
                    rest = rest[os.write(handle, rest) :]
            os.fsync(handle)
            if not soon:
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        except BaseException:
            os.unlink(temp)
            raise
        finally:
            os.close(handle)

    def get(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        path = self.root / check_name(name)
        with _typed("read an object", path):
            try:
                handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    size = os.fstat(handle).st_size
                    want = size - offset if length is None else length
                    data = _read(handle, offset, want) if want > 0 else b""
                finally:
                    os.close(handle)
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
                raise NotFound(f"{name} is not in the store {self.url}") from None
        if want < 0 or len(data) != want:
            raise Corrupt(
                f"{name} ends at {size} bytes, {offset + max(want, 0)} were expected", "run verify", object=name
            )
        return data

    def list(self, prefix: str, after: str = "") -> Iterator[tuple[str, int, float]]:
        with _typed("list objects", self.root / check_prefix(prefix)):
            yield from self._list(prefix, after)

    def _list(self, prefix: str, after: str) -> Iterator[tuple[str, int, float]]:
        found: list[tuple[str, os.DirEntry[str] | None]] = []
        try:
            with os.scandir(self.root / prefix) as scan:
                for entry in scan:
                    name = prefix + entry.name
                    if entry.is_dir(follow_symlinks=False):
                        if (name := f"{name}/") > after or after.startswith(name):
                            found.append((name, None))
                    elif name > after:
                        found.append((name, entry))
        except (FileNotFoundError, NotADirectoryError):
            return
        for name, file in sorted(found, key=itemgetter(0)):
            if file is None:
                yield from self._list(name, after)
                continue
            try:
                status = file.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            yield name, status.st_size, status.st_mtime

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            with _typed("delete an object", self.root / check_name(name)):
                try:
                    os.unlink(self.root / name)
                except (FileNotFoundError, NotADirectoryError):
                    continue
                self._tidy(os.path.dirname(name))

    def _tidy(self, folder: str) -> None:
        """Remove folders that have become empty, but not those at the top."""
        while "/" in folder:
            try:
                os.rmdir(self.root / folder)
            except OSError:
                return
            folder = os.path.dirname(folder)

    def newest(self, prefix: str) -> Iterator[str]:
        with _typed("list objects", self.root / check_prefix(prefix)):
            yield from self._newest(prefix)

    def _newest(self, prefix: str) -> Iterator[str]:
        try:
            names = os.listdir(f"{self.url}/{prefix}")
        except (FileNotFoundError, NotADirectoryError):
            return
        for name in sorted(names, reverse=True):
            if os.path.isdir(f"{self.url}/{prefix}{name}"):
                yield from self._newest(f"{prefix}{name}/")
            else:
                yield prefix + name

    def size(self, name: str) -> int | None:
        with _typed("look at an object", self.root / check_name(name)):
            try:
                return os.stat(self.root / name).st_size
            except (FileNotFoundError, NotADirectoryError):
                return None


def _read(handle: int, offset: int, length: int) -> bytes:
    data = os.pread(handle, length, offset)
    if len(data) in (0, length):
        return data
    parts = [data]
    got = len(data)
    while got < length and (data := os.pread(handle, length - got, offset + got)):
        parts.append(data)
        got += len(data)
    return b"".join(parts)


def _make(folder: Path) -> None:
    """mkdir -p, each new entry synced into its parent."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        try:
            path.mkdir(exist_ok=True)
            _sync(path.parent)
        except (FileNotFoundError, FileExistsError):
            return  # its parent, or itself, was removed meanwhile: the caller tries again


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
