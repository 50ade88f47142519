"""Homes on file systems of all kinds: right, or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

import apart

ON_OVERLAY = """
import os, sys
from pathlib import Path
from sandkeep import Sandbox
from sandkeep.errors import HostRefused
from sandkeep.runtime import kernel
at = Path(sys.argv[1])
for name in ("lower", "upper", "work", "root"):
    (at / name).mkdir()
options = f"userxattr,lowerdir={at}/lower,upperdir={at}/upper,workdir={at}/work"
kernel.mount("overlay", str(at / "root"), "overlay", 0, options)
try:
    Sandbox(home=at / "root/home", runtime="runc")
except HostRefused as error:
    print(error.code, error.message, sorted(os.listdir(at / "root/home/sandboxes")))
"""

WRITER = """
import mmap, sys, time
file = open("map", "r+b")
memory = mmap.mmap(file.fileno(), 4096)
memory[0:4] = b"AAA" + sys.argv[1].encode()
open("ready", "w").close()
time.sleep(1000)
"""

ON_TMPFS = """
import sys
from sandkeep import Sandbox, Store
from sandkeep.runtime import kernel
home, runtime, writer = sys.argv[1:]
kernel.mount("tmpfs", home, "tmpfs", 0)
sb = Sandbox(home=home + "/home", runtime=runtime)
try:
    sb.files.write("w.py", writer)
    sb.commands.run("truncate -s 4096 map")
    sb.snapshot()
    for number in (0, 3):
        sb.commands.run(f"exec python3 w.py {number}", background=True)
        done = sb.commands.run("while [ ! -e ready ]; do sleep 0.05; done; rm ready", timeout=100)
        assert done.exit_code == 0, done
        sb.snapshot()
    kept = sb.checkpoint()
    with sb.fork() as fork:
        print(fork.commands.run("head -c 4 map").stdout)
    with Store(home=home + "/home") as store:
        print(store.read(kept.id, "/home/user/workspace/map")[:4].decode())
finally:
    sb.kill()
"""


def test_a_home_on_an_overlay_is_refused_by_name(tmp_path: Path) -> None:
    done = apart.run(ON_OVERLAY, str(tmp_path), prefix=apart.OWN_MOUNTS)
    assert done.stdout.startswith("HOST_REFUSED a home can't lie on an overlay"), done
    assert done.stdout.endswith("[]\n")


@pytest.mark.parametrize("runtime", ["runc", "runsc"])
def test_on_tmpfs_writes_through_mappings_are_saved(tmp_path: Path, runtime: str) -> None:
    done = apart.run(ON_TMPFS, str(tmp_path), runtime, WRITER, prefix=apart.OWN_MOUNTS)
    assert done.stdout == "AAA3\nAAA3\n", done
