"""How every command speaks: tables for people, `--json` for programs, errors with their remedy, documented exit codes.

0 done · 1 failed · 2 wrong usage · 3 not found · 4 busy or in conflict · 5 damaged data · `exec` ends with the command's own code
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import click
from rich.console import Console
from rich.table import Table

from sandkeep.errors import BadArgument, Busy, Corrupt, NotFound, SandkeepError, StateConflict

P = ParamSpec("P")
R = TypeVar("R")

screen = Console()
CODES: list[tuple[type[SandkeepError], int]] = [
    (NotFound, 3),
    (Busy, 4),
    (StateConflict, 4),
    (Corrupt, 5),
    (BadArgument, 2),
]


def exit_code(error: SandkeepError) -> int:
    return next((code for kind, code in CODES if isinstance(error, kind)), 1)


def guarded(function: Callable[P, R]) -> Callable[P, R]:
    """Errors of ours become one clear message on stderr and the exit code that the docs name."""

    @wraps(function)
    def inner(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except SandkeepError as error:
            as_json = bool(kwargs.get("as_json"))
            click.echo(json.dumps(error.as_dict()) if as_json else f"error: {error.message} [{error.code}]", err=True)
            if error.remedy and not as_json:
                click.echo(f"   try: {error.remedy}", err=True)
            sys.exit(exit_code(error))

    return inner


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


def plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {key: plain(inner) for key, inner in dataclasses.asdict(value).items()}
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    return str(value) if isinstance(value, Path) else value


def show(value: Any, as_json: bool) -> None:
    """One thing: JSON, or a line per field."""
    if as_json:
        click.echo(json.dumps(plain(value)))
        return
    found = plain(value)
    width = max(map(len, found), default=0)
    for key, inner in found.items():
        click.echo(f"{key:<{width}}  {inner if isinstance(inner, str) else json.dumps(inner)}")


def table(rows: Iterable[Any], columns: dict[str, Callable[[Any], str]], as_json: bool) -> None:
    rows = list(rows)
    if as_json:
        click.echo(json.dumps([plain(row) for row in rows]))
    elif sys.stdout.isatty():
        drawn = Table(box=None, pad_edge=False)
        for name in columns:
            drawn.add_column(name, overflow="fold")
        for row in rows:
            drawn.add_row(*(cell(row) for cell in columns.values()))
        screen.print(drawn)
    else:
        for row in rows:
            click.echo("\t".join(cell(row) for cell in columns.values()))


def size(count: int) -> str:
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
