"""Medians of interleaved rounds, and the table that shows them against their bounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Row:
    what: str
    ours: float
    peer: float
    peer_name: str
    bound: float | None = None
    unit: str = "ms"

    @property
    def ratio(self) -> float:
        return self.ours / self.peer if self.peer else float("inf")

    def line(self) -> str:
        verdict = "" if self.bound is None else ("ok" if self.ratio <= self.bound else "MISSED")
        bound = "" if self.bound is None else f"{self.bound:g}"
        return f"| {self.what} | {self.ours:.2f} {self.unit} | {self.peer_name}: {self.peer:.2f} {self.unit} | {self.ratio:.3f} | {bound} | {verdict} |"


@dataclass
class Report:
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, *args: object, **named: object) -> None:
        row = Row(*args, **named)  # type: ignore[arg-type]
        self.rows.append(row)
        print(row.line(), flush=True)

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(f"- {text}", flush=True)


HEAD = "| what | ours | peer | ratio | bound | |\n|---|---|---|---|---|---|"


def timed(act: Callable[[], object]) -> float:
    """Milliseconds."""
    begun = time.perf_counter()
    act()
    return (time.perf_counter() - begun) * 1000


def medians(
    acts: dict[str, Callable[[], object]], rounds: int, before: Callable[[], object] = lambda: None
) -> dict[str, float]:
    """Interleaved, so that a slow minute hits everybody; `before` each, uncounted."""
    times: dict[str, list[float]] = {name: [] for name in acts}
    for _ in range(rounds):
        for name, act in acts.items():
            before()
            times[name].append(timed(act))
    return {name: statistics.median(values) for name, values in times.items()}
