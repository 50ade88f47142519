"""Checks for the fields of a request. Each check takes a name and a JSON value and gives the value or a Problem."""

from __future__ import annotations

import os

from .problems import BAD_ARGUMENT, Problem

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, Tuple, Union

    Check = Callable[[str, Any], Any]
    Schema = Dict[str, Tuple[Check, Any]]

REQUIRED = object()


def take(schema: Schema, request: Dict[str, Any]) -> Dict[str, Any]:
    """The request's fields as keyword arguments: every one known, checked, or its default."""
    for name in request:
        if name != "op" and name not in schema:
            raise Problem(BAD_ARGUMENT, "unknown field {!r}".format(name))
    taken = {}
    for name, (check, default) in schema.items():
        value = request.get(name)
        if value is not None:
            taken[name] = check(name, value)
        elif default is REQUIRED:
            raise Problem(BAD_ARGUMENT, "field {!r} is missing".format(name))
        else:
            taken[name] = default
    return taken


def text(name: str, value: Any) -> str:
    """Any bytes but NUL, as a string with surrogate escapes."""
    if not isinstance(value, str):
        raise Problem(BAD_ARGUMENT, "{} must be a text".format(name))
    if "\0" in value:
        raise Problem(BAD_ARGUMENT, "{} must not contain NUL".format(name))
    try:
        os.fsencode(value)
    except UnicodeEncodeError:
        raise Problem(BAD_ARGUMENT, "{} holds surrogates that stand for no byte".format(name))
    return value


def path(name: str, value: Any) -> str:
    if not text(name, value):
        raise Problem(BAD_ARGUMENT, "{} must not be empty".format(name))
    return str(value)


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise Problem(BAD_ARGUMENT, "{} must be true or false".format(name))
    return value


def integer(low: int, high: int) -> Check:
    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise Problem(BAD_ARGUMENT, "{} must be a whole number from {} to {}".format(name, low, high))
        return value

    return check


def number(low: float, high: float) -> Check:
    def check(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise Problem(BAD_ARGUMENT, "{} must be a number from {} to {}".format(name, low, high))
        return float(value)

    return check


def choice(*allowed: str) -> Check:
    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in allowed:
            raise Problem(BAD_ARGUMENT, "{} must be one of {}".format(name, ", ".join(allowed)))
        return value

    return check


def argv(name: str, value: Any) -> List[str]:
    if not isinstance(value, list) or not value:
        raise Problem(BAD_ARGUMENT, "{} must be a list of texts, not empty".format(name))
    words = [text(name, word) for word in value]
    if not words[0]:
        raise Problem(BAD_ARGUMENT, "{} must begin with a program".format(name))
    return words


def names(name: str, value: Any) -> List[str]:
    if not isinstance(value, list):
        raise Problem(BAD_ARGUMENT, "{} must be a list of texts".format(name))
    return [text(name, word) for word in value]


def environment(name: str, value: Any) -> Dict[str, str]:
    if not isinstance(value, dict):
        raise Problem(BAD_ARGUMENT, "{} must be an object of texts".format(name))
    for key, content in value.items():
        if not text(name, key) or "=" in key:
            raise Problem(BAD_ARGUMENT, "{}: {!r} can't be a variable's name".format(name, key))
        text("{}[{}]".format(name, key), content)
    return value


def attributes(name: str, value: Any) -> Dict[str, str]:
    """Attributes of a file that any user may set: `user.…`, but not the overlay's own."""
    for key, content in mapping(name, value).items():
        if not text(name, key).startswith("user.") or key.startswith("user.overlay."):
            raise Problem(BAD_ARGUMENT, "{}: {!r} can't be an attribute's name".format(name, key))
        text("{}[{}]".format(name, key), content)
    return dict(value)


def mapping(name: str, value: Any) -> Dict[str, Any]:
    if not isinstance(value, dict):
        raise Problem(BAD_ARGUMENT, "{} must be an object".format(name))
    return value


def user(name: str, value: Any) -> Union[str, int]:
    """A user's name or uid."""
    if isinstance(value, int):
        return int(integer(0, 2**32 - 2)(name, value))
    return path(name, value)


def positions(name: str, value: Any) -> Dict[int, int]:
    """{"stdout": n, "stderr": n} as {1: n, 2: n}."""
    streams = {"stdout": 1, "stderr": 2}
    if not isinstance(value, dict) or any(key not in streams for key in value):
        raise Problem(BAD_ARGUMENT, "{} must be an object of stdout and stderr".format(name))
    return {streams[key]: integer(0, 2**62)(name, at) for key, at in value.items()}
