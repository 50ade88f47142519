"""Issue 2's figures: commands, create, snapshot, restore, fork, many at once, many cycles."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench import workspace
from bench.measure import Report, medians, timed
from sandkeep import Sandbox
from sandkeep.runtime.driver import DRIVERS
from sandkeep.runtime.kernel import in_thread, private_mounts
from sandkeep.runtime.overlay import attach, build
from sandkeep.sandbox.home import Home
from sandkeep.sandbox.machine import Machine

ROUNDS = 21


def run(report: Report, quick: bool = False) -> None:
    with tempfile.TemporaryDirectory(prefix="sandkeep-bench-") as folder:
        home = Path(folder)
        commands(report, home)
        creating(report, home)
        saving(report, home, quick)
        many(report, home, 20 if quick else 200)
        cycles(report, home, 20 if quick else 1000)


def commands(report: Report, home: Path) -> None:
    with Sandbox(home=home, runtime="runc") as sb:
        state = home / "sandboxes" / sb.id / "runtime"
        runc = DRIVERS["runc"].path()
        acts: dict[str, Callable[[], object]] = {
            "ours": lambda: sb.commands.run("true"),
            "sh": lambda: subprocess.run(["/bin/sh", "-c", "true"], check=True),
            "exec": lambda: subprocess.run([runc, "--root", str(state), "exec", sb.id, "/bin/true"], check=True),
        }
        found = medians(acts, ROUNDS * 3)
        report.add("commands.run('true')", found["ours"], found["exec"], "runc exec", 1 / 3)
        for how, pause in (("back to back", 0.0), ("10 ms apart", 0.01)):
            alone = {name: alike(acts[name], pause) for name in ("ours", "sh")}
            report.add(f"commands.run('true'), {how}", alone["ours"], alone["sh"], "sh -c true, too", 3)


def alike(act: Callable[[], object], pause: float) -> float:
    """The median of one act again and again, with nothing else between but a pause that is not counted."""
    times = []
    for _ in range(ROUNDS * 3):
        time.sleep(pause)
        times.append(timed(act))
    return statistics.median(times)


def creating(report: Report, home: Path) -> None:
    def ours() -> None:
        sb = Sandbox(home=home, runtime="runc")
        made.append(sb)
        sb.commands.run("true")

    made: list[Sandbox] = []
    with Sandbox(home=home, runtime="runc") as sb:
        bare = Bare(Home(home), sb.id)
        found = medians({"ours": ours, "runc": bare.run}, ROUNDS)
    for one in made:
        one.kill()
    report.add("create to the first result", found["ours"], found["runc"], "runc run true", 2)


class Bare:
    """`runc run` of a sandbox's own bundle with `true` in place of the guest."""

    def __init__(self, home: Home, id: str) -> None:
        machine = Machine(home, id)
        record = machine.record()
        machine.make_top(99)
        self.plan = machine.plan(record, [], 99)
        self.bundle = home.path / "bare"
        self.bundle.mkdir()
        spec = json.loads((machine.folder / "bundle" / "config.json").read_text())
        spec["process"]["args"] = ["/bin/true"]
        spec["root"]["path"] = str(self.bundle / "root")
        spec["linux"]["cgroupsPath"] = "/sandkeep-bench-bare"
        (self.bundle / "root").mkdir()
        (self.bundle / "config.json").write_text(json.dumps(spec))

    def run(self) -> None:
        def inside() -> None:
            private_mounts()
            attach(build(self.plan), self.bundle / "root")
            subprocess.run(
                [DRIVERS["runc"].path(), "--root", str(self.bundle / "state"), "run", "--bundle", str(self.bundle), "bare"],
                check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            )  # fmt: skip

        in_thread(inside)


def saving(report: Report, home: Path, quick: bool) -> None:
    rounds = 3 if quick else ROUNDS
    tree = home / "tree"
    workspace.make(tree, "S" if quick else "M")
    copies: list[Path] = []

    def copy() -> None:
        copies.append(home / f"copy{len(copies)}")
        shutil.rmtree(copies[-2], ignore_errors=True) if len(copies) > 1 else None
        subprocess.run(["cp", "-a", str(tree), str(copies[-1])], check=True)

    cp = medians({"cp": copy}, 5)["cp"]
    full, empty = Timings(home, tree, rounds), Timings(home, None, rounds)
    for verb in ("snapshot", "restore", "fork"):
        ours, bare = getattr(full, verb), getattr(empty, verb)
        report.add(f"{verb}, {'S' if quick else 'M'} in the top", ours, cp, "cp -a", 0.1)
        report.add(f"{verb}, {'S' if quick else 'M'} in the top", ours, bare, "the same, empty", 2)


class Timings:
    """Each round fills a fresh sandbox's top, so that nothing is a layer yet."""

    def __init__(self, home: Path, tree: Path | None, rounds: int) -> None:
        times: dict[str, list[float]] = {"snapshot": [], "restore": [], "fork": []}
        for _ in range(rounds):
            with Sandbox(home=home, runtime="runc") as sb:
                first = sb.snapshot()
                workspace.fill_top(home, sb, tree)
                forks: list[Sandbox] = []
                times["fork"].append(timed(lambda sb=sb, forks=forks: forks.append(sb.fork())))  # type: ignore[misc]
                forks[0].kill()
            with Sandbox(home=home, runtime="runc") as sb:
                first = sb.snapshot()
                workspace.fill_top(home, sb, tree)
                times["snapshot"].append(timed(sb.snapshot))
                times["restore"].append(timed(lambda sb=sb, first=first: sb.restore(first)))  # type: ignore[misc]
        self.snapshot, self.restore, self.fork = (
            statistics.median(times[name]) for name in ("snapshot", "restore", "fork")
        )


def many(report: Report, home: Path, count: int) -> None:
    made: list[Sandbox] = []
    try:
        with ThreadPoolExecutor(4) as pool:
            made = list(pool.map(lambda _: Sandbox(home=home, runtime="runc"), range(count)))
        answers = sum(sb.commands.run("echo $((6*7))").stdout == "42\n" for sb in made)
        pss = sum(sb.usage()["pss_bytes"] for sb in made) / count
        report.note(
            f"{answers} of {count} sandboxes alive at once answer; PSS of an idle one {pss / (1 << 20):.1f} MB (aim 12)"
        )
    finally:
        for sb in made:
            sb.kill()


def cycles(report: Report, home: Path, count: int) -> None:
    def one(_: int) -> None:
        with Sandbox(home=home, runtime="runc") as sb:
            sb.commands.run("true")

    with ThreadPoolExecutor(2) as pool:
        took = timed(lambda: list(pool.map(one, range(count))))
    left = [str(path) for path in (home / "sandboxes").iterdir()]
    report.note(f"{count} cycles of create, run, kill: {took / count:.0f} ms each, left behind: {left or 'nothing'}")
