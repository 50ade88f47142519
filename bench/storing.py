"""Issue 3's figures: checkpoint and restore against restic, tar and others, on a fresh journaled filesystem.

The store's own path is measured: layers in, layers out. Page cache warm, `sync` before each timed operation.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench import workspace
from bench.measure import Report, medians, timed
from bench.peers import Others, shell
from sandkeep import Sandbox
from sandkeep.checkpoints.capture import Source, capture
from sandkeep.checkpoints.catalog import Store
from sandkeep.checkpoints.unpack import unpack

BASE = {"name": "bench", "fingerprint": "bench"}


def run(report: Report, quick: bool = False) -> None:
    rounds = 2 if quick else 3
    with Disk() as folder:
        Shape(report, folder, "S" if quick else "M", rounds).measure()
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


class Shape:
    """All figures of one workspace."""

    def __init__(self, report: Report, folder: Path, name: str, rounds: int) -> None:
        self.report, self.folder, self.name, self.rounds = report, folder, name, rounds
        self.tree = folder / "tree"
        workspace.make(self.tree, name)
        self.restic = restic_in(folder)
        self.others = Others(folder, self.tree)
        self.runs: list[Ours] = []

    def measure(self) -> None:
        self.first()
        self.no_change()
        self.changed("3 edits", workspace.edit_three, 0.03)
        if self.name != "S":
            self.changed("3 edits and pages of the database", both, 0.15)
        self.restore()
        for one in self.runs:
            one.store.close()

    def add(self, what: str, ours: float, restic: float, bound: float, others: dict[str, float]) -> None:
        self.report.add(f"{what}, {self.name}", ours, restic, "restic", bound)
        for peer, took in others.items():
            self.report.add(f"{what}, {self.name}", ours, took, peer)

    def fresh(self) -> None:
        """Nothing left of the one before, and nothing that is still to be written."""
        for name in ("restic", "tar", "target", "elsewhere"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        (self.folder / "tar").mkdir()
        os.sync()

    def first(self) -> None:
        def ours() -> None:
            self.runs.append(Ours(self.folder / f"ours{len(self.runs)}", self.tree))
            self.runs[-1].save(self.tree)

        kept = self.folder / "tar" / "x.zst"
        acts = {
            "tar": shell(f"tar -C {self.tree} -c . | zstd -1 -T0 -q | tee {kept} | sha256sum && sync {kept}"),
            "ours": ours,
            "restic": shell(f"{self.restic} init && cd {self.tree} && {self.restic} backup ."),
        }
        found = medians(acts, self.rounds, self.fresh)
        self.add("first checkpoint", found["ours"], found["restic"], 0.4, {})
        self.report.add(f"first checkpoint, {self.name}", found["ours"], found["tar"], "tar|zstd -1 -T0|sha256sum", 0.9)
        for peer, took in self.others.first().items():
            self.report.add(f"first checkpoint, {self.name}", found["ours"], took, peer)
        stored = usage(self.runs[-1].folder / "store"), usage(self.folder / "restic")
        self.report.add(f"stored bytes, {self.name}", *stored, "restic", 1, unit="MB")

    def no_change(self) -> None:
        acts = {"ours": self.runs[-1].save, "restic": shell(f"cd {self.tree} && {self.restic} backup .")}
        found = medians(acts, self.rounds, os.sync)
        self.add("no change", found["ours"], found["restic"], 0.02, self.others.again())

    def changed(self, what: str, change: Callable[[Path, int], None], bound: float) -> None:
        one = self.runs[-1]
        stores = {"ours": one.folder / "store", "restic": self.folder / "restic"}
        acts: dict[str, Callable[[], object]] = {"restic": shell(f"cd {self.tree} && {self.restic} backup .")}
        times: dict[str, list[float]] = {name: [] for name in stores}
        added = dict.fromkeys(stores, 0.0)
        for round_ in range(self.rounds):
            layer = one.delta(lambda root, at=round_: change(root, at))  # type: ignore[misc]
            change(self.tree, round_)
            acts["ours"] = lambda layer=layer: one.save(layer)  # type: ignore[misc]
            for name, store in stores.items():
                before = usage(store)
                os.sync()
                times[name].append(timed(acts[name]))
                added[name] += usage(store) - before
        middle = {name: statistics.median(values) for name, values in times.items()}
        self.add(what, middle["ours"], middle["restic"], bound, self.others.again())
        self.report.add(f"bytes added, {what}, {self.name}", added["ours"], added["restic"], "restic", 1, unit="MB")

    def restore(self) -> None:
        one, target = self.runs[-1], self.folder / "target"

        def ours() -> None:
            store = Store(one.folder / "store", home=self.folder / "elsewhere", create=False)
            unpack(store.repo, one.parent or "", target)
            store.close()

        def cleared() -> None:
            shutil.rmtree(target, ignore_errors=True)
            shutil.rmtree(self.folder / "elsewhere", ignore_errors=True)
            os.sync()

        acts = {"ours": ours, "restic": shell(f"{self.restic} restore latest --target {target}")}
        found = medians(acts, self.rounds, cleared)
        self.add("restore on an empty machine", found["ours"], found["restic"], 0.4, self.others.restore())
        took = known(self.folder, self.rounds)
        self.add("restore with the layers here", took, found["restic"], 0.05, {})


def restic_in(folder: Path) -> str:
    return f"RESTIC_PASSWORD=x restic --no-cache -q -r {folder}/restic"


def growth(report: Report, folder: Path, name: str) -> None:
    """The first checkpoint of another size, once."""
    tree = folder / "tree"
    workspace.make(tree, name)
    restic, one = restic_in(folder), Ours(folder / "ours", tree)
    shell(f"{restic} init")()
    acts = {"ours": lambda: one.save(tree), "restic": shell(f"cd {tree} && {restic} backup .")}
    found = medians(acts, 1, os.sync)
    report.add(f"first checkpoint, {name}", found["ours"], found["restic"], "restic backup")
    one.store.close()
    shutil.rmtree(folder)


def both(root: Path, round_: int) -> None:
    workspace.edit_three(root, round_)
    workspace.change_pages(root, round_)


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
