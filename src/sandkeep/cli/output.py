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
from typing import Any, NoReturn, ParamSpec, TypeVar

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sandkeep.errors import BadArgument, Busy, Corrupt, NotFound, SandkeepError, StateConflict, refused

P = ParamSpec("P")
R = TypeVar("R")

screen = Console()
messages = Console(stderr=True)
CODES: list[tuple[type[SandkeepError], int]] = [
    (NotFound, 3),
    (Busy, 4),
    (StateConflict, 4),
    (Corrupt, 5),
    (BadArgument, 2),
]
_WHOLE = {"id", "time", "created", "taken", "saved", "modified", "size", "bytes"}
_CUT = {"comment"}


def exit_code(error: SandkeepError) -> int:
    return next((code for kind, code in CODES if isinstance(error, kind)), 1)


def guarded(function: Callable[P, R]) -> Callable[P, R]:
    """Errors, ours or the system's, become one clear message on stderr and the exit code that the docs name."""

    @wraps(function)
    def inner(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except SandkeepError as error:
            _end(error, bool(kwargs.get("as_json")))
        except BrokenPipeError:
            raise  # whoever read our output has left; click ends quietly
        except OSError as error:
            _end(refused(error), bool(kwargs.get("as_json")))

    return inner


def _end(error: SandkeepError, as_json: bool) -> NoReturn:
    if as_json:
        click.echo(json.dumps({**error.as_dict(), **({"place": error.place} if error.place else {})}), err=True)
    else:
        message = f"{error.message}: {error.place}" if error.place else error.message
        click.echo(f"error: {printable(message)} [{error.code}]", err=True)
        if error.remedy:
            click.echo(f"   try: {printable(error.remedy)}", err=True)
    sys.exit(exit_code(error))


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
    """One thing: JSON, or a line per field; a field of many values has a line for each."""
    if as_json:
        click.echo(json.dumps(plain(value)))
        return
    found = plain(value)
    width = max(map(len, found), default=0)
    for key, inner in found.items():
        for number, line in enumerate(_lines(inner)):
            click.echo(f"{'' if number else key:<{width}}  {line}")


def _lines(value: Any) -> list[str]:
    if value is None or value in ("", [], {}):
        return ["-"]
    if isinstance(value, bool):
        return ["yes" if value else "no"]
    if isinstance(value, dict):
        return [f"{printable(key)}={', '.join(_lines(inner))}" for key, inner in value.items()]
    if isinstance(value, list):
        return [", ".join(_lines(inner)) for inner in value]
    return [printable(str(value))]


def printable(text: str) -> str:
    """Text of unknown origin, so that it can't move the cursor, break a row, or fail to be encoded."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def table(rows: Iterable[Any], columns: dict[str, Callable[[Any], str]], as_json: bool) -> None:
    """On a terminal ids and times are never folded, comments are cut, and columns without any value left out."""
    rows = list(rows)
    if as_json:
        click.echo(json.dumps([plain(row) for row in rows]))
        return
    cells = {name: [printable(cell(row)) for row in rows] for name, cell in columns.items()}
    if not sys.stdout.isatty():
        for line in zip(*cells.values(), strict=True):
            click.echo("\t".join(line))
        return
    cells = {name: column for name, column in cells.items() if any(column) or not rows}
    drawn = Table(box=None, pad_edge=False, expand=not _CUT.isdisjoint(cells))
    for name in cells:
        if name in _CUT:
            drawn.add_column(name, no_wrap=True, overflow="ellipsis", ratio=1)
        else:
            drawn.add_column(name, no_wrap=name in _WHOLE, overflow="fold")
    for line in zip(*cells.values(), strict=True):
        drawn.add_row(*map(Text, line))
    screen.print(drawn)


def count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def size(count: int) -> str:
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def when(moment: float | str) -> str:
    """From seconds or ISO 8601."""
    found = datetime.fromisoformat(moment) if isinstance(moment, str) else datetime.fromtimestamp(moment, UTC)
    return found.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def comment_option(function: Callable[..., R]) -> Callable[..., R]:
    """The last word of a command, or `--comment`."""

    @click.argument("last_word", metavar="[COMMENT]", required=False)
    @click.option("--comment", help="The comment, as an option.")
    @wraps(function)
    def inner(*args: Any, last_word: str | None, comment: str | None, **kwargs: Any) -> R:
        if last_word is not None and comment is not None:
            raise click.UsageError("give the comment once")
        return function(*args, comment=comment if last_word is None else last_word, **kwargs)

    return inner
