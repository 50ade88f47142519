"""What E2B's users report as broken there: sleep after sleep, by hand and by time-out, with a process that counts in memory."""

import json
import os
import sys
import time

from e2b import Sandbox

COUNTER = """
import http.server, time
count = 0
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global count
        count += 1
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"%d %d" % (count, time.time()))
    def log_message(self, *_):
        open("/home/user/log", "a").write("line\\n")
http.server.HTTPServer(("127.0.0.1", 9000), Handler).serve_forever()
"""
BOOT = "cat /proc/sys/kernel/random/boot_id"
ASK = "python3 -c \"import urllib.request as r; print(r.urlopen('http://127.0.0.1:9000').read().decode())\""


def until(check, seconds=90):
    deadline = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < deadline, check
        time.sleep(0.1)
    return found


def ask(sbx):
    count, clock = map(int, sbx.commands.run(ASK).stdout.split())
    assert abs(clock - time.time()) < 30, "the clock is wrong"
    return count


def begin(**options):
    sbx = Sandbox.create(timeout=600, **options)
    sbx.files.write("counter.py", COUNTER)
    sbx.commands.run("python3 counter.py", background=True, timeout=0)
    until(lambda: sbx.commands.run("grep -q :2328 /proc/net/tcp || true; " + ASK + " || true").stdout.strip())
    return sbx


def cycles(times):
    sbx = begin()
    try:
        count = ask(sbx)
        token = sbx._envd_access_token
        for n in range(times):
            sbx.files.write(f"cycle/{n}", str(n))
            assert sbx.pause()
            again = Sandbox.connect(sbx.sandbox_id, timeout=600)
            assert again._envd_access_token == token
            assert ask(again) == count + 1, f"memory was lost at cycle {n}"
            count += 1
        assert sorted(int(one.name) for one in sbx.files.list("cycle")) == list(range(times))
        assert sbx.files.read("log").count("line") == count
    finally:
        sbx.kill()


def by_timeout():
    sbx = begin(lifecycle={"on_timeout": "pause", "auto_resume": True})
    try:
        for n in range(2):
            count = ask(sbx)
            sbx.files.write("last", f"written at the last moment {n}")
            sbx.set_timeout(0)
            until(lambda: sbx.get_info().state.value == "paused")
            assert sbx.files.read("last") == f"written at the last moment {n}", "traffic did not wake it"
            assert ask(sbx) == count + 1
            left = sbx.get_info().end_at.timestamp() - time.time()
            assert left > 200, left
        sbx.pause()
        Sandbox.connect(sbx.sandbox_id, timeout=600)
        sbx.set_timeout(0)
        until(lambda: sbx.get_info().state.value == "paused")
    finally:
        sbx.kill()


def forks():
    sbx = begin()
    try:
        count = ask(sbx)
        (twin,) = sbx.fork(timeout=300)
        try:
            assert ask(twin) == count + 1
            assert ask(twin) == count + 2
            assert ask(sbx) == count + 1
            twin.files.write("only-here", "1")
            assert not sbx.files.exists("only-here")
        finally:
            twin.kill()
    finally:
        sbx.kill()


def saved_under_way():
    """A command's output goes on through a snapshot, nothing lost and nothing twice."""
    sbx = Sandbox.create(timeout=600)
    try:
        said = []
        handle = sbx.commands.run("for n in $(seq 30); do echo $n; sleep 0.1; done", background=True)
        taken = sbx.create_snapshot()
        done = handle.wait(on_stdout=said.append)
        assert done.stdout.split() == [str(n) for n in range(1, 31)], done.stdout
        assert Sandbox.delete_snapshot(taken.snapshot_id)
    finally:
        sbx.kill()


def files_only():
    sbx = begin()
    try:
        sbx.files.write("stays", "on disk")
        boot = sbx.commands.run(BOOT).stdout
        sbx.pause(keep_memory=False)
        Sandbox.connect(sbx.sandbox_id, timeout=300)
        assert sbx.files.read("stays") == "on disk"
        assert sbx.commands.list() == []
        assert sbx.commands.run(BOOT).stdout != boot
    finally:
        sbx.kill()
    sbx = begin(lifecycle={"on_timeout": {"action": "pause", "keep_memory": False}})
    try:
        sbx.files.write("stays", "on disk")
        boot = sbx.commands.run(BOOT).stdout
        sbx.set_timeout(0)
        until(lambda: sbx.get_info().state.value == "paused")
        Sandbox.connect(sbx.sandbox_id, timeout=300)
        assert sbx.files.read("stays") == "on disk"
        assert sbx.commands.list() == []
        assert sbx.commands.run(BOOT).stdout != boot
    finally:
        sbx.kill()


def leave():
    """For a server that is about to be stopped: one runs, one sleeps."""
    running, asleep = begin(), begin()
    counts = ask(running), ask(asleep)
    asleep.pause()
    print(json.dumps({"running": running.sandbox_id, "asleep": asleep.sandbox_id, "counts": counts}))


def come_back():
    left = json.loads(os.environ["LEFT"])
    running, asleep = Sandbox.connect(left["running"]), Sandbox.connect(left["asleep"])
    assert (ask(running), ask(asleep)) == tuple(count + 1 for count in left["counts"])
    running.kill()
    asleep.kill()


if __name__ == "__main__":
    for part in sys.argv[1:]:
        name, _, number = part.partition("=")
        globals()[name](*([int(number)] if number else []))
