"""`Store("sandkeep://")`: the conformance suite of object storage over a server, checkpoints in it, checks and quotas."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sandkeep.checkpoints.catalog import Store
from sandkeep.errors import BadArgument, StoreDenied, StoreFull, StoreUnreachable
from sandkeep.sandbox import Sandbox
from sandkeep.store.objects import Objects, open_objects
from serving import Served, served, serving, told  # noqa: F401
from test_store_objects import (  # noqa: F401
    test_absent,
    test_an_object_that_ends_too_early_is_never_taken_as_whole,
    test_large_object_comes_back_whole,
    test_list_is_sorted_and_goes_on_after_a_name,
    test_put_get_and_ranges,
)


@pytest.fixture
def key(served: Served, monkeypatch: pytest.MonkeyPatch) -> str:  # noqa: F811
    made = served.key()
    monkeypatch.setenv("SANDKEEP_API_URL", served.url)
    monkeypatch.setenv("SANDKEEP_API_KEY", made)
    return made


@pytest.fixture
def objects(key: str) -> Iterator[Objects]:
    return open_objects("sandkeep://")


def test_checkpoints_go_to_the_server_and_come_back_on_another_machine(key: str, tmp_path: Path) -> None:
    with Sandbox(runtime="runc", home=tmp_path / "a", store="sandkeep://") as sandbox:
        sandbox.commands.run("echo carried > f; export WORD=kept")
        first = sandbox.checkpoint("one")
        sandbox.commands.run("echo more >> f")
        second = sandbox.checkpoint("two")
    with Store("sandkeep://", home=tmp_path / "b") as store:
        assert [one.id for one in store.checkpoints()] == [second.id, first.id]
    with Sandbox(runtime="runc", home=tmp_path / "b", store="sandkeep://", from_checkpoint=second.id) as back:
        assert back.commands.run("cat f; echo $WORD").stdout == "carried\nmore\nkept\n"


def test_what_arrives_damaged_is_not_kept(key: str, served: Served) -> None:  # noqa: F811
    api = served.api(key)
    told(api.put("/storage/a", content=b"data", headers={"Content-SHA256": "0" * 64}), 422, "CORRUPT")
    told(api.put("/storage/a", content=b"data"), 400, "BAD_ARGUMENT")
    told(api.get("/storage/a"), 404, "NOT_FOUND")


def test_a_full_space_refuses_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path / "home", "--storage-quota", "1000") as server:
        monkeypatch.setenv("SANDKEEP_API_URL", server.url)
        monkeypatch.setenv("SANDKEEP_API_KEY", server.key())
        objects = open_objects("sandkeep://")
        objects.put("a", b"x" * 600)
        with pytest.raises(StoreFull):
            objects.put("b", b"x" * 600)
        objects.put("a", b"y" * 900)
        objects.delete(["a"])
        objects.put("b", b"x" * 1000)
        assert [name for name, _, _ in objects.list("")] == ["b"]


def test_a_wrong_key_and_no_server_are_said(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setenv("SANDKEEP_API_URL", served.url)
    monkeypatch.delenv("SANDKEEP_API_KEY", raising=False)
    with pytest.raises(BadArgument):
        open_objects("sandkeep://")
    monkeypatch.setenv("SANDKEEP_API_KEY", "sk_wrong")
    with pytest.raises(StoreDenied):
        open_objects("sandkeep://").put("a", b"")
    with pytest.raises(BadArgument):
        open_objects("sandkeep://somebody-else")
    monkeypatch.setenv("SANDKEEP_API_URL", "http://127.0.0.1:1")
    monkeypatch.setattr("sandkeep.store.gateway._TRIES", 2)
    with pytest.raises(StoreUnreachable):
        open_objects("sandkeep://").get("a")
