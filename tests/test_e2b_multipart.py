"""Multipart bodies, cut into pieces anywhere."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandkeep.errors import BadArgument
from sandkeep.server.e2b.multipart import Parts, boundary_of

CONTENT = st.binary(max_size=60) | st.sampled_from(
    [b"", b"\r\n", b"\r\n--", b"\r\n--edg", b"--edge", b"\r\n\r\n--edge"]
)


async def pieces(data: bytes, cuts: list[int]) -> AsyncIterator[bytes]:
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for begin, end in itertools.pairwise(places):
        yield data[begin:end]


def read(data: bytes, cuts: list[int], boundary: bytes = b"edge") -> list[tuple[str | None, bytes]]:
    async def all_() -> list[tuple[str | None, bytes]]:
        parts = Parts(boundary, pieces(data, cuts))
        return [(name, b"".join([piece async for piece in parts.body()])) async for name in parts.names()]

    return asyncio.run(all_())


def body(parts: list[tuple[str | None, bytes]]) -> bytes:
    text = b""
    for name, content in parts:
        file = "" if name is None else f'; filename="{name}"'
        text += (
            b"--edge\r\n" + f'Content-Disposition: form-data; name="file"{file}\r\n\r\n'.encode() + content + b"\r\n"
        )
    return text + b"--edge--\r\n"


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.none() | st.sampled_from(["a", "d/e.txt", "ü ö"]), CONTENT), max_size=4),
    st.lists(st.integers(0, 2000), max_size=12),
)
def test_parts_come_back(parts: list[tuple[str | None, bytes]], cuts: list[int]) -> None:
    parts = [(name, content.replace(b"\r\n--edge", b"")) for name, content in parts]
    assert read(body(parts), cuts) == parts


def test_what_is_not_read_is_passed_over() -> None:
    async def names() -> list[str | None]:
        parts = Parts(b"edge", pieces(body([("a", b"x" * 1000), ("b", b"y")]), [10, 500]))
        return [name async for name in parts.names()]

    assert asyncio.run(names()) == ["a", "b"]


@pytest.mark.parametrize("cut", [0, 3, 20, 60])
def test_a_body_that_breaks_off_is_refused(cut: int) -> None:
    with pytest.raises(BadArgument):
        read(body([("a", b"content")])[:cut], [])


def test_an_endless_head_is_refused() -> None:
    with pytest.raises(BadArgument):
        read(b"--edge\r\n" + b"x" * 40_000, [100, 20_000])


@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data", "multipart/mixed; boundary=x"])
def test_other_kinds_are_refused(kind: str) -> None:
    with pytest.raises(BadArgument):
        boundary_of(kind)
