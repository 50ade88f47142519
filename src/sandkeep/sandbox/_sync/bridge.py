"""What differs between async and sync by nature. Written by hand on both sides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from sandkeep.errors import system

T = TypeVar("T")


def blocking(function: Callable[..., T], *args: Any, **options: Any) -> T:
    """Call it; what the system refuses it is one of our errors."""
    with system():
        return function(*args, **options)


def begin_now(sandbox: Any) -> None:
    """A sync sandbox exists as soon as its constructor returns."""
    sandbox._begin()


class EnvItems:
    """`env` as a mapping."""

    def __getitem__(self, name: str) -> str:
        value: str | None = self.get(name)  # type: ignore[attr-defined]
        if value is None:
            raise KeyError(name)
        return value

    def __setitem__(self, name: str, value: str) -> None:
        self.set(name, value)  # type: ignore[attr-defined]

    def __delitem__(self, name: str) -> None:
        self[name]
        self.unset(name)  # type: ignore[attr-defined]

    def __contains__(self, name: object) -> bool:
        return name in self.all()  # type: ignore[attr-defined]

    def keys(self) -> list[str]:
        return list(self.all())  # type: ignore[attr-defined]

    def items(self) -> list[tuple[str, str]]:
        return list(self.all().items())  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[str]:
        return iter(self.all())  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return len(self.all())  # type: ignore[attr-defined]
