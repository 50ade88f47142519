"""An E2B program, synchronous: what the other one leaves out. `OLD` is an SDK that lacks the newest words."""

import datetime
import os
import time
import urllib.request
import uuid
import warnings

import e2b
from e2b import CommandExitException, NotFoundException, PtySize, Sandbox, SandboxQuery, SandboxState, Template

warnings.simplefilter("ignore", DeprecationWarning)
OLD = "idempotency_key" not in (Sandbox.create.__doc__ or "")
FORM = {"Content-Type": "multipart/form-data; boundary=edge"}
UPLOAD = b'--edge\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\nby address\r\n--edge--\r\n'


def raises(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was expected")


def until(check, seconds=60):
    deadline = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < deadline, check
        time.sleep(0.05)
    return found


def input_(sbx):
    fed = sbx.commands.run("cat; echo end", background=True, stdin=True)
    fed.send_stdin("line\n")
    fed.close_stdin()
    assert fed.wait().stdout == "line\nend\n"
    if not OLD:
        fed = sbx.commands.run("cat", background=True, stdin=True)
        sbx.commands.stream_input(fed.pid, (f"{n}\n" for n in range(100)))
        sbx.commands.close_stdin(fed.pid)
        assert fed.wait().stdout.split() == [str(n) for n in range(100)]
        raises(NotFoundException, lambda: sbx.commands.stream_input(999_999, ["x"]))


def left_alone(sbx):
    """Who leaves a command does not end it, and learns its end later."""
    handle = sbx.commands.run("while [ ! -e go ]; do sleep 0.1; done; exit 5", background=True)
    handle.disconnect()
    assert handle.pid in [one.pid for one in sbx.commands.list()]
    sbx.files.write("go", "")
    until(lambda: handle.pid not in [one.pid for one in sbx.commands.list()])
    assert raises(CommandExitException, lambda: sbx.commands.connect(handle.pid).wait()).exit_code == 5


def terminal(sbx):
    shown = []
    pty = sbx.pty.create(PtySize(rows=24, cols=80))
    pty.disconnect()
    again = sbx.pty.connect(pty.pid)
    sbx.pty.send_stdin(pty.pid, b"echo a$((1+1))b; exit 3\n")
    assert raises(CommandExitException, lambda: again.wait(on_pty=shown.append)).exit_code == 3
    assert b"a2b" in b"".join(shown)
    pty = sbx.pty.create(PtySize(rows=24, cols=80))
    assert sbx.pty.kill(pty.pid) is True
    assert sbx.pty.kill(pty.pid) is False


def addresses(sbx):
    for path, options in (("up", {}), ("/root/up", {"user": "root", "use_signature_expiration": 100})):
        url = sbx.upload_url(path, **options)
        urllib.request.urlopen(urllib.request.Request(url, data=UPLOAD, headers=FORM)).read()
        assert urllib.request.urlopen(sbx.download_url(path, **options)).read() == b"by address"
    assert sbx.commands.run("stat -c %U /root/up up", user="root", cwd="/home/user").stdout == "root\nuser\n"


def labels(sbx):
    written = sbx.files.write("labelled", "x", metadata={"Kind": "draft"})
    assert written.metadata == {"kind": "draft"}
    assert sbx.files.get_info("labelled").metadata == {"kind": "draft"}
    assert {one.name: one.metadata for one in sbx.files.list(".")}["labelled"] == {"kind": "draft"}


def files(sbx):
    if not OLD:
        sbx.files.write("zipped", "text " * 1000, gzip=True)
        assert sbx.files.read("zipped", gzip=True) == "text " * 1000
        labels(sbx)
    sbx.files.make_dir("watched")
    watch, seen = sbx.files.watch_dir("watched"), []
    sbx.commands.run("cd watched; touch a; chmod 600 a; echo 1 > a; rm a")
    until(lambda: seen.extend(one.type.value for one in watch.get_new_events()) or "remove" in seen)
    assert seen[0] == "create", seen
    assert "chmod" in seen, seen
    assert "write" in seen, seen
    watch.stop()


def git(sbx):
    git = sbx.git
    git.configure_user("A Person", "a@example.org")
    git.init("repo", initial_branch="main")
    sbx.files.write("repo/f", "1")
    assert git.status("repo").has_changes
    git.add("repo")
    git.commit("repo", "first")
    assert not git.status("repo").has_changes
    git.create_branch("repo", "side")
    assert git.branches("repo").current_branch == "side"
    sbx.commands.run("git clone -q --bare repo bare.git")
    git.clone("/home/user/bare.git", path="copy")
    sbx.files.write("copy/g", "2")
    git.add("copy")
    git.commit("copy", "second")
    git.push("copy")
    assert "second" in sbx.commands.run("git -C bare.git log --all").stdout


def listing(sbx, mark):
    two = [Sandbox.create(timeout=300, metadata={"mark": mark}) for _ in range(2)]
    try:
        two[0].pause()
        page = Sandbox.list(query=SandboxQuery(metadata={"mark": mark}), limit=2)
        found = page.next_items()
        assert page.has_next
        found += page.next_items()
        assert not page.has_next
        ids = [one.sandbox_id for one in (*two[::-1], sbx)]
        assert [one.sandbox_id for one in found] == ids

        def ids_of(**query):
            return [
                one.sandbox_id
                for one in Sandbox.list(query=SandboxQuery(metadata={"mark": mark}, **query)).next_items()
            ]

        assert ids_of(state=[SandboxState.PAUSED]) == [two[0].sandbox_id]
        assert ids_of(state=[SandboxState.RUNNING]) == [two[1].sandbox_id, sbx.sandbox_id]
        if not OLD:
            assert ids_of(started_after=two[0].get_info().started_at) == ids[:2]
            assert ids_of(template="base") == ids
            assert ids_of(template="other") == []
    finally:
        for one in two:
            one.kill()


def figures(sbx):
    sbx.get_metrics()
    now = datetime.datetime.now()
    hour = datetime.timedelta(hours=1)
    assert sbx.get_metrics(start=now - hour, end=now + hour)[-1].disk_total > 0
    assert sbx.get_metrics(start=now - 2 * hour, end=now - hour) == []


def options():
    plain = Sandbox.create(secure=False, timeout=300)
    try:
        assert plain.commands.run("echo hi").stdout == "hi\n"
    finally:
        plain.kill()
    private = Sandbox.create(timeout=300, network={"allow_public_traffic": False})
    try:
        assert private.traffic_access_token
        again = Sandbox.connect(private.sandbox_id)
        assert again.traffic_access_token == private.traffic_access_token
    finally:
        private.kill()
    if not OLD:
        key = str(uuid.uuid4())
        once, twice = (Sandbox.create(timeout=300, idempotency_key=key) for _ in range(2))
        assert once.sandbox_id == twice.sandbox_id
        once.kill()


def templates(sbx):
    name = f"named-{uuid.uuid4().hex[:8]}"
    sbx.files.write("kept", "in the template")
    taken = sbx.create_snapshot(name=name)
    assert Template.exists(name)
    assert Template.exists("base")
    assert not Template.exists("no-such")
    for one in (name, taken.snapshot_id):
        fresh = Sandbox.create(one, timeout=300)
        try:
            assert fresh.files.read("kept") == "in the template"
        finally:
            fresh.kill()
    assert [one.snapshot_id for one in Sandbox.list_snapshots(sandbox_id=sbx.sandbox_id).next_items()] == [
        taken.snapshot_id
    ]
    assert Sandbox.delete_snapshot(taken.snapshot_id)
    raises(e2b.SandboxException, lambda: Sandbox.create(name))


def forks(sbx):
    sbx.files.write("forked", "1")
    for twin in sbx.fork(count=2, timeout=300):
        try:
            assert twin.files.read("forked") == "1"
            assert twin.get_info().metadata == sbx.get_info().metadata
        finally:
            twin.kill()


def paused(sbx):
    sbx.pause()
    assert sbx.pause() is False
    for call in (lambda: sbx.commands.run("true"), lambda: sbx.files.read("kept")):
        assert "was not found" in str(raises(e2b.SandboxException, call))
    raises(e2b.SandboxException, lambda: sbx.set_timeout(30))
    raises(e2b.SandboxException, lambda: sbx.fork(timeout=30))
    raises(e2b.SandboxException, lambda: sbx.create_snapshot())
    sbx.connect(timeout=300)
    assert sbx.files.read("kept") == "in the template"
    assert abs(float(sbx.commands.run("date +%s").stdout) - time.time()) < 30


def main():
    mark = os.urandom(8).hex()
    sbx = Sandbox.create(timeout=300, metadata={"mark": mark})
    try:
        for part in (input_, left_alone, terminal, addresses, files, git, figures, templates, forks, paused):
            part(sbx)
        listing(sbx, mark)
        options()
    finally:
        sbx.kill()


main()
