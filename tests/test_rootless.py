"""The same sandbox as an ordinary user, with subordinate ids."""

from __future__ import annotations

import json

import pytest

import ordinary_user
from swift import KEYS, Swift, swift  # noqa: F401

pytestmark = pytest.mark.rootless

STORY = """
import json, os, sys
from pathlib import Path
from sandkeep import Sandbox, Store
from sandkeep.sandbox.home import Home
from sandkeep.sandbox.sweeping import gc
home = Path(os.environ["HOME"]) / "sandkeep"
told = {}
sb = Sandbox(home=home, runtime=sys.argv[1], env={"A": "1"}, secrets={"S": "hush"})
told["id"] = sb.commands.run("id -u; echo $A $S; sudo -n id -u").stdout
sb.commands.run("echo one > f; mkdir d; echo x > d/x; v=1; cd d")
sb.commands.run("chmod 600 /home/user/workspace/f; chown daemon /home/user/workspace/d; touch /usr/local/mine", user="root")
saved = sb.snapshot("s")
sb.commands.run("rm -rf /home/user/workspace/* /usr/local/mine; v=2", user="root")
sb.restore(saved)
told["back"] = sb.commands.run("pwd; cat ../f x; echo $v; stat -c %U ..; ls /usr/local/mine", user="root").stdout
told["late"] = sb.commands.run("(env -i setsid sleep 1003 >/dev/null 2>&1 &); sleep 1002", timeout=2).exit_code
told["escaped"] = sb.commands.run("pgrep -f 'sleep 100' || echo none").stdout
busy = sb.commands.run("exec sleep 1000", background=True)
sb.commands.run("echo two > /home/user/workspace/f", user="root")
copied = sb.snapshot("busy")
told["how"] = [saved.how, copied.how]
told["still"] = [one.running for one in sb.commands.list() if one.pid == busy.pid]
fork = sb.fork()
told["fork"] = fork.commands.run("cat ../f; echo $S", user="root").stdout
fork.kill()
kept = sb.checkpoint("c")
sb.kill()
again = Sandbox(home=home, runtime=sys.argv[1], from_checkpoint=kept.id)
told["again"] = again.commands.run("cat ../f; stat -c %a ../f; stat -c %U ..", user="root").stdout
again.kill()
gc(Home(home), cache=True)
told["left"] = [str(p) for name in ("sandboxes", "layers", "trash") for p in (home / name).iterdir()]
print(json.dumps(told))
"""


DEMO = """
import os, subprocess, sys, tempfile
from sandkeep.cli.demo import demo
demo(["--runtime", "runc"], standalone_mode=False)
print(os.listdir(tempfile.gettempdir()))
"""


def test_the_demo_leaves_nothing() -> None:
    with ordinary_user.home() as home:
        said = ordinary_user.run(DEMO, home=home).splitlines()
    assert said[-2] == "done: nothing was lost, nothing is left"
    assert "sandkeep-demo" not in said[-1]


@pytest.mark.parametrize("runtime", ["runc", "runsc"])
def test_the_whole_day(runtime: str) -> None:
    with ordinary_user.home() as home:
        told = json.loads(ordinary_user.run(STORY, runtime, home=home).splitlines()[-1])
    assert told["id"].splitlines()[:2] == ["1000", "1 hush"]
    assert told["back"] == "/home/user/workspace/d\none\nx\n1\nuser\n/usr/local/mine\n"
    assert (told["late"], told["escaped"]) == (124, "none\n")
    assert told["how"][1] == "copied"
    assert told["still"] == [True]
    assert told["fork"] == "two\nhush\n"
    assert told["again"] == "two\n600\nuser\n"
    assert told["left"] == []


INSIDE = """
import json, os
from pathlib import Path
from sandkeep import Sandbox
from sandkeep.sandbox.checking import check
from sandkeep.sandbox.home import Home
from sandkeep.sandbox.sweeping import gc
home = Path(os.environ["HOME"]) / "sandkeep"
told = {}
sb = Sandbox(home=home, runtime="runc")
sb.commands.run("mkdir d; echo x > d/x; chmod 700 d; chown daemon d/x", user="root")
told["how"] = [sb.snapshot().how, sb.snapshot().how]
sb.files.move("d", "moved")
told["moved"] = sb.commands.run("ls -A; stat -c '%a %U' moved moved/x", user="root").stdout
sb.commands.run("chmod 711 /; rm -r moved; mkdir moved; echo one > a; ln a b", user="root")
told["how"].append(sb.snapshot().how)
told["linked"] = sb.commands.run("echo two >> a; cat b; stat -c %i a b | uniq | wc -l", user="root").stdout
fork = sb.fork()
told["fork"] = fork.commands.run("stat -c %a /; ls -A . moved", user="root").stdout
told["breaks"] = [str(one) for one in check(Home(home))]
fork.kill()
sb.kill()
gc(Home(home), cache=True)
print(json.dumps(told))
"""


def test_what_a_save_means_inside() -> None:
    with ordinary_user.home() as home:
        told = json.loads(ordinary_user.run(INSIDE, home=home).splitlines()[-1])
    assert told["how"] == ["rotated", "unchanged", "copied"]
    assert told["moved"] == "moved\n700 root\n644 daemon\n"
    assert told["linked"] == "one\ntwo\n1\n"
    assert told["fork"] == "711\n.:\na\nb\nmoved\n\nmoved:\n"
    assert told["breaks"] == []


CLOSED = """
import os
from pathlib import Path
from sandkeep import Sandbox
home = Path(os.environ["HOME"]) / "sandkeep"
for code in ("chmod 555 /", "chown daemon /"):
    with Sandbox(home=home, runtime="runc") as sb:
        sb.commands.run(code + "; echo x > /home/user/workspace/x", user="root")
        how = [sb.snapshot().how, sb.snapshot().how]
        print(*how, sb.commands.run("cat x; stat -c '%a %U' /").stdout.split())
"""


def test_a_root_that_its_owner_may_not_write_to_is_saved() -> None:
    with ordinary_user.home() as home:
        told = ordinary_user.run(CLOSED, home=home).splitlines()
    assert told == ["rotated unchanged ['x', '555', 'root']", "rotated unchanged ['x', '755', 'daemon']"]


BUCKET = """
import json, os
from pathlib import Path
from sandkeep import Sandbox, Store
from sandkeep.sandbox.home import Home
from sandkeep.sandbox.sweeping import gc
home, told = Path(os.environ["HOME"]) / "sandkeep", []
sb = Sandbox(home=home, runtime="runc", store=os.environ["URL"])
sb.commands.run("for i in $(seq 1100); do echo $i > f$i; done")
kept = sb.checkpoint(progress=lambda *facts: told.append(facts))
sb.kill()
gc(Home(home), cache=True)
again = Sandbox(
    home=home, runtime="runc", store=os.environ["URL"], from_checkpoint=kept, progress=lambda *facts: told.append(facts)
)
told.append(again.commands.run("ls | wc -l").stdout)
again.kill()
gc(Home(home), cache=True)
print(json.dumps(told))
"""


def test_a_bucket_with_keys_from_variables_and_progress(swift: Swift) -> None:  # noqa: F811
    env = {
        "URL": f"s3://{swift.bucket()}/x",
        "AWS_ACCESS_KEY_ID": KEYS["access_key"],
        "AWS_SECRET_ACCESS_KEY": KEYS["secret_key"],
        "AWS_ENDPOINT_URL": swift.endpoint,
    }
    with ordinary_user.home() as home:
        *told, files = json.loads(ordinary_user.run(BUCKET, home=home, env=env).splitlines()[-1])
    assert files == "1100\n"
    for phase in ("capture", "unpack"):
        steps = [entries for name, entries, _ in told if name == phase]
        assert len(steps) >= 3
        assert steps == sorted(steps)
