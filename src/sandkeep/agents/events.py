"""What an agent does, as one stream of typed events whatever its program prints. Owns the noun, masking and the file format.

A run's events are JSON lines in the sandbox itself, outside the workspace: part of the state, so of every checkpoint after it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from sandkeep.model import HOME

Kind = Literal["message", "thought", "tool_call", "tool_result", "plan", "error"]
KINDS: tuple[Kind, ...] = ("message", "thought", "tool_call", "tool_result", "plan", "error")
FOLDER = f"{HOME}/.sandkeep/events"
_LEAST_SECRET = 6  # shorter values occur everywhere by chance


@dataclass(frozen=True)
class Event:
    kind: Kind
    text: str = ""
    role: Literal["user", "assistant", "tool"] = "assistant"
    name: str = ""  # of the tool
    id: str = ""  # joins a tool_call and its tool_result
    data: Any = None  # a tool's input, a plan's steps
    time: float = field(default_factory=time.time)


Parser = Callable[[str], Iterable[Event]]


def path_of(run_id: str) -> str:
    return f"{FOLDER}/{run_id}.jsonl"


def pack(events: Iterable[Event]) -> bytes:
    return b"".join(json.dumps(asdict(event), ensure_ascii=False).encode(errors="replace") + b"\n" for event in events)


def unpack(data: bytes) -> list[Event]:
    """Events from a file that anybody inside may have written: what is not one of ours is passed over."""
    found = []
    for line in data.splitlines():
        try:
            row = json.loads(line)
            event = Event(**row)
        except (ValueError, TypeError):
            continue
        if event.kind in KINDS and isinstance(event.text, str):
            found.append(event)
    return found


class Masker:
    """Takes the values of secrets out of what is kept."""

    def __init__(self, secrets: Mapping[str, str]) -> None:
        self._pairs = [(value, f"[{name}]") for name, value in secrets.items() if len(value) >= _LEAST_SECRET]

    def text(self, text: str) -> str:
        for value, shown in self._pairs:
            text = text.replace(value, shown)
        return text

    def value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(str(key)): self.value(inner) for key, inner in value.items()}
        return [self.value(inner) for inner in value] if isinstance(value, list) else value

    def event(self, event: Event) -> Event:
        return replace(event, text=self.text(event.text), data=self.value(event.data)) if self._pairs else event


class Stream:
    """Pieces of an agent's output in, events out: to whoever listens at once, and gathered."""

    def __init__(self, parser: Parser, masker: Masker, tell: Callable[[str, Any], None]) -> None:
        self._parser, self._masker, self._tell = parser, masker, tell
        self._rest = ""
        self.events: list[Event] = []

    def add(self, event: Event) -> None:
        masked = self._masker.event(event)
        self.events.append(masked)
        self._tell("content", masked)

    def stdout(self, text: str) -> None:
        self._tell("stdout", text)
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._line(line)

    def stderr(self, text: str) -> None:
        self._tell("stderr", text)

    def end(self) -> None:
        self._line(self._rest)
        self._rest = ""

    def _line(self, line: str) -> None:
        if line.strip():
            for event in self._parser(line):
                self.add(event)
