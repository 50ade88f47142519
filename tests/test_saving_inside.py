"""What a save means for those inside: nothing changes for them, and nothing that they deleted comes back; on every runtime."""

from __future__ import annotations

import pytest

from conftest import Make
from sandkeep import Sandbox

RUNTIMES = ["runc", "crun", "runsc"]


def run(sb: Sandbox, code: str, user: str | None = None) -> str:
    done = sb.commands.run(code, **({"user": user} if user else {}))
    assert done.exit_code == 0, done
    return done.stdout


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_folder_made_again_is_empty_in_every_saved_state(make: Make, runtime: str) -> None:
    sb = make(runtime=runtime)
    run(sb, "mkdir -p d/in /tmp/d; echo x > d/secret; echo x > d/in/secret; echo x > /tmp/d/secret")
    sb.snapshot()
    run(sb, "echo y > d/touched; echo y > /tmp/d/touched")
    sb.commands.run("sleep 1000", background=True)
    sb.snapshot()
    run(sb, "for i in 1 2 3 4 5; do rm -rf d /tmp/d; mkdir d /tmp/d; done; echo z > d/only; echo z > /tmp/d/only")
    saved = sb.snapshot()
    kept = sb.checkpoint()
    look = "ls -A d /tmp/d"
    now = run(sb, look)
    assert now == "/tmp/d:\nonly\n\nd:\nonly\n"
    forked = sb.fork()
    assert isinstance(forked, Sandbox)
    assert run(forked, look) == now
    sb.restore(saved)
    assert run(sb, look) == now
    assert run(Sandbox(home=sb._home.path, runtime=runtime, from_checkpoint=kept.id), look) == now


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_names_of_one_file_stay_together(make: Make, runtime: str) -> None:
    sb = make(runtime=runtime)
    run(sb, "echo one > a; ln a b; mkdir d; ln a d/c; stat -c %i a > /tmp/number")
    sb.snapshot()
    run(sb, "echo two >> a; test $(stat -c %i d/c) = $(cat /tmp/number)")
    assert run(sb, "cat b d/c; stat -c %h a") == "one\ntwo\none\ntwo\n3\n"
    saved = sb.snapshot()
    run(sb, "echo three >> d/c")
    assert run(sb, "tail -qn 1 a b") == "three\nthree\n"
    sb.restore(saved)
    assert run(sb, "cat a; test a -ef b -a b -ef d/c && echo one file") == "one\ntwo\none file\n"


ATTRIBUTES = """python3 -c "
import os
for path in ('/', '/usr'):
    one = os.stat(path)
    print(path, oct(one.st_mode), one.st_uid, one.st_gid, one.st_mtime_ns, os.listxattr(path))
" """


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("path", ["/", "/usr"])
def test_the_root_and_usr_keep_what_they_are(make: Make, runtime: str, path: str) -> None:
    sb = make(runtime=runtime)
    for change in (f"chmod 1711 {path}", f"chown 0:5 {path}", f"touch -d '2001-02-03 04:05:06.789012345' {path}"):
        assert sb.snapshot().how == "unchanged" or change.startswith("chmod")
        run(sb, change, user="root")
        assert sb.snapshot().how != "unchanged", change
    before = run(sb, ATTRIBUTES, user="root")
    assert "0o41711 0 5 981173106789012345" in before
    saved = sb.snapshot()
    kept = sb.checkpoint()
    forked = sb.fork()
    assert isinstance(forked, Sandbox)
    run(sb, f"chmod 755 {path}; chown 0:0 {path}; touch {path}", user="root")
    sb.restore(saved)
    for one in (sb, forked, Sandbox(home=sb._home.path, runtime=runtime, from_checkpoint=kept.id)):
        assert run(one, ATTRIBUTES, user="root") == before
    assert sb.snapshot().how == "unchanged"


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_named_pipes_are_saved(make: Make, runtime: str) -> None:
    """gVisor keeps those that it makes in its own memory."""
    sb = make(runtime=runtime)
    run(sb, "mkfifo -m 640 pipe")
    kept = sb.checkpoint()
    again = Sandbox(home=sb._home.path, runtime=runtime, from_checkpoint=kept.id)
    assert run(again, "stat -c '%F %a' pipe; (echo through > pipe &); cat pipe") == "fifo 640\nthrough\n"


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_watch_goes_on(make: Make, runtime: str) -> None:
    sb = make(runtime=runtime)
    run(sb, "mkdir d; touch d/old")
    with sb.files.watch("d") as changes:
        sb.snapshot()
        run(sb, "echo x > d/new; echo y >> d/old")
        seen = set()
        while len(seen) < 2:
            seen.add(next(changes).path.rpartition("/")[2])
    assert seen == {"new", "old"}
    run(sb, "touch d/more")
    assert sb.snapshot().how == "copied"  # once copied, always copied
