"""Files, watches and tunnels through a real guest; and requests that no honest client would send."""

from __future__ import annotations

import errno
import json
import os
import random
import socket
import struct
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from guest_box import Box, guest
from sandkeep.errors import BadArgument, FileError, FileMissing, SandkeepError
from sandkeep.runtime.link.door import listening
from waiting import PATIENCE, until

ODD = ["plain", "with space", "new\nline", "quote'\"", "é", os.fsdecode(b"\xff\xfe-bytes"), "-rf", "a" * 255]


def test_files_of_any_name_come_and_go_whole(box: Box, tmp_path: Path) -> None:
    folder = tmp_path / "odd"
    for name in ODD:
        path = str(folder / name)
        data = os.urandom(70_000)
        assert box.write(path, data[:100], data[100:])["entry"]["size"] == len(data)
        assert box.read(path) == data == Path(path).read_bytes()
        assert box.read(path, offset=10, length=20) == data[10:30]
        entry = box.link.call("file_stat", path=path)["entry"]
        assert (entry["name"], entry["kind"], entry["mode"]) == (name, "file", 0o644)
    assert sorted(one["name"] for one in box.link.call("file_list", path=str(folder))["entries"]) == sorted(ODD)
    assert box.link.call("file_remove", path=str(folder), recursive=True)["removed"] == len(ODD) + 1
    assert not folder.exists()


def test_a_large_file_streams_both_ways(box: Box, tmp_path: Path) -> None:
    pieces = [os.urandom(1 << 20)] * 24
    box.write(str(tmp_path / "big"), *pieces)
    assert box.read(str(tmp_path / "big")) == b"".join(pieces)
    assert box.write(str(tmp_path / "empty"))["size"] == 0
    assert box.read(str(tmp_path / "empty")) == b""


def test_a_write_replaces_at_once_and_keeps_mode_owner_and_links(box: Box, tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"old")
    target.chmod(0o750)
    os.chown(target, 65534, 65534)
    link.symlink_to("target")
    inode = target.stat().st_ino
    box.write(str(link), b"new")
    assert link.is_symlink()
    found = target.stat()
    assert (target.read_bytes(), found.st_mode & 0o7777, found.st_uid) == (b"new", 0o750, 65534)
    assert found.st_ino != inode
    box.write(str(target), b"+", append=True)
    box.write(str(target), b"N", offset=0)
    assert target.read_bytes() == b"New+"
    box.write(str(target), b"x", mode=0o600)
    assert target.stat().st_mode & 0o7777 == 0o600


def test_a_write_that_is_cut_off_leaves_the_old_file(box: Box, tmp_path: Path) -> None:
    target = tmp_path / "folder" / "target"
    box.write(str(target), b"old")

    def pieces() -> Iterator[bytes]:
        yield b"half"
        raise KeyError("the client breaks")

    with pytest.raises(KeyError):
        write_from(box, str(target), pieces())
    until(lambda: os.listdir(target.parent) == ["target"], "nothing is left aside")
    assert target.read_bytes() == b"old"


def write_from(box: Box, path: str, pieces: Iterator[bytes]) -> None:
    with box.link.stream("file_write", {"path": path}, body=pieces, timeout=PATIENCE) as events:
        list(events)


def test_folders_moves_and_depth(box: Box, tmp_path: Path) -> None:
    call, at = box.link.call, str(tmp_path)
    assert call("file_mkdir", path=f"{at}/a/b", parents=True)["made"] is True
    assert call("file_mkdir", path=f"{at}/a/b", parents=True)["made"] is False
    with pytest.raises(FileError, match="exists"):
        call("file_mkdir", path=f"{at}/a/b")
    call("file_symlink", path=f"{at}/a/loop", target="..")
    box.write(f"{at}/a/b/c", b"c")
    call("file_move", path=f"{at}/a/b/c", to=f"{at}/a/d")
    names = [one["path"][len(at) :] for one in call("file_list", path=f"{at}/a", depth=9)["entries"]]
    assert sorted(names) == ["/a/b", "/a/d", "/a/loop"]
    assert call("file_stat", path=f"{at}/a/loop")["entry"]["target"] == ".."
    assert call("file_stat", path=f"{at}/a/loop", follow=True)["entry"]["kind"] == "dir"
    call("file_chmod", path=f"{at}/a/d", mode=0o640)
    call("file_chown", path=f"{at}/a/d", uid=1, gid=2)
    entry = call("file_stat", path=f"{at}/a/d")["entry"]
    assert (entry["mode"], entry["uid"], entry["gid"]) == (0o640, 1, 2)
    with pytest.raises(FileError, match="not empty"):
        call("file_remove", path=f"{at}/a")
    call("file_remove", path=f"{at}/a", recursive=True)
    assert tmp_path.exists()


def test_errors_carry_the_path_and_the_errno(box: Box, tmp_path: Path) -> None:
    missing = str(tmp_path / "none" / "x")
    for op in ("file_stat", "file_remove", "file_list"):
        with pytest.raises(FileMissing, match="none/x") as caught:
            box.link.call(op, path=missing)
        assert caught.value.details["errno"] == 2
    with pytest.raises(FileMissing):
        box.read(missing)
    with pytest.raises(FileMissing):
        box.write(missing, b"x" * 3_000_000, parents=False)
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path, Path("/dev/zero")):
        with pytest.raises(FileError):
            box.read(str(path))
        with pytest.raises(FileError):
            box.write(str(path), b"x")
    with pytest.raises(FileError, match="Permission denied"):
        box.link.call("file_list", path="/root", user=65534)
    assert box.text("echo on") == "on\n"


def test_who_may_only_pass_through_a_folder_does_not_see_what_is_in_it(box: Box) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        Path(folder, "hidden").write_text("x")
        os.chmod(folder, 0o711)
        assert box.link.call("file_stat", path=f"{folder}/hidden", user=65534)["entry"]["size"] == 1
        with pytest.raises(FileError, match="Permission denied") as caught:
            box.link.call("file_list", path=folder, user=65534)
        assert caught.value.details["errno"] == errno.EACCES
        os.chmod(folder, 0o755)
        assert [one["name"] for one in box.link.call("file_list", path=folder, user=65534)["entries"]] == ["hidden"]


def test_a_folder_of_many_files_is_one_answer(box: Box, tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(8000):
        (folder / f"file-with-a-rather-long-name-so-that-the-answer-needs-several-frames-{number}").touch()
    assert len(box.link.call("file_list", path=str(folder))["entries"]) == 8000


def test_changes_are_told_as_they_happen(box: Box, tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    with box.link.stream("file_watch", {"path": str(top), "recursive": True}, timeout=PATIENCE) as events:
        assert events.first_json() == {"watching": str(top)}
        (top / "deep").mkdir()
        expect(events, "created", top / "deep")
        (top / "deep" / "file").write_text("1")
        expect(events, "created", top / "deep" / "file")
        (top / "deep" / "file").write_text("22")
        expect(events, "modified", top / "deep" / "file")
        (top / "deep" / "file").chmod(0o600)
        assert expect(events, "modified", top / "deep" / "file", attributes=True)
        (top / "deep" / "file").rename(top / "other")
        expect(events, "moved", top / "other")
        (top / "other").unlink()
        expect(events, "removed", top / "other")


def expect(events: Any, kind: str, path: Path, attributes: bool = False) -> bool:
    while True:
        told = next(events)[1]
        if (told["event"], told["path"], told.get("attributes", False)) == (kind, str(path), attributes):
            return True


NO_ATTRIBUTES = """
import errno, os
from guest import labels
labels.PLACE = {place!r}
def refuse(*_, **__):
    raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
os.setxattr = os.getxattr = os.listxattr = refuse
"""


@pytest.fixture(params=["with", "without"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Box]:
    """A guest whose files can have attributes, or none."""
    (tmp_path / "run").mkdir()
    place = str(tmp_path / "state" / "attributes")
    before = NO_ATTRIBUTES.format(place=place) if request.param == "without" else ""
    with guest(tmp_path / "run", before) as box:
        yield box


def test_attributes_come_with_the_content(either: Box, tmp_path: Path) -> None:
    box, tmp_path = either, tmp_path / "files"
    tmp_path.mkdir()
    where, given = str(tmp_path / "f"), {"user.kind": "draft", "user.odd": "a=b ü"}
    (tmp_path / "run").mkdir()
    box.write(where, b"1", mode=0o400, xattrs=given)
    assert box.link.call("file_stat", path=where, xattrs=True)["entry"]["xattrs"] == given
    assert "xattrs" not in box.link.call("file_stat", path=where)["entry"]
    listed = box.link.call("file_list", path=str(tmp_path), xattrs=True)["entries"]
    assert {one["name"]: one["xattrs"] for one in listed} == {"f": given, "run": {}}
    box.write(where, b"2", xattrs={"user.other": "1"})
    assert box.link.call("file_stat", path=where, xattrs=True)["entry"]["xattrs"] == {"user.other": "1"}
    for bad in ({"trusted.x": "1"}, {"user.overlay.opaque": "y"}, {"user.x": 1}):
        with pytest.raises(BadArgument):
            box.write(where, b"3", xattrs=bad)
    with pytest.raises(BadArgument):
        box.write(where, b"3", xattrs={}, append=True)
    assert Path(where).read_bytes() == b"2"


def attributes(box: Box, path: Path) -> dict[str, str]:
    return dict(box.link.call("file_stat", path=str(path), xattrs=True)["entry"]["xattrs"])


def test_attributes_follow_and_go_with_their_file(either: Box, tmp_path: Path) -> None:
    box, top = either, tmp_path / "files"
    for name in ("d/a", "d/b", "dd/a", "e/c"):
        box.write(str(top / name), b"1", xattrs={"user.is": name})
    box.link.call("file_move", path=f"{top}/d/a", to=f"{top}/d/../e/c")
    assert attributes(box, top / "e/c") == {"user.is": "d/a"}
    box.link.call("file_move", path=f"{top}/d/", to=f"{top}/d2")
    assert attributes(box, top / "d2/b") == {"user.is": "d/b"}
    with pytest.raises(FileMissing):
        box.link.call("file_move", path=f"{top}/e/c", to=f"{top}/none/c")
    with pytest.raises(FileError):
        box.link.call("file_move", path=f"{top}/e/c", to=f"{top}/d2/b", overwrite=False)
    (top / "busy").mkdir()
    with pytest.raises(FileError):
        box.link.call("file_move", path=f"{top}/e/c", to=f"{top}/busy")
    assert (attributes(box, top / "e/c"), attributes(box, top / "d2/b")) == ({"user.is": "d/a"}, {"user.is": "d/b"})
    os.symlink("e", top / "link")
    box.link.call("file_remove", path=f"{top}/link")
    assert attributes(box, top / "e/c") == {"user.is": "d/a"}, "the link went, not what it leads to"
    box.link.call("file_remove", path=f"{top}/d2", recursive=True)
    box.link.call("file_remove", path=f"{top}/e/c")
    for name in ("d2/b", "e/c", "d/a"):
        box.write(str(top / name), b"1")
        assert attributes(box, top / name) == {}
    assert attributes(box, top / "dd/a") == {"user.is": "dd/a"}, "a name that only begins alike"


def test_what_a_program_makes_of_the_kept_attributes_breaks_nothing(tmp_path: Path) -> None:
    place, where = tmp_path / "state" / "attributes", tmp_path / "f"
    (tmp_path / "run").mkdir()
    with guest(tmp_path / "run", NO_ATTRIBUTES.format(place=str(place))) as box:
        box.write(str(where), b"1", xattrs={"user.a": "1"})
        assert attributes(box, where) == {"user.a": "1"}
        for junk in ("", "[]", "{", '{"/x": 1}', '{"/x": {"user.a": 1}}', '{"/x": {"trusted.a": "1"}}', "[" * 100_000):
            place.write_text(junk)
            assert attributes(box, where) == {}
            box.write(str(where), b"1", xattrs={"user.a": "2"})
            assert attributes(box, where) == {"user.a": "2"}
        place.unlink()
        os.mkfifo(place)
        assert attributes(box, where) == {}
        box.write(str(where), b"2", xattrs={"user.a": "3"})
        assert attributes(box, where) == {"user.a": "3"}
        place.unlink()
        place.mkdir()
        with pytest.raises(FileError):
            box.write(str(where), b"3", xattrs={"user.a": "4"})
        assert (where.read_bytes(), sorted(os.listdir(tmp_path))) == (b"2", ["f", "run", "state"])
        assert os.listdir(place.parent) == ["attributes"]


def test_threads_of_writers_keep_all_attributes(either: Box, tmp_path: Path) -> None:
    names = [f"f{number}" for number in range(40)]
    with ThreadPoolExecutor(8) as threads:
        list(
            threads.map(lambda name: either.write(str(tmp_path / "files" / name), b"1", xattrs={"user.n": name}), names)
        )
    listed = either.link.call("file_list", path=str(tmp_path / "files"), xattrs=True)["entries"]
    assert {one["name"]: one["xattrs"] for one in listed} == {name: {"user.n": name} for name in names}


def test_a_tunnel_carries_both_ways_with_half_close(box: Box) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        size = 8 << 20

        def serve() -> None:
            peer, _ = server.accept()
            with peer:
                got = 0
                while data := peer.recv(1 << 16):
                    got += len(data)
                peer.sendall(b"got %d" % got + b"y" * size)

        thread = threading.Thread(target=serve)
        thread.start()
        wire, early = box.link.tunnel(port)
        wire.send(b"x" * size)
        wire.end_sending()
        back = bytearray(early)
        while data := wire.receive(PATIENCE):
            back += data
        wire.close()
        thread.join(PATIENCE)
    assert bytes(back[:11]) == b"got 8388608"
    assert len(back) == 11 + size
    with pytest.raises(SandkeepError, match="refused"):
        box.link.tunnel(port)
    with pytest.raises(BadArgument):
        box.link.tunnel(port, "example.org")


def raw(box: Box) -> socket.socket:
    sock = listening(box.dir)
    assert sock is not None
    sock.settimeout(PATIENCE)
    return sock


def ask(sock: socket.socket, request: Any) -> dict[str, Any]:
    text = json.dumps(request).encode()
    sock.sendall(struct.pack("!IB", len(text) + 1, 0) + text)
    return last(sock)


def last(sock: socket.socket) -> dict[str, Any]:
    """The final frame of an answer."""
    while True:
        length, kind = struct.unpack("!IB", exactly(sock, 5))
        payload = exactly(sock, length - 1)
        if kind == 0 and "ok" in (answer := json.loads(payload)):
            found: dict[str, Any] = answer
            return found


def exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = sock.recv(count - len(data))
        if not more:
            raise EOFError
        data += more
    return data


@pytest.mark.parametrize(
    "bytes_sent",
    [
        b"\xff\xff\xff\xff\x00", b"\x00\x00\x00\x00\x00", b"\x00\x00\x00\x02\x09x", b"\x00\x00\x00\x03\x00[]", b"\x00\x00\x00\x02\x03x",
        b"\x00\x00\x00\x05\x00\xff\xfe\xfd\xfc", struct.pack("!IB", 200_001, 0) + b"[" * 200_000, b"GET / HTTP/1.1\r\n\r\n",
    ],
)  # fmt: skip
def test_what_is_not_the_protocol_closes_the_connection(box: Box, bytes_sent: bytes) -> None:
    with raw(box) as sock:
        sock.sendall(bytes_sent)
        assert last(sock)["code"] == "GUEST_PROTOCOL"
        assert sock.recv(1) == b""
    assert box.text("echo alive") == "alive\n"


NONSENSE: list[Any] = [
    -1, 0, 2**31, 2**70, 1e308, -0.5, True, "", "\0", "x", "/", "\ud800", "../../..", [], [[]], ["a", 1], {}, {"a": 1}, {"": "x"},
    {"a=b": "c"}, "9" * 70_000,
]  # fmt: skip
OPS = ["run", "start", "attach", "wait", "signal", "stdin", "close_stdin", "resize", "process", "env_set", "env_unset", "session_set",
       "secrets_set", "user_default", "file_stat", "file_read", "file_list", "file_mkdir", "file_watch", "file_chown", "connect", "reseed",
       None, "nope", 7, [], "__init__"]  # fmt: skip
FIELDS = ["code", "argv", "cwd", "env", "user", "timeout", "stdin", "pid", "signal", "positions", "cols", "rows", "names", "shell",
          "history", "secrets", "path", "offset", "length", "depth", "port", "host", "seed", "extra"]  # fmt: skip


def test_nonsense_is_refused_and_ends_nothing(box: Box) -> None:
    """Whatever is asked, an answer comes, and the guest lives. Nothing here may change files: fields are wrong on purpose."""
    dice = random.Random(20260101)
    codes = set()
    for _ in range(600):
        op = dice.choice(OPS)
        fields = {name: dice.choice(NONSENSE) for name in dice.sample(FIELDS, dice.randint(1, 4))}
        with raw(box) as sock:
            codes.add(ask(sock, {"op": op, "zz": 1, **fields}).get("code"))
    assert codes == {"BAD_ARGUMENT"}
    for op in ("attach", "wait", "signal", "close_stdin", "resize", "process"):
        for value in NONSENSE:
            with raw(box) as sock:
                request = {"op": op, "pid": value, **({"cols": 1, "rows": 1} if op == "resize" else {})}
                assert ask(sock, request)["code"] in ("BAD_ARGUMENT", "PROCESS_NOT_FOUND")
    assert box.text("echo alive") == "alive\n"


def test_random_bytes_and_clients_that_do_not_read(box: Box) -> None:
    dice = random.Random(7)
    for _ in range(100):
        with raw(box) as sock:
            try:
                sock.sendall(dice.randbytes(dice.randint(1, 300)))
            except (BrokenPipeError, ConnectionResetError):
                pass
    deaf = raw(box)
    deaf.setblocking(False)
    request = json.dumps({"op": "hello"}).encode()
    flood = (struct.pack("!IB", len(request) + 1, 0) + request) * 1000
    for _ in range(200):
        try:
            deaf.send(flood)
        except BlockingIOError:
            break
    assert box.text("echo alive") == "alive\n"
    rss = int(Path(f"/proc/{box.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert rss < 64 << 20
    deaf.close()
