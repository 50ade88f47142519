"""`make soak`: worlds and kills against the model for minutes or hours, several at once; what came of them at the end.

Each failure is made shorter and left as a program in .build/soak.
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

from model_history import made_up, play, shrunk
from model_kills import Killer
from model_script import script
from model_world import Rules

FOUND = Path(__file__).resolve().parent.parent / ".build/soak"
Told = dict[str, int]


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--minutes", type=float, default=10)
    options.add_argument("--processes", type=int, default=max(2, os.cpu_count() or 1))
    options.add_argument("--runtimes", default="runc,crun,runsc")
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--seed", type=int, default=None, help="the first history's; a fresh one if none is given")
    options.add_argument("--kills", type=float, default=0.3, help="the part of the time that goes to kills")
    asked = options.parse_args()
    seed = random.SystemRandom().randrange(1 << 31) if asked.seed is None else asked.seed
    FOUND.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + asked.minutes * 60
    work = [(number, seed, asked, until) for number in range(asked.processes)]
    began, total = time.monotonic(), collections.Counter[str]()
    with multiprocessing.get_context("spawn").Pool(asked.processes) as pool:
        for told in pool.imap_unordered(worker, work):
            total.update(told)
    seconds = time.monotonic() - began
    print(f"soak of {seconds / 60:.1f} minutes from seed {seed}, {asked.processes} processes, {asked.runtimes}:")
    for name in ("histories", "steps", "edits", "kills", "cycles", "wrong", "lost", "left"):
        print(f"  {name:9} {total[name]}")
    print(f"  {(total['steps'] + total['edits']) / seconds:.0f} steps and edits a second; failures in {FOUND}")
    return 1 if total["wrong"] + total["lost"] + total["left"] else 0


def worker(work: tuple[int, int, argparse.Namespace, float]) -> Told:
    number, first, asked, until = work
    told, turn = collections.Counter[str](), 0
    runtimes = asked.runtimes.split(",")
    while time.monotonic() < until:
        seed = first + number + turn * asked.processes
        runtime = runtimes[(number + turn) % len(runtimes)]
        turn += 1
        folder = Path(tempfile.mkdtemp(prefix="sandkeep-soak-"))
        try:
            if random.Random(seed).random() < asked.kills:
                told.update(kills(folder, runtime, seed, until))
            else:
                told.update(history(Rules(folder, runtime), seed, asked.steps, until))
        except Exception:
            told["wrong"] += 1
            keep(f"{runtime}-{seed}.txt", traceback.format_exc())
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return dict(told)


def history(rules: Rules, seed: int, steps: int, until: float) -> Told:
    played = play(rules, made_up(seed, steps), until)
    told = {"histories": 1, "steps": played.steps, "edits": played.edits, "kills": played.killed}
    told["cycles"] = played.seen.get("resume", 0)
    if played.wrong is not None:
        told["left" if played.wrong.what == "left" else "lost" if "failed" in played.wrong.what else "wrong"] = 1
        short = shrunk(rules, played, 120)
        keep(f"{rules.runtime}-{seed}.py", script(rules, short))
    return told


def kills(folder: Path, runtime: str, seed: int, until: float) -> Told:
    with Killer(folder, runtime, seed) as killer:
        killer.run(min(until, time.monotonic() + 60))
        told = {"kills": killer.kills, "cycles": killer.cycles, "lost": len(killer.lost), "left": len(killer.left)}
        if killer.lost or killer.left:
            keep(f"kills-{runtime}-{seed}.txt", "\n".join([*killer.lost, *killer.left]))
        return told


def keep(name: str, text: str) -> None:
    (FOUND / name).write_text(text)
    print(f"found: {FOUND / name}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
