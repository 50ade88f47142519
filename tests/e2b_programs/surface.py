"""An E2B program, synchronous: most of what its SDK offers, against whatever server the environment names."""

import io
import os
import time
import urllib.error
import urllib.request

import e2b
from e2b import CommandExitException, NotFoundException, PtySize, Sandbox, SandboxQuery, TimeoutException


def until(check, seconds=60):
    deadline = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < deadline, check
        time.sleep(0.05)
    return found


def raises(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was expected")


def commands(sbx):
    said = []
    done = sbx.commands.run(
        "echo hi; echo $FOO-$BAR; pwd; whoami; echo bad >&2", envs={"BAR": "2"}, on_stdout=said.append
    )
    assert done.stdout == "hi\n1-2\n/home/user\nuser\n", done
    assert done.stderr == "bad\n"
    assert "".join(said) == done.stdout
    failed = raises(CommandExitException, lambda: sbx.commands.run("echo out; exit 3"))
    assert (failed.exit_code, failed.stdout) == (3, "out\n")
    assert sbx.commands.run("whoami; pwd", user="root").stdout == "root\n/root\n"
    assert sbx.commands.run("pwd", cwd="/tmp").stdout == "/tmp\n"
    raises(e2b.InvalidArgumentException, lambda: sbx.commands.run("pwd", cwd="/no/such/folder"))
    raises(e2b.AuthenticationException, lambda: sbx.commands.run("pwd", user="nobody-here"))
    raises(TimeoutException, lambda: sbx.commands.run("sleep 300", timeout=1))
    until(lambda: "sleep 300" not in str(sbx.commands.list()))
    assert sbx.commands.run("cat; echo end").stdout == "end\n"
    assert len(sbx.commands.run("head -c 5000000 /dev/zero | tr '\\0' x").stdout) == 5_000_000
    assert sbx.commands.run("printf 'h\\303\\251'").stdout == "hé"


def background(sbx):
    handle = sbx.commands.run("echo one; sleep 300", background=True)
    listed = [one for one in sbx.commands.list() if one.pid == handle.pid]
    assert listed[0].cmd == "/bin/bash"
    assert listed[0].args[-1] == "echo one; sleep 300"
    again = sbx.commands.connect(handle.pid)
    assert again.pid == handle.pid
    assert sbx.commands.kill(handle.pid) is True
    raises(CommandExitException, again.wait)
    assert sbx.commands.kill(handle.pid) is False
    raises(NotFoundException, lambda: sbx.commands.connect(999_999))
    fed = sbx.commands.run("read line; echo got $line", background=True, stdin=True)
    sbx.commands.send_stdin(fed.pid, "this\n")
    assert fed.wait().stdout == "got this\n"


def terminal(sbx):
    shown = []
    pty = sbx.pty.create(PtySize(rows=24, cols=80), cwd="/tmp")
    sbx.pty.resize(pty.pid, PtySize(rows=30, cols=101))
    sbx.pty.send_stdin(pty.pid, b"echo at=$(tput cols)=$PWD; exit\n")
    pty.wait(on_pty=shown.append)
    assert b"at=101=/tmp" in b"".join(shown)


def files(sbx):
    assert sbx.files.write("notes/a.txt", "first").path == "/home/user/notes/a.txt"
    sbx.files.write("notes/a.txt", "second")
    assert sbx.files.read("~/notes/a.txt") == "second"
    data = os.urandom(1 << 20)
    sbx.files.write("/home/user/notes/big", data)
    assert bytes(sbx.files.read("notes/big", format="bytes")) == data
    assert b"".join(sbx.files.read("notes/big", format="stream")) == data
    sbx.files.write("notes/streamed", io.BytesIO(data))
    assert bytes(sbx.files.read("notes/streamed", format="bytes")) == data
    both = sbx.files.write_files([{"path": "m/1", "data": "eins"}, {"path": "m/ü 2", "data": b"zwei"}])
    assert [one.path for one in both] == ["/home/user/m/1", "/home/user/m/ü 2"]
    assert sbx.files.read("m/ü 2") == "zwei"
    sbx.files.write("m/empty", "")
    assert sbx.files.read("m/empty") == ""
    raises(NotFoundException, lambda: sbx.files.read("no/such"))
    raises(e2b.InvalidArgumentException, lambda: sbx.files.read("/home/user"))
    assert sbx.files.make_dir("d/e") is True
    assert sbx.files.make_dir("d/e") is False
    sbx.commands.run("ln -s ../m/1 d/link; chmod 750 d/e")
    names = [one.path.removeprefix("/home/user/d/") for one in sbx.files.list("d", depth=2)]
    assert names == ["e", "link"]
    info = sbx.files.get_info("d/link")
    assert info.symlink_target == "/home/user/m/1"
    folder = sbx.files.get_info("d/e")
    assert (folder.type.value, folder.permissions, folder.owner, folder.group) == ("dir", "drwxr-x---", "user", "user")
    raises(e2b.InvalidArgumentException, lambda: sbx.files.list("m/1"))
    raises(NotFoundException, lambda: sbx.files.list("nowhere"))
    assert sbx.files.rename("m/1", "new/place").path == "/home/user/new/place"
    raises(NotFoundException, lambda: sbx.files.rename("m/1", "x"))
    sbx.files.remove("m")
    assert not sbx.files.exists("m")
    assert sbx.files.exists("new/place")
    sbx.files.write("/root/secret", "s", user="root")
    assert sbx.commands.run("stat -c %U /root/secret", user="root").stdout == "root\n"


def signed(sbx):
    sbx.files.write("signed.txt", "by signature")
    assert urllib.request.urlopen(sbx.download_url("signed.txt")).read() == b"by signature"
    assert (
        urllib.request.urlopen(sbx.download_url("signed.txt", use_signature_expiration=100)).read() == b"by signature"
    )
    late = sbx.download_url("signed.txt", use_signature_expiration=-100)
    error = raises(urllib.error.HTTPError, lambda: urllib.request.urlopen(late))
    assert error.code == 401
    assert b"signature is already expired" in error.read()
    forged = sbx.download_url("signed.txt").replace("signed.txt", "other.txt")
    assert raises(urllib.error.HTTPError, lambda: urllib.request.urlopen(forged)).code == 401


def watches(sbx):
    sbx.files.make_dir("w/inner")
    watch = sbx.files.watch_dir("w", recursive=True)
    sbx.files.write("w/new", "1")
    found = []
    until(lambda: found.extend(watch.get_new_events()) or len(found) >= 3)
    assert [(one.name, one.type.value) for one in found] == [("new", "create"), ("new", "chmod"), ("new", "write")]
    sbx.files.rename("w/new", "w/inner/moved")
    sbx.files.remove("w/inner/moved")
    found = []
    until(lambda: found.extend(watch.get_new_events()) or any(one.type.value == "remove" for one in found))
    assert [(one.name, one.type.value) for one in found[:2]] == [("new", "rename"), ("inner/moved", "create")]
    watch.stop()
    raises(NotFoundException, lambda: sbx.files.watch_dir("no/such"))


def ports(sbx):
    server = sbx.commands.run(
        "mkdir -p site; echo page > site/index.txt; cd site; exec python3 -m http.server 8000", background=True
    )
    base = os.environ["E2B_SANDBOX_URL"]

    def fetch(headers):
        request = urllib.request.Request(f"{base}/index.txt", headers=headers)
        try:
            return urllib.request.urlopen(request).read()
        except urllib.error.HTTPError as error:
            refused = error.code, error.read()
        assert refused[0] == 502, refused
        assert b"port is not open" in refused[1]
        return b""

    assert until(lambda: fetch({"Host": sbx.get_host(8000)})) == b"page\n"
    assert fetch({"E2b-Sandbox-Id": sbx.sandbox_id, "E2b-Sandbox-Port": "8000"}) == b"page\n"
    assert fetch({"Host": sbx.get_host(8001)}) == b""
    assert server.kill()


def listing(sbx, mark):
    info = sbx.get_info()
    assert info.sandbox_id == sbx.sandbox_id
    assert info.metadata == {"mark": mark, "odd": "a&b=c %20 ü"}
    assert info.state.value == "running"
    assert info.end_at > info.started_at
    page = Sandbox.list(query=SandboxQuery(metadata={"mark": mark, "odd": "a&b=c %20 ü"}))
    assert [one.sandbox_id for one in page.next_items()] == [sbx.sandbox_id]
    assert not page.has_next
    assert Sandbox.list(query=SandboxQuery(metadata={"mark": mark + "x"})).next_items() == []
    figures = until(sbx.get_metrics)[0]
    assert figures.cpu_count >= 1
    assert 0 < figures.mem_used <= figures.mem_total
    raises(e2b.SandboxException, lambda: Sandbox.connect("sb-000000000000"))
    raises(e2b.SandboxException, lambda: Sandbox.create("no-such-template"))


def snapshots(sbx):
    sbx.files.write("kept.txt", "in the snapshot")
    taken = sbx.create_snapshot()
    sbx.files.write("kept.txt", "changed since")
    twin = Sandbox.create(taken.snapshot_id, timeout=120)
    try:
        assert twin.files.read("kept.txt") == "in the snapshot"
        assert sbx.files.read("kept.txt") == "changed since"
        assert taken.snapshot_id in [one.snapshot_id for one in sbx.list_snapshots().next_items()]
    finally:
        twin.kill()
    assert Sandbox.delete_snapshot(taken.snapshot_id) is True
    assert Sandbox.delete_snapshot(taken.snapshot_id) is False


def sleep_and_wake(sbx):
    sbx.files.write("kept.txt", "through sleep")
    ends = sbx.get_info().end_at
    Sandbox.connect(sbx.sandbox_id, timeout=5)
    assert sbx.get_info().end_at == ends, "connect only ever extends"
    sbx.set_timeout(600)
    assert sbx.get_info().end_at > ends
    sbx.pause()
    assert sbx.is_running() is False
    assert sbx.get_info().state.value == "paused"
    raises(e2b.SandboxException, lambda: sbx.commands.run("true"))
    again = Sandbox.connect(sbx.sandbox_id, timeout=300)
    assert again.sandbox_id == sbx.sandbox_id
    assert again.is_running()
    assert sbx.files.read("kept.txt") == "through sleep"
    assert sbx.commands.run("echo $FOO").stdout == "1\n"


def end(sbx):
    handle = sbx.commands.run("sleep 300", background=True, timeout=0)
    assert sbx.kill() is True
    error = raises(e2b.SandboxException, handle.wait)
    assert "killed" in str(error) or "not found" in str(error), error
    assert sbx.kill() is False
    assert sbx.is_running() is False


def main():
    mark = os.urandom(8).hex()
    sbx = Sandbox.create(timeout=300, metadata={"mark": mark, "odd": "a&b=c %20 ü"}, envs={"FOO": "1"})
    try:
        for part in (commands, background, terminal, files, signed, watches, ports):
            part(sbx)
        listing(sbx, mark)
        snapshots(sbx)
        sleep_and_wake(sbx)
        end(sbx)
    finally:
        sbx.kill()


main()
