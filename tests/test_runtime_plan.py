"""What is refused before anything is made; bases; overlays; and starts that are cut off."""

from __future__ import annotations

import io
import lzma
import os
import pickle
import random
import signal
import subprocess
import sys
import tarfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zstandard

from runtime_box import Box
from sandkeep.errors import BadArgument, RuntimeFailed, RuntimeMissing
from sandkeep.model import Limits, Mount
from sandkeep.runtime import cgroup, doctor, kernel, overlay, process, seccomp
from sandkeep.runtime.base import Base, resolve
from sandkeep.runtime.driver import DRIVERS, RUNC, Driver
from sandkeep.runtime.elevate import elevated
from sandkeep.runtime.pick import pick
from sandkeep.runtime.plan import Plan
from waiting import until


def plan(folder: Path, **changes: Any) -> Plan:
    base = Base("dir", "x", folder, False, "x")
    given: dict[str, Any] = {"id": "a", "hostname": "a", "argv": ["/bin/true"]}
    return Plan(dir=folder, base=base, layers=[], upper=folder / "u", work=folder / "w", **{**given, **changes})


@pytest.mark.parametrize(
    "mount",
    [
        Mount("relative", "/data"),
        Mount("/etc/../root", "/data"),
        Mount("/no/such/folder", "/data"),
        Mount("/etc", "data"),
        Mount("/etc", "/data/../proc"),
        Mount("/etc", "/"),
        Mount("/etc", "//"),
        Mount("/etc", "/proc"),
        Mount("/etc", "//proc/sys"),
        Mount("/etc", "/./proc/"),
        Mount("/etc", "/dev/shm"),
        Mount("/etc", "/sys/fs/cgroup"),
        Mount("/etc", "/.sandkeep/guest"),
        Mount("/etc", "/usr/"),
        Mount("/etc\0", "/data"),
    ],
    ids=lambda mount: f"{mount.host}:{mount.guest}".replace("\0", "NUL"),
)
def test_hostile_mounts_are_refused(tmp_path: Path, mount: Mount) -> None:
    with pytest.raises(BadArgument):
        plan(tmp_path, mounts=[mount])


@pytest.mark.parametrize(
    "changes",
    [
        {"id": "../a"},
        {"id": ""},
        {"id": "A b"},
        {"id": "a" * 64},
        {"hostname": "a b"},
        {"hostname": ""},
        {"hostname": "-a"},
        {"argv": []},
        {"argv": ["a\0b"]},
        {"env": {"A=B": "x"}},
        {"env": {"": "x"}},
        {"env": {"A": "x\0"}},
        {"network": "bridge"},
        {"mounts": [Mount("/etc", "/a"), Mount("/usr", "/a/")]},
    ],
    ids=str,
)
def test_bad_plans_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(BadArgument):
        plan(tmp_path, **changes)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("spec", ["", "/no/such/base", "a\0b", "hots"])
def test_bases_that_are_not_there(tmp_path: Path, spec: str) -> None:
    with pytest.raises(BadArgument):
        resolve(spec, tmp_path / "home")


def archive(members: list[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for member, content in members:
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return out.getvalue()


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, link
    made.mode = 0o755 if kind == tarfile.DIRTYPE else 0o644
    return made


@pytest.mark.parametrize("packing", ["plain", "xz", "zst"])
def test_a_tar_is_unpacked_once_whatever_its_packing(tmp_path: Path, packing: str) -> None:
    raw = archive(
        [(entry("bin", tarfile.DIRTYPE), b""), (entry("bin/a"), b"text"), (entry("b", tarfile.SYMTYPE, "/bin/a"), b"")]
    )
    packed = {"plain": raw, "xz": lzma.compress(raw), "zst": zstandard.compress(raw)}[packing]
    file = tmp_path / "root.tar"
    file.write_bytes(packed)
    base = resolve(str(file), tmp_path / "home")
    assert (base.root / "bin/a").read_text() == "text"
    assert os.readlink(base.root / "b") == "/bin/a"
    before = base.root.stat()
    assert resolve(str(file), tmp_path / "home").root.stat() == before


@pytest.mark.parametrize(
    "hostile",
    [
        [(entry("../escape"), b"x")],
        [(entry("bin/out", tarfile.SYMTYPE, "../../.."), b""), (entry("bin/out/escape"), b"x")],
        [(entry("bin/hard", tarfile.LNKTYPE, "../../escape"), b"")],
    ],
    ids=["dots", "symlink", "hardlink"],
)
def test_a_tar_that_reaches_out_is_refused_whole(tmp_path: Path, hostile: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    file = tmp_path / "root.tar"
    file.write_bytes(archive([(entry("bin", tarfile.DIRTYPE), b""), *hostile]))
    with pytest.raises(BadArgument):
        resolve(str(file), tmp_path / "home")
    assert [name for name in os.listdir(tmp_path / "home/bases") if name != ".lock"] == []
    assert not list(tmp_path.rglob("escape"))


@pytest.mark.parametrize(
    "content", [b"", b"not a tar", zstandard.compress(b"x" * 9999)[:20], archive([(entry("a"), b"x")])]
)
def test_a_file_that_is_no_root_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "root.tar"
    file.write_bytes(content)
    with pytest.raises(BadArgument):
        resolve(str(file), tmp_path / "home")


def python(code: str, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True, env=environment
    )


def test_processes_that_resolve_at_once_share_one_base(tmp_path: Path) -> None:
    code = "import sys, pathlib; from sandkeep.runtime.base import resolve; print(resolve('host', pathlib.Path(sys.argv[1])).root)"
    roots = {one.communicate(timeout=120)[0].strip() for one in [python(code, str(tmp_path)) for _ in range(4)]}
    assert sorted(os.listdir(tmp_path / "bases")) == sorted([".lock", Path(roots.pop()).name])
    assert roots == set()


def test_the_made_etc_holds_no_secret(tmp_path: Path) -> None:
    root = resolve("host", tmp_path).root
    host = Path("/etc/shadow").read_text()
    made = (root / "etc/shadow").read_text()
    assert all(line.split(":")[1] == "*" for line in made.splitlines())
    assert made != host
    for name in ("ssh", "ssl/private", "apt", "gitconfig", "npmrc", "environment", "hosts.allow", "crontab"):
        assert not (root / "etc" / name).exists()
    assert (root / "home/user/workspace").stat().st_uid == 1000
    assert (root / "etc/sudoers").stat().st_mode & 0o777 == 0o440


def test_seccomp_leaves_out_what_must_be() -> None:
    allowed = {
        name
        for rule in seccomp.profile()["syscalls"]
        if "args" not in rule and "ALLOW" in rule["action"]
        for name in rule["names"]
    }
    refused = (
        "mount umount2 unshare setns clone clone3 keyctl add_key request_key bpf perf_event_open init_module kexec_load"
    )
    refused += (
        " finit_module delete_module open_by_handle_at userfaultfd io_uring_setup reboot swapon settimeofday quotactl"
    )
    refused += (
        " move_mount fsopen fsmount open_tree pivot_root mount_setattr ptrace_ nfsservctl acct iopl ioperm personality"
    )
    assert allowed.isdisjoint(refused.split())
    assert len(allowed) == len(set(allowed))


def test_the_classic_way_of_mounting_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a kernel that does not know `lowerdir+`."""
    modern = kernel.make_mount

    def old(kind: str, settings: list[tuple[str, str | None]], attributes: int) -> int:
        if any(key == "lowerdir+" for key, _ in settings):
            raise OSError(22, "fsconfig lowerdir+: Invalid argument")
        return modern(kind, settings, attributes)

    monkeypatch.setattr(kernel, "make_mount", old)
    layers = []
    for number in range(100):
        layer = tmp_path / f"a layer, with: a \\long name {number}"
        layer.mkdir()
        (layer / f"file{number}").write_text(str(number))
        layers.append(layer)
    with Box(RUNC, tmp_path / "home", layers=layers) as box:
        assert box.sh(
            "cat /file0 /file99; echo; ls / | grep -c file; echo x > /new; grep -c ' / rw,nodev' /proc/self/mountinfo"
        ).split() == [
            "099",
            "100",
            "1",
        ]
    assert (box.plan.upper / "new").exists()


def test_three_hundred_layers(tmp_path: Path) -> None:
    layers = []
    for number in range(300):
        layer = tmp_path / ("x" * 100) / f"layer{number}"
        (layer / "usr").mkdir(parents=True)
        (layer / f"usr/file{number}").write_text(str(number))
        layers.append(layer)
    with Box(RUNC, tmp_path / "home", layers=layers) as box:
        assert box.sh("ls /usr | grep -c file; cat /usr/file299").split() == ["300", "299"]


def test_a_missing_layer_is_the_runtimes_failure(tmp_path: Path) -> None:
    box = Box(RUNC, tmp_path, layers=[tmp_path / "missing"])
    with pytest.raises(RuntimeFailed, match="missing"):
        RUNC.start(box.plan)
    assert cgroup.groups(box.group) == []
    assert not (box.dir / "runtime").exists()


def test_starting_from_many_threads(tmp_path: Path) -> None:
    resolve("host", tmp_path)
    boxes = [Box(RUNC, tmp_path, hostname=f"n{number}") for number in range(6)]
    said: dict[int, str] = {}

    def life(number: int) -> None:
        with boxes[number] as box:
            said[number] = box.sh("hostname")

    threads = [threading.Thread(target=life, args=[number]) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == {number: f"n{number}" for number in range(6)}


_STARTS = """
import pickle, sys
from sandkeep.runtime.driver import DRIVERS
plan = pickle.load(open(sys.argv[2], "rb"))
print("go", flush=True)
DRIVERS[sys.argv[1]].start(plan)
print("up", flush=True)
"""


@pytest.mark.parametrize("name", ["runc", "crun", "runsc"])
def test_a_start_cut_off_anywhere_is_undone(tmp_path: Path, name: str) -> None:
    driver: Driver = DRIVERS[name]
    chance = random.Random(name)
    for _ in range(6):
        box = Box(driver, tmp_path)
        file = tmp_path / "plan"
        file.write_bytes(pickle.dumps(box.plan))
        caller = python(_STARTS, name, str(file))
        assert caller.stdout
        with caller:
            caller.stdout.readline()
            time.sleep(chance.random() * 0.08)
            caller.send_signal(signal.SIGKILL)
        driver.stop(box.id, box.dir)

        def left(box: Box = box) -> list[object]:
            seen = process.naming(str(box.dir / "runtime")) + process.seeing(box.dir / "run", "/.sandkeep/run")
            return [*seen, *cgroup.groups(box.group)]

        until(lambda left=left: not left(), "all of it to end")
        with box:
            assert box.sh("echo well") == "well"


def test_the_doctor_finds_what_works(tmp_path: Path) -> None:
    found = doctor.probe("runsc", tmp_path)
    assert found.works == {"start": True, "ls": True, "freeze": True, "memory": True}
    assert found.healthy
    assert found.problems == []
    host = doctor.host(tmp_path)
    assert host.facts["overlay"] == "works"
    assert host.problems == []
    assert os.listdir(tmp_path) == ["bases"]


def test_the_doctor_says_what_is_missing_or_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    broken = tools / "runc"
    broken.write_text("#!/bin/sh\necho 'runc version 0'; echo 'no luck today' >&2; exit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    found = doctor.probe("runc", tmp_path / "home")
    assert not found.healthy
    assert "no luck today" in found.problems[0].why
    assert found.problems[0].mend
    old = tools / "runsc"
    old.write_text("#!/bin/sh\necho 'runsc version release-20221219.0'\n")
    old.chmod(0o755)
    assert [problem.what for problem in doctor.probe("runsc", tmp_path / "home").problems] == ["runsc is too old"]


def test_pick_probes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = pick("auto", tmp_path)
    monkeypatch.setattr("sandkeep.runtime.pick.probe", lambda *_: pytest.fail("probed twice"))
    assert pick("auto", tmp_path) is first
    assert pick("runsc", tmp_path).name == "runsc"
    with pytest.raises(BadArgument):
        pick("docker", tmp_path)


def test_a_bad_verdict_is_looked_at_again_when_nothing_else_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(name: str, _: Path) -> doctor.Probe:
        return doctor.Probe(name, problems=[doctor.Problem("bad day", "no luck", "wait")])

    with monkeypatch.context() as bad:
        bad.setattr("sandkeep.runtime.pick.probe", never)
        with pytest.raises(RuntimeFailed, match="no luck"):
            pick("auto", tmp_path)
    assert pick("auto", tmp_path).name in ("crun", "runc", "runsc")


def test_a_base_that_was_half_removed_is_made_again(tmp_path: Path) -> None:
    root = resolve("host", tmp_path).root
    before = sorted(path.name for path in root.iterdir())
    for name in before:
        if name != "home":
            subprocess.run(["rm", "-rf", str(root / name)], check=True)
    assert resolve("host", tmp_path).root == root
    assert sorted(path.name for path in root.iterdir()) == before


def test_a_folder_without_a_root_filesystem_is_no_base(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match="no root filesystem"):
        resolve(str(tmp_path), tmp_path / "home")


def test_pick_without_any_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandkeep.runtime.driver.shutil.which", lambda *_, **__: None)
    with pytest.raises(RuntimeFailed, match="not installed"):
        pick("auto", tmp_path)
    with pytest.raises(RuntimeMissing):
        pick("runc", tmp_path)


def test_elevated_is_a_plain_call_for_root() -> None:
    assert elevated(os.getpid) == os.getpid()


def test_overlays_that_are_not_attached_are_dropped(tmp_path: Path) -> None:
    box = Box(RUNC, tmp_path, limits=Limits(pids=64))
    before = len(os.listdir("/proc/self/fd"))

    def build(wanted: Plan) -> None:
        kernel.private_mounts()
        overlay.build(wanted).close()

    kernel.in_thread(lambda: build(box.plan))
    with pytest.raises(FileNotFoundError):
        kernel.in_thread(lambda: build(replace(box.plan, layers=[tmp_path / "missing"])))
    assert len(os.listdir("/proc/self/fd")) <= before


def test_version_2_control_groups_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Freezing, counting and removing in the unified hierarchy, as on a host that has no other."""
    unified = cgroup.hierarchies()["unified"]
    monkeypatch.setattr(cgroup, "hierarchies", lambda: {"unified": unified})
    monkeypatch.setattr(cgroup, "controllers", lambda: {"freezer": unified, "cpu": unified})
    monkeypatch.setattr(cgroup, "_enable", lambda place, name: None)  # this host's cpu controller may be of version 1
    assert cgroup.is_unified()
    with Box(DRIVERS["runsc"], tmp_path) as box:
        box.sh("true")
        group = unified / box.group
        assert str(box.driver.pid(box.id, box.dir)) in (group / "cgroup.procs").read_text().split()
        box.driver.freeze(box.id, box.dir)
        assert "frozen 1" in (group / "cgroup.events").read_text()
        assert box.driver.usage(box.id, box.dir)["cpu_seconds"] > 0
        box.driver.thaw(box.id, box.dir)
        assert box.sh("echo on") == "on"
        box.driver.freeze(box.id, box.dir)
    assert not group.exists()
    assert [problem.split(":")[0] for problem in RUNC.enforceable(Limits(memory="1g", cpus=1))] == ["memory"]
