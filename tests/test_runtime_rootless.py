"""The runtime as a real ordinary user: the same sandboxes, in user namespaces."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator

import pytest

import ordinary_user
from sandkeep.runtime.driver import DRIVERS

pytestmark = pytest.mark.rootless

_PRELUDE = """
import json, os, sys
from pathlib import Path
from runtime_box import Box
from waiting import until
from sandkeep.errors import Unsupported
from sandkeep.model import Limits, Mount
from sandkeep.runtime import process
from sandkeep.runtime.base import remove, resolve
from sandkeep.runtime.driver import DRIVERS
from sandkeep.runtime.elevate import elevated, id_map
home = Path(os.environ["HOME"]) / "home"
seen = {}
BOOT = "/proc/sys/kernel/random/boot_id"
try:
    driver = DRIVERS[sys.argv[1]] if len(sys.argv) > 1 else None
"""
_END = """
finally:
    for left in home.glob("*"):
        if left.name not in ("bases", "code", "runtimes.json"):
            elevated(remove, str(left))
print(json.dumps(seen))
"""


AsUser = Callable[..., dict[str, object]]


@pytest.fixture(scope="module")
def as_user() -> Iterator[AsUser]:
    """Runs lines of Python as the user; what they put into `seen` is the answer."""
    with ordinary_user.home() as home:

        def run(code: str, *arguments: str) -> dict[str, object]:
            body = "".join(f"    {line}\n" for line in code.strip().splitlines())
            said = ordinary_user.run(_PRELUDE + body + _END, *arguments, home=home)
            told: dict[str, object] = json.loads(said.splitlines()[-1])
            return told

        yield run
        run("if home.exists(): elevated(remove, str(home))")
        assert os.listdir(home) == [".see"]


@pytest.mark.parametrize("runtime", DRIVERS)
def test_life(as_user: AsUser, runtime: str) -> None:
    seen = as_user(
        """
box = Box(driver, home, hostname="mine")
with box:
    seen["ids"] = id_map()
    boots = {Path(BOOT).read_text().strip(), box.sh(f"cat {BOOT}")}
    seen["whoami"] = box.sh("id -un; hostname").split()
    seen["lo"] = box.sh("tail -n +3 /proc/net/dev | cut -d: -f1").split()
    seen["user"] = box.sh("id -un; echo a > /home/user/workspace/a; stat -c %U /home/user/workspace/a", user=1000).split()
    seen["usr"] = box.sh("echo b > /usr/b; rm /usr/bin/false; cat /usr/b")
    seen["mount"] = box.ask(sh="mount -t tmpfs none /mnt")["code"]
    seen["secret"] = box.ask(sh=f"ls {home}")["code"]
    seen["owner"] = (box.plan.upper / "home/user/workspace/a").stat().st_uid
    seen["alive"] = driver.alive(box.id, box.dir)
    used = driver.usage(box.id, box.dir)
    seen["usage"] = used["memory_bytes"] > 1 << 20 and used["processes"] >= 1
    pid = driver.pid(box.id, box.dir)
    try:
        driver.freeze(box.id, box.dir)
    except Unsupported as error:
        seen["freeze"] = error.code
with box:
    seen["boots"] = len({*boots, box.sh(f"cat {BOOT}")})
    seen["again"] = box.sh("cat /usr/b /home/user/workspace/a; ls /usr/bin/false 2>&1 | grep -c such").split()
seen["dead"] = not driver.alive(box.id, box.dir)
seen["left"] = [one.pid for one in process.naming(str(box.dir / "runtime")) + process.seeing(box.dir / "run", "/.sandkeep/run")]
seen["state"] = (box.dir / "runtime").exists()
""",
        runtime,
    )
    owner = seen.pop("owner")
    assert isinstance(owner, int)
    assert owner > 1001
    assert seen.pop("mount") != 0
    assert seen.pop("secret") != 0
    assert seen == {
        "ids": "many",
        "boots": 3,
        "whoami": ["root", "mine"],
        "lo": ["lo"],
        "user": ["user", "user"],
        "usr": "b",
        "alive": True,
        "usage": True,
        "freeze": "UNSUPPORTED",
        "again": ["b", "a", "1"],
        "dead": True,
        "left": [],
        "state": False,
    }


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_rotation(as_user: AsUser, runtime: str) -> None:
    seen = as_user(
        """
with Box(driver, home) as box:
    box.sh("echo 0 > /usr/a; echo 0 > /root/a")
    for number in (1, 2, 3):
        driver.rotate(box.turn(number))
        box.sh(f"test $(cat /usr/a) = {number - 1} && echo {number} > /usr/a && echo {number} > /root/a")
    tops = [box.dir / "upper", *(box.dir / f"upper{number}" for number in (1, 2, 3))]
    seen["usr"] = [(top / "usr/a").read_text().strip() for top in tops]
""",
        runtime,
    )
    assert seen == {"usr": ["0", "1", "2", "3"]}


def test_half_started_without_control_groups_is_undone(as_user: AsUser) -> None:
    seen = as_user(
        """
box = Box(driver, home)
driver.start(box.plan)
box.sh("setsid sleep 1000 > /dev/null 2>&1 &")
(box.dir / "bundle/process").unlink()
(box.dir / "runtime/pid").unlink()
driver.stop(box.id, box.dir)
until(lambda: not process.seeing(box.dir / "run", "/.sandkeep/run"), "all to end")
seen["state"] = (box.dir / "runtime").exists()
""",
        "runc",
    )
    assert seen == {"state": False}


def test_memory_image(as_user: AsUser) -> None:
    seen = as_user(
        """
with Box(driver, home) as box:
    ticks = box.ask()["ticks"]
    driver.checkpoint(box.id, box.dir, home / "image", leave_running=False)
    seen["ended"] = not driver.alive(box.id, box.dir)
    driver.restore(box.plan, home / "image")
    seen["on"] = box.ask()["ticks"] >= ticks
""",
        "runsc",
    )
    assert seen == {"ended": True, "on": True}


def test_one_id_when_there_is_no_newuidmap(as_user: AsUser) -> None:
    """Without subordinate ids the user is root inside, and there is no other."""
    seen = as_user(
        """
import shutil
from sandkeep.runtime import elevate
found = shutil.which
elevate.shutil.which = lambda name, **more: None if name.endswith("idmap") else found(name, **more)
with Box(driver, home, limits=Limits(pids=60)) as box:
    seen["ids"] = id_map()
    seen["id"] = box.sh("id -u; stat -c %u /home/user/workspace; echo x > /usr/x; cat /usr/x").split()
    seen["map"] = len(box.sh("cat /proc/self/uid_map").splitlines())
    bomb = "n=0; while [ $n -lt 200 ]; do sleep 60 > /dev/null 2>&1 & n=$((n+1)); done"
    seen["bomb"] = "fork" in box.ask(sh=bomb)["out"]
seen["problems"] = [text.split(":")[0] for text in driver.enforceable(Limits(memory="1g", cpus=1, pids=60))]
""",
        "runc",
    )
    assert seen == {"ids": "one", "id": ["0", "0", "x"], "map": 1, "bomb": True, "problems": ["memory", "cpus"]}


def test_elevated_carries_results_and_errors(as_user: AsUser) -> None:
    seen = as_user(
        """
import os
from sandkeep.errors import BadArgument
seen["uid"] = elevated(os.geteuid)
try:
    elevated(resolve, "/no/such/base", home)
except BadArgument as error:
    seen["error"] = error.code
try:
    elevated(os.mkdir, "/no/such/folder")
except FileNotFoundError as error:
    seen["errno"] = error.errno
""",
    )
    assert seen == {"uid": 0, "error": "BAD_ARGUMENT", "errno": 2}


def test_the_doctor_and_the_pick(as_user: AsUser) -> None:
    seen = as_user(
        """
from sandkeep.runtime import doctor
from sandkeep.runtime.pick import pick
found = doctor.probe("runc", home)
seen["healthy"] = found.healthy
seen["works"] = found.works
seen["host"] = doctor.host(home).facts["overlay"]
seen["pick"] = pick("auto", home).name in DRIVERS
""",
    )
    assert seen == {
        "healthy": True,
        "works": {"start": True, "ls": True, "freeze": False},
        "host": "works",
        "pick": True,
    }
