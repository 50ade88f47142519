"""Issue 3's figures: checkpoint and restore against restic, tar and others, on a fresh journaled filesystem.

The store's own path is measured: layers in, layers out. Page cache warm, `sync` before each timed operation.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench import workspace
from bench.measure import Report, medians, timed
from sandkeep import Sandbox
from sandkeep.checkpoints.capture import Source, capture
from sandkeep.checkpoints.catalog import Store
from sandkeep.checkpoints.unpack import unpack

BASE = {"name": "bench", "fingerprint": "bench"}
SLOW = ("tar|gzip", "borg", "git", "casync")  # once is enough


def run(report: Report, quick: bool = False) -> None:
    rounds = 2 if quick else 3
    with Disk() as folder:
        shape(report, folder, "S" if quick else "M", rounds)
        for name in () if quick else ("S", "L"):
            growth(report, folder / name, name)
        flat(report, folder, 300 if quick else 10_000)


class Disk:
    """A journaled ext4 of its own: one without a journal creates files many times slower after a mass delete."""

    def __enter__(self) -> Path:
        self._folder = Path(tempfile.mkdtemp(prefix="sandkeep-bench-"))
        image, mount = self._folder / "disk", self._folder / "mount"
        with open(image, "wb") as file:
            file.truncate(24 << 30)
        mount.mkdir()
        subprocess.run(["mkfs.ext4", "-q", "-E", "lazy_itable_init=1", str(image)], check=True)
        subprocess.run(["mount", "-o", "loop", str(image), str(mount)], check=True)
        return mount

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", "--lazy", str(self._folder / "mount")], check=True)
        shutil.rmtree(self._folder)


def shell(command: str) -> Callable[[], object]:
    return lambda: subprocess.run(command, shell=True, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


class Ours:
    """A stack of layer trees and the checkpoints made of it."""

    def __init__(self, folder: Path, tree: Path) -> None:
        self.folder, self.tree = folder, tree
        self.store = Store(folder / "store", home=folder / "home")
        self.parent: str | None = None
        self.count = 0

    def save(self, *trees: Path) -> None:
        info = capture(self.store.repo, Source(list(trees), self.parent), base=BASE, session={})
        self.parent = info.id

    def delta(self, change: Callable[[Path], None]) -> Path:
        """The layer that a change would leave: copies of the files it touches, changed."""
        self.count += 1
        layer = self.folder / f"layer{self.count}"
        touched = self.folder / "touched"
        subprocess.run(["cp", "-a", "--reflink=auto", str(self.tree), str(touched)], check=True)
        before = {path: path.stat().st_mtime_ns for path in touched.rglob("*") if path.is_file()}
        change(touched)
        for path, stamp in before.items():
            if path.stat().st_mtime_ns != stamp:
                target = layer / path.relative_to(touched)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, target)
        shutil.rmtree(touched)
        return layer


def shape(report: Report, folder: Path, name: str, rounds: int) -> None:
    tree = folder / "tree"
    workspace.make(tree, name)
    restic = restic_in(folder)
    runs: list[Ours] = []

    def ours() -> None:
        os.sync()
        runs.append(Ours(folder / f"ours{len(runs)}", tree))
        runs[-1].save(tree)

    def restic_first() -> None:
        shutil.rmtree(folder / "restic", ignore_errors=True)
        shell(f"{restic} init")()
        os.sync()
        shell(f"cd {tree} && {restic} backup .")()

    peers = others(folder, tree)
    slow = {peer: peers.pop(peer) for peer in SLOW if peer in peers}
    found = {**medians({"ours": ours, "restic": restic_first, **peers}, rounds), **medians(slow, 1)}
    report.add(f"first checkpoint, {name}", found["ours"], found["restic"], "restic init + backup", 0.4)
    report.add(f"first checkpoint, {name}", found["ours"], found["tar|zstd|sha256"], "tar|zstd -1 -T0|sha256sum", 0.9)
    for peer in (*SLOW, "cp -a"):
        if peer in found:
            report.add(f"first checkpoint, {name}", found["ours"], found[peer], peer)
    one = runs[-1]
    report.add(f"stored bytes, {name}", usage(one.folder / "store"), usage(folder / "restic"), "restic", 1, unit="MB")
    incremental(report, name, folder, tree, one, restic, rounds)
    restoring(report, name, folder, one, restic, rounds)
    for each in runs:
        each.store.close()


def restic_in(folder: Path) -> str:
    return f"RESTIC_PASSWORD=x restic --no-cache -q -r {folder}/restic"


def growth(report: Report, folder: Path, name: str) -> None:
    """The first checkpoint of another size, once."""
    tree = folder / "tree"
    workspace.make(tree, name)
    restic, one = restic_in(folder), Ours(folder / "ours", tree)
    shell(f"{restic} init")()
    os.sync()
    took = timed(lambda: one.save(tree))
    os.sync()
    report.add(f"first checkpoint, {name}", took, timed(shell(f"cd {tree} && {restic} backup .")), "restic backup")
    one.store.close()
    shutil.rmtree(folder)


def others(folder: Path, tree: Path) -> dict[str, Callable[[], object]]:
    def fresh(command: str) -> Callable[[], object]:
        def act() -> None:
            shutil.rmtree(folder / "other", ignore_errors=True)
            (folder / "other").mkdir()
            os.sync()
            shell(command)()

        return act

    found = {
        "tar|zstd|sha256": fresh(
            f"tar -C {tree} -c . | zstd -1 -T0 -q | tee {folder}/other/x.zst | sha256sum && sync {folder}/other/x.zst"
        ),
        "tar|gzip": fresh(f"tar -C {tree} -c . | gzip > {folder}/other/x.gz"),
        "cp -a": fresh(f"cp -a {tree} {folder}/other/copy"),
        "git": fresh(f"cd {folder}/other && git init -q --bare r && git --git-dir=r --work-tree={tree} add -A"),
        "borg": fresh(f"cd {tree} && borg init -e none {folder}/other/b && borg create {folder}/other/b::x ."),
        "casync": fresh(f"casync make --store={folder}/other/c {folder}/other/x.caidx {tree}"),
    }
    return {name: act for name, act in found.items() if name.startswith(("tar", "cp")) or shutil.which(name)}


def incremental(report: Report, name: str, folder: Path, tree: Path, one: Ours, restic: str, rounds: int) -> None:
    changes = {
        "no change": (lambda _root, _round: None, 0.02),
        "3 edits": (workspace.edit_three, 0.03),
        **({"3 edits and pages of the database": (both, 0.15)} if name != "S" else {}),
    }
    for what, (change, bound) in changes.items():
        ours_times, restic_times, ours_bytes, restic_bytes = [], [], 0.0, 0.0
        for round_ in range(rounds):
            layer = one.delta(lambda root, c=change, r=round_: c(root, r))  # type: ignore[misc]
            change(tree, round_)
            os.sync()
            before = usage(one.folder / "store")
            ours_times.append(timed(lambda layer=layer: one.save(*([layer] if layer.exists() else []))))  # type: ignore[misc]
            ours_bytes += usage(one.folder / "store") - before
            before = usage(folder / "restic")
            os.sync()
            restic_times.append(timed(shell(f"cd {tree} && {restic} backup .")))
            restic_bytes += usage(folder / "restic") - before
        ours_times.sort()
        restic_times.sort()
        report.add(f"{what}, {name}", ours_times[rounds // 2], restic_times[rounds // 2], "restic", bound)
        if what != "no change":
            report.add(f"bytes added, {what}, {name}", ours_bytes, restic_bytes, "restic", 1, unit="MB")


def both(root: Path, round_: int) -> None:
    workspace.edit_three(root, round_)
    workspace.change_pages(root, round_)


def restoring(report: Report, name: str, folder: Path, one: Ours, restic: str, rounds: int) -> None:
    assert one.parent is not None
    target = folder / "target"

    def ours() -> None:
        store = Store(one.folder / "store", home=folder / "elsewhere", create=False)
        unpack(store.repo, one.parent or "", target)
        store.close()

    def cleared(act: Callable[[], object]) -> float:
        shutil.rmtree(target, ignore_errors=True)
        shutil.rmtree(folder / "elsewhere", ignore_errors=True)
        os.sync()
        return timed(act)

    times: dict[str, list[float]] = {"ours": [], "restic": []}
    for _ in range(rounds):
        times["ours"].append(cleared(ours))
        times["restic"].append(cleared(shell(f"{restic} restore latest --target {target}")))
    middle = {key: sorted(values)[rounds // 2] for key, values in times.items()}
    report.add(f"restore on an empty machine, {name}", middle["ours"], middle["restic"], "restic", 0.4)
    report.add(f"restore with the layers here, {name}", known(folder, rounds), middle["restic"], "restic", 0.05)


def known(folder: Path, rounds: int) -> float:
    """A sandbox becomes again what a checkpoint says whose layers are on this machine."""
    home, times = folder / "known", []
    with Sandbox(home=home, runtime="runc") as sb:
        workspace.fill_top(home, sb, folder / "tree")
        kept = sb.checkpoint()
        for _ in range(rounds):
            assert sb.commands.run("echo changed > one").exit_code == 0
            os.sync()
            times.append(timed(lambda: sb.restore(kept.id)))
    return sorted(times)[rounds // 2]


def flat(report: Report, folder: Path, count: int) -> None:
    tree = folder / "small"
    tree.mkdir()
    (tree / "file").write_text("x")
    one = Ours(folder / "many", tree)
    one.save(tree)
    layer = folder / "small-layer"
    layer.mkdir()

    def change() -> None:
        (layer / "file").write_text(str(time.time_ns()))
        one.save(layer)

    def measure() -> dict[str, float]:
        return medians(
            {"newest ten": lambda: one.store.checkpoints(10), "latest": one.store.latest, "a new one": change}, 15
        )

    for _ in range(5):
        change()
    early = measure()
    for _ in range(count):
        change()
    late = measure()
    for what, value in late.items():
        report.add(f"{what}, with {count} checkpoints", value, early[what], "with 20", 1.5)
    one.store.close()


def usage(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6
