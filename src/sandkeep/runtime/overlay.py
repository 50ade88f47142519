"""Overlay mounts of a sandbox's root: which folders are stacked, and how the kernel is told.

A tree covers the whole "/". Where the base is the host, /usr has an overlay of its own (a lower folder's own
sub-mounts would not show), whose upper is the subfolder `usr` of the root's upper. Layer folders are handed to the
kernel as /proc/self/fd/N: any length of path and of stack fits, and no path of the host is seen from inside.
"""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from sandkeep.errors import RuntimeFailed
from sandkeep.layers.overlay import attributes
from sandkeep.runtime import kernel
from sandkeep.runtime.elevate import mapped
from sandkeep.runtime.plan import Plan

# The same format with and without root: `user.overlay.*` attributes, no redirects, no index, stable inode numbers.
_OPTIONS: list[tuple[str, str | None]] = [("userxattr", None), ("xino", "off"), ("index", "off")]
# Kernels that know `lowerdir+` would otherwise write an identity of the mount into the upper folder.
_MODERN: list[tuple[str, str | None]] = [("uuid", "null")]


@dataclass(frozen=True)
class Stack:
    """One overlay: lower folders from the top down, and the writable pair."""

    lowers: list[Path]
    upper: Path
    work: Path
    volatile: bool


@dataclass
class Root:
    """Detached mounts, ready to be attached anywhere; close() drops what was not attached."""

    root: int
    usr: int | None

    def close(self) -> None:
        for tree in (self.root, self.usr):
            if tree is not None:
                os.close(tree)


def stacks(plan: Plan) -> tuple[Stack, Stack | None]:
    """The root's stack, and that of /usr where it has one."""
    root = Stack([*plan.layers, plan.base.root], plan.upper, plan.work / "root", plan.volatile)
    if not plan.base.usr:
        return root, None
    lowers = [layer / "usr" for layer in plan.layers if (layer / "usr").is_dir()]
    if os.listdir(plan.base.root / "usr"):
        lowers.append(plan.base.root / "usr")
    return root, Stack([*lowers, Path("/usr")], plan.upper / "usr", plan.work / "usr", plan.volatile)


def prepare(plan: Plan) -> None:
    """Make the writable folders that are missing, like those that they cover; what is there stays as it is."""
    root, usr = stacks(plan)
    for stack in (root, usr):
        if stack is not None:
            stack.work.mkdir(parents=True, exist_ok=True)
    if not root.upper.exists():
        making = root.upper.with_name(f"{root.upper.name}.making")
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True)
        if usr is not None:
            (making / "usr").mkdir()
            _like(usr.lowers[0], making / "usr")
        _like(root.lowers[0], making)
        making.rename(root.upper)
    elif usr is not None and not usr.upper.exists():
        usr.upper.mkdir()
        _like(usr.lowers[0], usr.upper)


def begun(plan: Plan) -> dict[bytes, bool]:
    """Of the folders that `prepare` makes: whether each is still as it was made."""
    root, usr = stacks(plan)
    found = {b"": _is_like(root.lowers[0], root.upper)}
    if usr is not None and usr.upper.is_dir():
        found[b"usr"] = _is_like(usr.lowers[0], usr.upper)
    return found


def untouched(plan: Plan) -> bool:
    """Whether a top holds nothing but what mounting it made."""
    made = begun(plan)
    below = [name for path in made for name in os.listdir(os.path.join(os.fsencode(plan.upper), path))]
    return all(made.values()) and below == ([b"usr"] if b"usr" in made else [])


def _like(model: Path, folder: Path) -> None:
    found = model.stat()
    if mapped(found.st_uid, found.st_gid):
        os.chown(folder, found.st_uid, found.st_gid)
    os.chmod(folder, found.st_mode & 0o7777)
    for name, value in attributes(os.fsencode(model))[0]:
        with suppress(OSError):
            os.setxattr(folder, name, value)
    os.utime(folder, ns=(found.st_atime_ns, found.st_mtime_ns))


def _is_like(model: Path, folder: Path) -> bool:
    want, found = model.stat(), folder.stat()
    return (
        (want.st_mode, want.st_mtime_ns) == (found.st_mode, found.st_mtime_ns)
        and (not mapped(want.st_uid, want.st_gid) or (want.st_uid, want.st_gid) == (found.st_uid, found.st_gid))
        and attributes(os.fsencode(model))[0] == attributes(os.fsencode(folder))[0]
    )


def build(plan: Plan) -> Root:
    """The detached overlays of `plan`; the calling thread must have a mount namespace of its own.

    /usr first: its upper lies inside the root's, and the kernel warns otherwise.
    """
    prepare(plan)
    root, usr = stacks(plan)
    _clear_volatile(plan)
    tree = mount(usr) if usr else None
    try:
        return Root(mount(root), tree)
    except BaseException:
        if tree is not None:
            os.close(tree)
        raise


def _clear_volatile(plan: Plan) -> None:
    """The kernel refuses a top that was once mounted volatile; that is too strict unless the host itself went down."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    noted = plan.work / "boot"
    for name in ("root", "usr"):
        mark = plan.work / name / "work/incompat/volatile"
        if mark.exists():
            if not noted.exists() or noted.read_text() != boot:
                raise RuntimeFailed(
                    "the host went down before this sandbox's files were written back", "restore its last snapshot"
                )
            shutil.rmtree(mark)
    if plan.volatile:
        noted.write_text(boot)


def mount(stack: Stack) -> int:
    with ExitStack() as opened:

        def name(folder: Path) -> str:
            fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            opened.callback(os.close, fd)
            return f"/proc/self/fd/{fd}"

        lowers = [name(folder) for folder in stack.lowers]
        pair: list[tuple[str, str | None]] = [("upperdir", name(stack.upper)), ("workdir", name(stack.work))]
        if stack.volatile:
            pair.append(("volatile", None))
        layers: list[tuple[str, str | None]] = [("lowerdir+", lower) for lower in lowers]
        try:
            return kernel.make_mount("overlay", [*_OPTIONS, *_MODERN, *layers, *pair], kernel.MOUNT_ATTR_NODEV)
        except OSError as error:
            if error.errno != errno.EINVAL or not any(
                f"fsconfig {word}:" in str(error) for word in ("uuid", "lowerdir+")
            ):
                raise
        return _mount_classic([*_OPTIONS, ("lowerdir", ":".join(lowers)), *pair], stack.work)


def _mount_classic(settings: list[tuple[str, str | None]], scratch: Path) -> int:
    """Kernels before 6.7 have no `lowerdir+`: one option string, mounted for a moment on a folder of ours."""
    data = ",".join(key if value is None else f"{key}={value}" for key, value in settings)
    place = scratch.parent / "mounting"
    place.mkdir(exist_ok=True)

    kernel.mount("overlay", str(place), "overlay", kernel.MS_NODEV, data)
    try:
        return kernel.clone_tree(str(place))
    finally:
        kernel.umount(str(place), kernel.MNT_DETACH)


def attach(tree: Root, place: Path) -> None:
    """Mount the overlays on the folder `place` of the calling thread's mount namespace."""
    try:
        _attach(tree.root, place)
        if tree.usr is not None:
            _attach(tree.usr, place / "usr")
    finally:
        tree.close()


def _attach(tree: int, place: Path) -> None:
    target = os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        kernel.attach(tree, target)
    finally:
        os.close(target)
