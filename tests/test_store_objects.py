"""Conformance of object storage: a folder and a real S3 server keep the same contract; their errors are typed."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from sandkeep.errors import BadArgument, Corrupt, NotFound, StoreDenied, StoreFull, StoreMissing, StoreUnreachable
from sandkeep.store.objects import Objects, open_objects
from swift import Swift, swift  # noqa: F401


@pytest.fixture(params=["folder", "s3"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    if request.param == "folder":
        return open_objects(tmp_path / "store")
    server: Swift = request.getfixturevalue("swift")
    return open_objects(f"s3://{server.bucket()}/some/prefix", **server.options())


@pytest.fixture(autouse=True)
def _no_aws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_put_get_and_ranges(objects: Objects) -> None:
    data = os.urandom(300_000)
    objects.put("a/b", data)
    assert objects.get("a/b") == data
    assert objects.get("a/b", 100) == data[100:]
    assert objects.get("a/b", 100, 50) == data[100:150]
    assert objects.get("a/b", 0, 0) == b""
    assert objects.get("a/b", len(data) - 1, 1) == data[-1:]
    assert objects.size("a/b") == len(data)
    objects.put("a/b", memoryview(bytearray(b"other")))
    assert objects.get("a/b") == b"other"
    objects.put("empty", b"")
    assert objects.get("empty") == b""
    assert objects.size("empty") == 0


def test_large_object_comes_back_whole(objects: Objects) -> None:
    data = os.urandom(1 << 20) * 17
    objects.put("packs/large", bytearray(data))
    assert objects.get("packs/large") == data
    assert objects.get("packs/large", 5 << 20, 3 << 20) == data[5 << 20 : 8 << 20]


def test_an_object_that_ends_too_early_is_never_taken_as_whole(objects: Objects) -> None:
    objects.put("a", b"0123456789")
    for offset, length in ((5, 10), (0, 11), (10, 1), (20, 5)):
        with pytest.raises(Corrupt):
            objects.get("a", offset, length)


def test_absent(objects: Objects) -> None:
    objects.put("there", b"x")
    with pytest.raises(NotFound):
        objects.get("not/there")
    with pytest.raises(NotFound):
        objects.get("not-there", 0, 0)
    assert objects.size("not/there") is None
    assert list(objects.list("not/")) == []
    objects.delete(["not/there", "nor/this"])


def test_list_is_sorted_and_goes_on_after_a_name(objects: Objects) -> None:
    names = sorted(["x/b", "x/a", "x/a.b", "x/a-b", "x/sub/c", "x/sub/d", "xy/z", "w", "x/zz"])
    for name in reversed(names):
        objects.put(name, name.encode())
    assert [name for name, _, _ in objects.list("")] == names
    inside = [name for name in names if name.startswith("x/")]
    assert [(name, size) for name, size, _ in objects.list("x/")] == [(name, len(name)) for name in inside]
    for after in (*inside, "x/", "x/az", "x/sub/"):
        assert [name for name, _, _ in objects.list("x/", after=after)] == [name for name in inside if name > after], (
            after
        )


def test_newest_is_the_list_from_its_end(objects: Objects) -> None:
    for name in ("x/b", "x/a", "x/a.b", "x/a-b", "x/sub/c", "x/sub/d/e", "x/zz", "y"):
        objects.put(name, b"")
    found = objects.newest("x/")
    if found is not None:
        assert list(found) == [name for name, _, _ in objects.list("x/")][::-1]
        assert list(objects.newest("none/") or ()) == []


def test_delete_many(objects: Objects) -> None:
    names = [f"d/{n:03}" for n in range(60)]
    for name in names:
        objects.put(name, b"x")
    objects.delete(iter([*names[:50], "d/none"]))
    assert [name for name, _, _ in objects.list("d/")] == names[50:]


def test_times_come_from_one_clock(objects: Objects) -> None:
    objects.put("t/1", b"")
    objects.put("t/2", b"")
    one, two = (time for _, _, time in objects.list("t/"))
    assert one <= two
    assert two - one < 600


@pytest.mark.parametrize("name", ["", "/a", "a/", "../a", "a/../b", "a//b", ".hidden", "a\0b", "ä", "a b", "x" * 1000])
def test_bad_names_are_refused(objects: Objects, name: str) -> None:
    with pytest.raises(BadArgument):
        objects.put(name, b"x")
    with pytest.raises(BadArgument):
        objects.get(name)
    with pytest.raises(BadArgument):
        objects.delete([name])


def test_writers_at_once_leave_one_whole_object(objects: Objects) -> None:
    contents = [bytes([n]) * 50_000 for n in range(8)]
    threads = [threading.Thread(target=objects.put, args=("same", content)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert objects.get("same") in contents


# the folder


def test_folders_that_become_empty_go_and_no_put_suffers(tmp_path: Path) -> None:
    objects = open_objects(tmp_path / "s")
    objects.put("a/stays", b"")

    def work(number: int) -> None:
        for _ in range(100):
            objects.put(f"a/b/c/{number}", b"x")
            assert objects.get(f"a/b/c/{number}") == b"x"
            objects.delete([f"a/b/c/{number}"])

    with ThreadPoolExecutor(4) as pool:
        for job in [pool.submit(work, number) for number in range(4)]:
            job.result()
    assert os.listdir(tmp_path / "s/a") == ["stays"]


def test_folder_syncs_file_then_renames_then_syncs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = open_objects(tmp_path / "s")
    objects.put("a/first", b"")
    steps: list[str] = []
    fsync, rename = os.fsync, os.rename

    def note_sync(handle: int) -> None:
        steps.append("sync " + os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def note_rename(old: Path, new: Path) -> None:
        steps.append("rename")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "rename", note_rename)
    objects.put("a/b", b"x")
    assert len(steps) == 3
    assert steps[1:] == ["rename", "sync a"]


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, StoreFull), (errno.EDQUOT, StoreFull), (errno.EACCES, StoreDenied), (errno.EROFS, StoreDenied)],
)
def test_folder_errors_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    objects = open_objects(tmp_path / "s")
    objects.put("a", b"old")

    def refuse(handle: int, data: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(kind) as caught:
        objects.put("a", b"new")
    monkeypatch.undo()
    assert getattr(caught.value, "remedy")  # noqa: B009
    assert [name for name, _, _ in objects.list("")] == ["a"]
    assert objects.get("a") == b"old"


def test_reading_makes_no_folder(tmp_path: Path) -> None:
    objects = open_objects(tmp_path / "s")
    assert list(objects.list("")) == []
    assert objects.size("a") is None
    objects.delete(["a"])
    assert not (tmp_path / "s").exists()


# the URL and the keys


def test_urls(tmp_path: Path) -> None:
    open_objects(f"file://{tmp_path}/f").put("a", b"x")
    assert open_objects(str(tmp_path / "f")).get("a") == b"x"
    for url in ("", "file://elsewhere/x", "ftp://a/b", "s3:///x", "s3://key:secret@b/x", "s3://b/x?y=1", "s3://b/../x"):
        with pytest.raises(BadArgument):
            open_objects(url, **({"access_key": "k", "secret_key": "s"} if url.startswith("s3") else {}))
    with pytest.raises(BadArgument):
        open_objects(tmp_path, region="us-east-1")
    with pytest.raises(BadArgument):
        open_objects("s3://b/p", access_key="only")
    with pytest.raises(BadArgument):
        open_objects("s3://b/p", access_key="k", secret_key="s", endpoint="http://192.0.2.1")


@pytest.mark.parametrize("url", ["s3://b/p", "gs://b/p", "az://b/p"])
def test_without_keys_nothing_is_contacted(url: str) -> None:
    with pytest.raises(StoreDenied) as caught:
        open_objects(url)
    assert caught.value.remedy


def test_keys_from_variables_and_files(swift: Swift, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    bucket = swift.bucket()
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text(
        "[default]\naws_access_key_id = no\naws_secret_access_key = no\n[good]\naws_access_key_id = test:tester\naws_secret_access_key = testing\n"
    )
    (tmp_path / ".aws/config").write_text(f"[profile good]\nregion = us-east-1\nendpoint_url = {swift.endpoint}\n")
    monkeypatch.setenv("AWS_PROFILE", "good")
    open_objects(f"s3://{bucket}/x").put("a", b"1")
    monkeypatch.setenv("AWS_PROFILE", "none")
    with pytest.raises(BadArgument):
        open_objects(f"s3://{bucket}/x")
    monkeypatch.delenv("AWS_PROFILE")
    with pytest.raises(StoreDenied):
        open_objects(f"s3://{bucket}/x", endpoint=swift.endpoint).get("a")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test:tester")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_ENDPOINT_URL", swift.endpoint)
    assert open_objects(f"s3://{bucket}/x").get("a") == b"1"


def test_bucket_errors(swift: Swift) -> None:  # noqa: F811
    bucket = swift.bucket()
    for wrong in (
        {"secret_key": "wrong"},
        {"access_key": "nobody"},
        {"access_key": "test:reader", "secret_key": "reading"},
    ):
        objects = open_objects(f"s3://{bucket}", **swift.options(**wrong))
        for call in (
            partial(objects.put, "a", b"x"),
            partial(objects.get, "a"),
            lambda all=objects.list: list(all("")),
            partial(objects.size, "a"),
        ):
            with pytest.raises(StoreDenied) as denied:
                call()
            assert denied.value.remedy
            assert "testing" not in str(denied.value)
            assert "AWS4-HMAC" not in str(denied.value)
    missing = open_objects("s3://no-such-bucket/p", **swift.options())
    for action in (lambda: missing.put("a", b"x"), lambda: missing.get("a"), lambda: list(missing.list("a/"))):
        with pytest.raises(StoreMissing):
            action()


def test_unreachable() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        objects = open_objects("s3://b/p", endpoint=endpoint, access_key="k", secret_key="s", retry=0.5)
        with pytest.raises(StoreUnreachable):
            objects.put("a", b"x")


@pytest.fixture
def answering() -> Iterator[tuple[str, list[bytes]]]:
    """A server that sends the next of these answers on each connection and closes it, and a silent one when they run out."""
    answers: list[bytes] = []
    server = socket.create_server(("127.0.0.1", 0))
    held: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                link, _ = server.accept()
            except OSError:
                return
            if answers:
                link.recv(65536)
                link.sendall(answers.pop(0))
                link.close()
            else:
                held.append(link)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.getsockname()[1]}", answers
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join(60)
    for link in held:
        link.close()


def _error(status: str, code: str) -> bytes:
    body = f"<Error><Code>{code}</Code><Message>said so</Message></Error>".encode()
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        ("403 Forbidden", "RequestTimeTooSkewed", StoreDenied),
        ("507 Insufficient Storage", "InsufficientStorage", StoreFull),
        ("403 Forbidden", "QuotaExceeded", StoreFull),
        ("503 Slow Down", "SlowDown", StoreUnreachable),
    ],
)
def test_what_a_server_says_becomes_a_typed_error(
    answering: tuple[str, list[bytes]], status: str, code: str, kind: type[Exception]
) -> None:
    endpoint, answers = answering
    answers += [_error(status, code)] * 40
    objects = open_objects("s3://b/p", endpoint=endpoint, access_key="k", secret_key="s", retry=0.3, timeout=20)
    with pytest.raises(kind) as caught:
        objects.put("a", b"x")
    assert code in str(caught.value)


def test_a_server_that_fails_for_a_while_is_asked_again(answering: tuple[str, list[bytes]]) -> None:
    endpoint, answers = answering
    answers += [_error("503 Slow Down", "SlowDown")] * 2
    answers += [
        b'HTTP/1.1 200 OK\r\nContent-Length: 5\r\nLast-Modified: Mon, 02 Nov 2026 10:00:00 GMT\r\nETag: "x"\r\nConnection: close\r\n\r\nhello'
    ]
    assert open_objects("s3://b/p", endpoint=endpoint, access_key="k", secret_key="s", timeout=30).get("a") == b"hello"


def test_a_connection_that_drops_or_hangs_is_an_error(answering: tuple[str, list[bytes]]) -> None:
    endpoint, answers = answering
    head = (
        b'HTTP/1.1 200 OK\r\nContent-Length: 500\r\nLast-Modified: Mon, 02 Nov 2026 10:00:00 GMT\r\nETag: "x"\r\n\r\n'
    )
    answers += [head + b"only this"]
    objects = open_objects("s3://b/p", endpoint=endpoint, access_key="k", secret_key="s", retry=0, timeout=1)
    with pytest.raises(StoreUnreachable):
        objects.get("a", 0, 500)
    with pytest.raises(StoreUnreachable):
        objects.get("a", 0, 500)
