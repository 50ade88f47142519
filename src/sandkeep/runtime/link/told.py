"""JSON that a guest wrote: bounded in depth, in its numbers and in what decoding it holds up. Pure.

Short texts are decoded at once. Longer ones a window at a time, so that no single step of it takes long: then other threads get
their turn, where the json module alone would hold them up for a second.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from sandkeep.errors import GuestLied

SHORT = 64 << 10
MOST_DEPTH = 64
MOST_DIGITS = 19
MOST_VALUES = 2_000_000
_SPACE = re.compile(r"[ \t\n\r]*")
_AFTER = ("", " ", "\t", "\n", "\r", ",", ":", "]", "}")
_WHOLE = re.compile(r'(?:[^"\\]++|\\[^u]|\\u[0-9a-fA-F]{4})*+', re.DOTALL)
_HIGH = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")


class Told(dict[str, Any]):
    """An answer's fields. One that should be there and is not is the guest's lie, not our mistake."""

    def __missing__(self, name: str) -> NoReturn:
        raise GuestLied(f"the guest's answer has no {name}", "kill this sandbox")


def decode(text: bytes) -> Told:
    if text.count(b",") > MOST_VALUES:
        raise GuestLied(f"the guest's answer has more than {MOST_VALUES} values", "ask for less")
    try:
        said = text.decode("utf-8")
        value = _decoder.decode(said) if len(said) <= SHORT else _Walk(said).all()
    except (ValueError, RecursionError, IndexError):
        raise GuestLied("the guest sent something that is not JSON", "kill this sandbox") from None
    if not isinstance(value, dict):
        raise GuestLied("the guest's answer is not an object", "kill this sandbox")
    _shallow(value)
    return Told(value)


def _integer(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError
    return int(text)


def _number(text: str) -> float:
    found = float(text)
    if not math.isfinite(found):
        raise ValueError
    return found


def _no_number(_: str) -> NoReturn:
    raise ValueError


_decoder = json.JSONDecoder(parse_int=_integer, parse_float=_number, parse_constant=_no_number)


def _shallow(value: Any) -> None:
    level: list[Any] = [value]
    for _ in range(MOST_DEPTH):
        level = [
            one
            for many in level
            for one in (many.values() if type(many) is dict else many)
            if type(one) in (dict, list)
        ]
        if not level:
            return
    raise GuestLied(f"the guest's answer is nested more than {MOST_DEPTH} deep", "kill this sandbox")


class _Walk:
    """Values that fit a window are the decoder's; longer ones are walked here, in steps."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._move(0)

    def all(self) -> Any:
        value, at = self._value(self._space(0), 0)
        if self._space(at) != len(self._text):
            raise ValueError
        return value

    def _move(self, at: int) -> None:
        self._start, self._window = at, self._text[at : at + SHORT]
        self._ends = at + SHORT >= len(self._text)

    def _space(self, at: int) -> int:
        while (found := _SPACE.match(self._text, at, at + SHORT)) is not None and found.end() > at:
            at = found.end()
        return at

    def _value(self, at: int, depth: int) -> tuple[Any, int]:
        fits = self._fitting(at)
        if fits is not None:
            return fits
        first = self._text[at]
        if depth == MOST_DEPTH:
            raise ValueError
        if first == "[":
            return self._list(at + 1, depth + 1)
        if first == "{":
            return self._dict(at + 1, depth + 1)
        if first == '"':
            return self._string(at + 1)
        raise ValueError

    def _fitting(self, at: int) -> tuple[Any, int] | None:
        if not self._start <= at < self._start + len(self._window):
            self._move(at)
        while True:
            try:
                value, end = _decoder.raw_decode(self._window, at - self._start)
            except ValueError:
                pass
            else:  # a number may have been cut by the window's end, behind its point too
                if self._window[end : end + 1] in _AFTER and (end < len(self._window) or self._ends):
                    return value, self._start + end
            if self._start == at:
                return None
            self._move(at)

    def _list(self, at: int, depth: int) -> tuple[list[Any], int]:
        found: list[Any] = []
        at = self._space(at)
        if self._text[at] == "]":
            return found, at + 1
        tried = at - SHORT
        while True:
            if at - tried >= SHORT // 2:
                many, at = self._batch(at)
                found += many
                tried = at - SHORT if many else at
                if many:
                    continue
            value, at = self._value(self._space(at), depth)
            found.append(value)
            at = self._space(at) + 1
            if self._text[at - 1] == "]":
                return found, at
            if self._text[at - 1] != ",":
                raise ValueError

    def _batch(self, at: int) -> tuple[list[Any], int]:
        """As many items as a window holds, at once, if they are alike enough for that: and where the next one begins."""
        self._move(at)
        cut = self._window.rfind("},") + 1 or self._window.rfind(",")
        if self._ends or cut < 1:
            return [], at
        try:
            many: list[Any] = _decoder.decode(f"[{self._window[:cut]}]")
        except ValueError:
            return [], at
        return many, at + cut + 1 if many else at

    def _dict(self, at: int, depth: int) -> tuple[dict[str, Any], int]:
        found: dict[str, Any] = {}
        at = self._space(at)
        if self._text[at] == "}":
            return found, at + 1
        while True:
            name, at = self._value(self._space(at), depth)
            at = self._space(at) + 1
            if not isinstance(name, str) or self._text[at - 1] != ":":
                raise ValueError
            found[name], at = self._value(self._space(at), depth)
            at = self._space(at) + 1
            if self._text[at - 1] == "}":
                return found, at
            if self._text[at - 1] != ",":
                raise ValueError

    def _string(self, at: int) -> tuple[str, int]:
        pieces = []
        while self._text[at] != '"':
            found = _WHOLE.match(self._text, at, at + SHORT)
            end = at if found is None else found.end()
            if _HIGH.fullmatch(self._text, end - 6, end) and end - 6 > at:
                end -= 6  # the half of a character: with its other half, then
            if end == at:
                raise ValueError
            pieces.append(_decoder.decode(f'"{self._text[at:end]}"'))
            at = end
        return "".join(pieces), at + 1
