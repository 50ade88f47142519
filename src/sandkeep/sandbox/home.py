"""Where things are on disk, and the two primitives that keep them right: whole-file writes and locks.

<home>/sandboxes/<id>/   record.json journal.json lock run/ tops/<n>/{tree,work} snapshots/<id>.json cursor workflow.json …
<home>/layers/<id>/tree  <home>/trash/  <home>/bases/  <home>/store/  <home>/cache/  <home>/known/<store>/<checkpoint>.json
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sandkeep import owned
from sandkeep.errors import BadArgument, Busy, HostRefused, SandboxNotFound
from sandkeep.layers import filesystem
from sandkeep.layers.pool import Layers

_ID = re.compile(r"sb-[0-9a-f]{12}")


def default_home() -> Path:
    return Path(os.environ.get("SANDKEEP_HOME") or Path.home() / ".sandkeep").absolute()


class Home:
    def __init__(self, path: str | Path | None = None) -> None:
        if path is not None and not isinstance(path, (str, os.PathLike)):
            raise BadArgument(f"a home is a folder, not {path!r}")
        if path is not None and (not os.fspath(path) or "\0" in os.fspath(path)):
            raise BadArgument(f"{path!r} names no folder", "leave it out for ~/.sandkeep")
        self.path = Path(path).absolute() if path is not None else default_home()
        self.layers = Layers(self.path)
        self.trash = self.path / "trash"
        self.sandboxes = self.path / "sandboxes"

    def ensure(self) -> None:
        """Nobody else may look in: layers hold setuid files of the sandboxes' own making."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        for folder in (self.sandboxes, self.layers.folder, self.trash):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if filesystem.kind(self.path) == "overlay":
            raise HostRefused(
                "a home can't lie on an overlay: the kernel stacks no writable overlay on another",
                "put it on ext4, xfs, btrfs or tmpfs; in a container that is a volume",
            ).at(self.path)

    def new_id(self) -> str:
        return f"sb-{secrets.token_hex(6)}"

    def sandbox(self, id: str) -> Path:
        if not isinstance(id, str) or not _ID.fullmatch(id):
            raise BadArgument(
                f"{id!r} is not a sandbox id", "ids look like sb-0123456789ab; `sandkeep sandbox list` shows yours"
            )
        return self.sandboxes / id

    def existing(self, id: str) -> Path:
        folder = self.sandbox(id)
        if not (folder / "record.json").exists() and not (folder / "journal.json").exists():
            raise SandboxNotFound(
                f"there is no sandbox {id} in {self.path}", "`sandkeep sandbox list` shows what is there", id=id
            )
        return folder

    def ids(self) -> list[str]:
        try:
            return sorted(filter(_ID.fullmatch, os.listdir(self.sandboxes)))
        except FileNotFoundError:
            return []

    @contextlib.contextmanager
    def layers_lock(self) -> Iterator[None]:
        """Held while layers gain or lose users, so that nobody discards what somebody just began to use."""
        self.ensure()
        with lock(self.path / "layers.lock"):
            yield


@contextlib.contextmanager
def lock(path: Path, *, wait: bool = True, what: str = "") -> Iterator[None]:
    """An exclusive lock that dies with its holder."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise Busy(f"{what or path} is held by another operation", "wait for it, or try again") from None
        yield
    finally:
        os.close(handle)


def write_whole(path: Path, data: bytes, mode: int = 0o600, *, durable: bool = True) -> None:
    """The file has its old content or the new one; unless told otherwise the new one is on disk on return."""
    temporary, handle = _temporary(path, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
            os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    if durable:
        sync_folder(path.parent)


def _temporary(path: Path, mode: int) -> tuple[Path, int]:
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        if owned.take(handle, temporary):
            return temporary, handle
        os.close(handle)


def sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, data: Any, *, durable: bool = True) -> None:
    write_whole(path, json.dumps(data, separators=(",", ":")).encode(), durable=durable)


def read_json(path: Path) -> Any:
    return json.loads(path.read_bytes())


def read_known(path: Path) -> dict[str, Any] | None:
    """What is known of a checkpoint's layers; None if that is nothing, or makes no sense."""
    try:
        known = read_json(path)
    except (FileNotFoundError, ValueError):
        return None
    if not isinstance(known, dict) or not isinstance(stack := known.get("stack"), list):
        return None
    return known if all(isinstance(layer, str) and layer.startswith("ly_") for layer in stack) else None


def boot() -> str:
    """Which life of the host this is: a file that was not synced is worth nothing in another."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
