"""Path patterns: `*` and `?` within a name, `**` across folders, `[…]` sets; a pattern without a slash is for names anywhere."""

from __future__ import annotations

import re

from sandkeep.errors import BadArgument


class Glob:
    def __init__(self, pattern: str) -> None:
        if not pattern or "\0" in pattern:
            raise BadArgument("a pattern must not be empty", "write '*.py' or '/home/user/**/notes.md'")
        anchored = "/" in pattern.rstrip("/")
        parts = [part for part in pattern.split("/") if part]
        self._regex = re.compile(("" if anchored else "(?:.*/)?") + _translate(parts), re.DOTALL)
        fixed = []
        for part in parts[:-1] if anchored else []:
            if any(c in part for c in "*?["):
                break
            fixed.append(part)
        self.start = "/".join(fixed)  # every match is below this folder

    def matches(self, path: str) -> bool:
        return self._regex.fullmatch(path) is not None


def _translate(parts: list[str]) -> str:
    out = ""
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        if part == "**":
            out += ".*" if last else "(?:.*/)?"
        else:
            out += _name(part) + ("" if last else "/")
    return out


def _name(part: str) -> str:
    out, at = "", 0
    while at < len(part):
        c = part[at]
        end = part.find("]", at + 2) if c == "[" else -1
        if c == "*":
            out += "[^/]*"
        elif c == "?":
            out += "[^/]"
        elif end > 0:
            inner = part[at + 1 : end].replace("\\", "\\\\")
            out += "[" + ("^/" + inner[1:] if inner[0] in "!^" else inner) + "]"
            at = end
        else:
            out += re.escape(c)
        at += 1
    return out
