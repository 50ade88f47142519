"""The JSON variables of the program that drives a sandbox: checked, copied, turned into text and back. No I/O here.

What goes in comes out equal, with the same types, or is refused with the place of the culprit named: tuples, bytes, sets,
enums, keys that are no strings, NaN and Infinity, cycles. Values are copied on the way in and on the way out, so
nobody can slip something past the check later.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from sandkeep.errors import BadArgument, Corrupt

MAX_DEPTH = 100
MAX_INTEGER_BITS = 8192  # Python refuses to read back integers past 4300 digits


def plain(value: Any, where: str) -> Any:
    """A deep copy of `value`, or BadArgument if JSON would lose or change any part of it."""
    return _copy(value, where, [])


def _copy(value: Any, where: str, above: list[int]) -> Any:
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        return _text(value, where)
    if kind is int:
        if value.bit_length() > MAX_INTEGER_BITS:
            raise _refused(where, "is too large an integer", "store it as text")
        return value
    if kind is float:
        if not math.isfinite(value):
            raise _refused(where, f"is {value}, which JSON can't hold", "use None or a text")
        return value
    if kind is not list and kind is not dict:
        remedy = "use a list" if isinstance(value, tuple) else "convert it to None, bool, int, float, str, list or dict"
        raise _refused(where, f"is of type {kind.__name__}, which JSON can't give back", remedy)
    if id(value) in above:
        raise _refused(where, "contains itself", "store a tree, not a cycle")
    if len(above) >= MAX_DEPTH:
        raise _refused(where, f"is nested deeper than {MAX_DEPTH} levels", "flatten it")
    above.append(id(value))
    try:
        if kind is list:
            return [_copy(item, f"{where}[{index}]", above) for index, item in enumerate(list(value))]
        return {_key(key, where): _copy(item, f"{where}.{key}", above) for key, item in list(value.items())}
    finally:
        above.pop()


def _key(key: Any, where: str) -> str:
    if type(key) is not str:
        raise _refused(
            where, f"has the key {key!r} of type {type(key).__name__}", "JSON keys are strings: use str(key)"
        )
    return _text(key, where)


def _text(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _refused(where, "holds a lone surrogate, which is no valid text", "decode bytes with errors='replace'")
    return text


def _refused(where: str, what: str, remedy: str) -> BadArgument:
    shown = where.encode(errors="backslashreplace").decode()
    return BadArgument(f"workflow state {shown!r} {what}; nothing was changed", remedy, key=shown)


class WorkflowState:
    """Variables by name. Not safe for threads by itself: its owners lock."""

    def __init__(self, variables: Mapping[str, Any] | None = None) -> None:
        self._variables: dict[str, Any] = {}
        self.update(variables or {})

    def set(self, key: str, value: Any) -> None:
        self.update({key: value})

    def get(self, key: str, default: Any = None) -> Any:
        return plain(self._variables[key], key) if _name(key) in self._variables else default

    def update(self, mapping: Mapping[str, Any]) -> None:
        """All of them, or none."""
        if not isinstance(mapping, Mapping):
            raise BadArgument(f"workflow state is updated with a mapping, not {type(mapping).__name__}")
        self._variables.update({_name(key): plain(value, key) for key, value in mapping.items()})

    def delete(self, key: str) -> bool:
        """True if there was one."""
        return self._variables.pop(_name(key), _ABSENT) is not _ABSENT

    def variables(self) -> dict[str, Any]:
        return {key: plain(value, key) for key, value in self._variables.items()}

    def live(self) -> Mapping[str, Any]:
        """The variables themselves, to be written out at once and not kept."""
        return self._variables

    def to_json(self) -> str:
        return canonical(self._variables)

    @classmethod
    def from_json(cls, text: str | bytes) -> WorkflowState:
        return cls(parse(text))


_ABSENT = object()


def _name(key: Any) -> str:
    if type(key) is not str:
        raise _refused(repr(key), f"has a name of type {type(key).__name__}", "name variables with strings")
    return _text(key, key)


def canonical(value: Any) -> str:
    """One text for one value: what checksums are made of."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"))


def parse(text: str | bytes) -> dict[str, Any]:
    """The JSON object in `text`; Corrupt if there is anything else."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"workflow state is not valid JSON: {error}", "load an older checkpoint")
    if not isinstance(value, dict):
        raise Corrupt(f"workflow state is a JSON {type(value).__name__}, not an object", "load an older checkpoint")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
