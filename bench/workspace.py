"""A deterministic workspace like a coding agent's: sources, logs, binaries, assets, and a 100 MB database of 4 KiB pages.

Shape S is 2,000 files and 20 MB; M is 20,000 files and 400 MB; L is 60,000 files and 2 GB.
"""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

from sandkeep import Sandbox
from sandkeep.model import WORKSPACE
from sandkeep.sandbox.home import Home
from sandkeep.sandbox.machine import Machine

PAGE = 4096
SHAPES = {
    #     sources  mean   pages   logs   log size   binaries  mean     assets  mean
    "S": (1_950, 8_000, 0, 1, 1_000_000, 5, 200_000, 40, 20_000),
    "M": (18_500, 8_400, 25_600, 12, 4_000_000, 150, 300_000, 1_300, 30_000),
    "L": (55_000, 8_400, 25_600, 20, 10_000_000, 500, 1_500_000, 4_000, 60_000),
}
WORDS = [
    a + b
    for a in ("al", "ber", "con", "dan", "ef", "gor", "hil", "in")
    for b in ("ta", "ro", "mi", "sel", "ver", "n", "dex", "lo")
]


class Maker:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        lines = [
            f"    {self._words(3)} = {self._words(2)}({self.rng.randint(0, 9999)})  # {self._words(4)}\n"
            for _ in range(20_000)
        ]
        self.book = "".join(lines).encode()

    def _words(self, count: int) -> str:
        return "_".join(self.rng.choices(WORDS, k=count))

    def text(self, size: int) -> bytes:
        at = self.rng.randrange(len(self.book))
        pieces, left = [], size
        while left > 0:
            piece = self.book[at : at + min(left, 700)]
            pieces.append(piece + b"%x\n" % self.rng.getrandbits(64))
            left -= len(piece) + 17
            at = self.rng.randrange(len(self.book))
        return b"".join(pieces)[:size]

    def binary(self, size: int) -> bytes:
        half = self.rng.randbytes(size // 2)
        return half.translate(bytes(i * i // 255 for i in range(256))) + self.text(size - size // 2)

    def size(self, mean: int) -> int:
        return max(40, int(self.rng.lognormvariate(0, 1.1) * mean / 1.83))


def make(root: Path, shape: str, seed: int = 7) -> None:
    sources, mean, pages, logs, log_size, binaries, binary_mean, assets, asset_mean = SHAPES[shape]
    maker = Maker(seed)
    for i in range(sources):
        write(
            root / "src" / f"pkg{i // 200}" / f"mod{i // 12 % 17}" / f"{maker._words(1)}{i}.py",
            maker.text(maker.size(mean)),
        )
    for i in range(logs):
        write(root / "logs" / f"app{i}.log", maker.text(log_size))
    for i in range(binaries):
        write(root / "bin" / f"lib{i}.so", maker.binary(maker.size(binary_mean)))
    for i in range(assets):
        write(root / "assets" / f"{i // 50}" / f"image{i}.png", maker.rng.randbytes(maker.size(asset_mean)))
    if pages:
        path = root / "data" / "app.db"
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            for _ in range(pages):
                body = maker.text(3200)
                file.write(maker.rng.randbytes(16) + bytes(PAGE - 16 - len(body)) + body)


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def fill_top(home: Path, sb: Sandbox, tree: Path | None) -> None:
    """Put a file, and what is in `tree`, into a sandbox's top layer, as if its processes had written it."""
    sb.files.write(f"{WORKSPACE}/one", b"x")
    if tree is not None:
        record = Machine(Home(home), sb.id).record()
        top = home / "sandboxes" / sb.id / "tops" / str(record.top) / "tree" / WORKSPACE.lstrip("/")
        subprocess.run(["cp", "-a", f"{tree}/.", str(top)], check=True)


def edit_three(root: Path, round_: int) -> None:
    for i in (3, 500, 1500):
        path = next((root / "src" / f"pkg{i // 200}" / f"mod{i // 12 % 17}").iterdir())
        with open(path, "ab") as file:
            file.write(b"# edit %d\n" % round_)


def change_pages(root: Path, round_: int, count: int = 16) -> None:
    rng = random.Random(round_)
    with open(root / "data" / "app.db", "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        for _ in range(count):
            file.seek(rng.randrange(size // PAGE) * PAGE)
            file.write(rng.randbytes(PAGE // 2))
