"""Recursion as deep as folders are: a function yields its calls of others, and is sent what they answer."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar

T = TypeVar("T")

Deep = Generator[Generator[Any, Any, Any], Any, T]


def deep(call: Deep[T]) -> T:
    calls: list[Generator[Any, Any, Any]] = [call]
    answer: Any = None
    while calls:
        try:
            calls.append(calls[-1].send(answer))
            answer = None
        except StopIteration as end:
            calls.pop()
            answer = end.value
    result: T = answer
    return result
