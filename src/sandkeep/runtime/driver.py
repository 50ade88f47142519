"""One driver for runc, crun and runsc: starts, stops, freezes, counts, saves memory.

It owns the folders bundle/, root/, runtime/ and log/ of a sandbox's folder and its control groups. It knows nothing of
the guest, of layers' meaning, or of who calls. `bundle/process` (pid and start time of process 1) is written last: a
sandbox without it is half started, and stop() undoes it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sandkeep.errors import RuntimeFailed, RuntimeMissing, StoreFull, Unsupported, disk_full, refused
from sandkeep.model import Limits
from sandkeep.runtime import bootid, cgroup, kernel, overlay, process, spec
from sandkeep.runtime.elevate import elevated, id_map, is_root
from sandkeep.runtime.link import door
from sandkeep.runtime.plan import RUN, Plan
from sandkeep.runtime.rotation import rotate

Name = Literal["runc", "crun", "runsc"]

_PATIENCE = 120.0
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ROOM = 64 << 10  # with less on the disk, a runtime that fails has failed for that
# A shell that joins the groups it is given and then becomes the runtime. The groups are named from the cwd, which still
# shows them when something else is mounted there.
_GROUPS = "/sys/fs/cgroup"
_JOIN = [
    "/bin/sh",
    "-c",
    'while [ "$1" != -- ]; do echo 0 >"$1" || exit 1; shift; done; shift; cd /; exec "$@"',
    "join",
]


@dataclass(frozen=True)
class Driver:
    name: Name
    own_limits: bool  # the runtime makes the control groups itself
    memory: bool  # can save and restore a running sandbox's memory
    can_rotate: bool  # can switch the root of a living sandbox
    calls: bool  # process 1 can't be given a listener: it is called, and comes
    install: str

    def path(self) -> str:
        found = shutil.which(self.name, path=os.environ.get("PATH", "") + ":" + _PATH)
        if not found:
            raise RuntimeMissing(f"{self.name} is not installed", self.install)
        return found

    def start(self, plan: Plan) -> None:
        """Returns when process 1 runs; on failure nothing is left of it."""
        self._begin(plan, [])

    def restore(self, plan: Plan, image: Path) -> None:
        """Start from a memory image, with the bundle that was used when it was taken."""
        self._needs_memory()
        self._begin(plan, ["--image-path", str(image)])

    def _begin(self, plan: Plan, image: list[str]) -> None:
        self.path()
        for folder in ("bundle", "root", "runtime", "log"):
            (plan.dir / folder).mkdir(parents=True, exist_ok=True)
        if self.alive(plan.id, plan.dir):
            raise RuntimeFailed(f"sandbox {plan.id} already runs")
        (plan.dir / "bundle/config.json").write_text(json.dumps(spec.bundle(plan, self.facts())))
        try:
            elevated(_launch, self, plan, image)
            self._record(plan.id, plan.dir)
        except BaseException:
            self.stop(plan.id, plan.dir)
            raise

    def facts(self) -> spec.Facts:
        return spec.Facts(
            many_ids=id_map() != "one",
            user_namespace=not is_root() or kernel.in_user_namespace(),
            cgroups=self.own_limits and cgroup.usable(),
            swap_limit=cgroup.swap_limit(),
            rlimit_pids=not cgroup.usable(),
            bind_tmp=self.memory,
        )

    def settle(self, dir: Path) -> None:
        """Called in the launching thread when process 1 runs, before the sandbox counts as started."""
        bootid.show(dir, int((dir / "runtime/pid").read_text()))

    def _record(self, id: str, dir: Path) -> None:
        pid = int((dir / "runtime/pid").read_text())
        one = process.find(pid)
        if one is None or not one.alive():
            raise self.ended(id, dir)
        fresh = dir / "bundle/process.new"
        fresh.write_text(f"{one.pid} {one.started}")
        fresh.rename(dir / "bundle/process")

    @staticmethod
    def ended(id: str, dir: Path) -> RuntimeFailed:
        return RuntimeFailed(f"process 1 of sandbox {id} ended at once: {tail(dir)}", "run `sandkeep doctor`")

    def command(self, plan: Plan, image: list[str]) -> list[str]:
        verb = ["restore", *image] if image else ["run"]
        pid_file = str(plan.dir / "runtime/pid")
        argv = [*self.base_command(plan.dir, plan.network), *verb, "--detach", "--bundle", str(plan.dir / "bundle")]
        return [*argv, "--pid-file", pid_file, plan.id]

    def base_command(self, dir: Path, network: str) -> list[str]:
        return [self.path(), "--root", str(dir / "runtime")]

    def enter(self, root: Path) -> None:
        """Called in the launching thread's own mount namespace, after the root is mounted."""

    def kill(self, id: str, dir: Path) -> None:
        """Every process of it is told to end, whoever works on it. `stop` sees to it that it does."""
        known = process.recorded(dir)
        if known is not None:
            known.kill(0)
        cgroup.kill(cgroup.name_of(id, dir))

    def stop(self, id: str, dir: Path) -> None:
        """Kill everything and remove what the runtime made. Safe to repeat, and for one that is half started."""
        known, group = process.recorded(dir), cgroup.name_of(id, dir)
        _thaw_if_frozen(group)
        if known is None or not cgroup.groups(group):
            _kill_found(dir)
        if known is not None:
            known.kill(_PATIENCE)
        cgroup.destroy(group)
        if (dir / "runtime").exists():
            shutil.rmtree(dir / "runtime")
        for name in ("process", "process.new"):
            (dir / "bundle" / name).unlink(missing_ok=True)

    def freeze(self, id: str, dir: Path) -> None:
        """Returns when every process of the sandbox stands still."""
        self._needs_groups("freeze")
        cgroup.freeze(cgroup.name_of(id, dir))

    def thaw(self, id: str, dir: Path) -> None:
        self._needs_groups("thaw")
        cgroup.thaw(cgroup.name_of(id, dir))

    def _needs_groups(self, verb: str) -> None:
        if not cgroup.usable():
            raise Unsupported(
                f"can't {verb} a sandbox without control groups", "run as root, or let the guest stop its processes"
            )

    def alive(self, id: str, dir: Path) -> bool:
        known = process.recorded(dir)
        return known is not None and known.alive()

    def pid(self, id: str, dir: Path) -> int | None:
        """Process 1 (for runsc: the sandbox's own kernel) as a pid of the host."""
        known = process.recorded(dir)
        return known.pid if known is not None and known.alive() else None

    def rotate(self, plan: Plan) -> None:
        """Switch a living sandbox's root to the overlays of `plan`; only process 1 may hold files there."""
        pid = self.pid(plan.id, plan.dir)
        if pid is None:
            raise RuntimeFailed(f"sandbox {plan.id} does not run")
        elevated(rotate, plan, pid, join=pid)

    def checkpoint(self, id: str, dir: Path, image: Path, leave_running: bool) -> None:
        self._needs_memory()
        raise AssertionError

    def suspend(self, id: str, dir: Path) -> None:
        self._needs_memory()
        raise AssertionError

    def proceed(self, id: str, dir: Path) -> None:
        self._needs_memory()
        raise AssertionError

    def _needs_memory(self) -> None:
        if not self.memory:
            raise Unsupported(f"{self.name} can't save memory", "create the sandbox with runtime runsc")

    def usage(self, id: str, dir: Path) -> dict[str, float]:
        """cpu_seconds, memory_bytes, processes and pss_bytes: from control groups, or summed over the processes."""
        group = cgroup.name_of(id, dir)
        counted = cgroup.usage(group)
        pids = cgroup.pids(group) or [one.pid for one in _found(dir)]
        pss = float(sum(map(process.pss, pids)))
        summed = {
            "cpu_seconds": sum(map(process.cpu_seconds, pids)),
            "memory_bytes": pss,
            "processes": float(len(pids)),
        }
        return {**summed, **counted, "pss_bytes": pss}

    def enforceable(self, limits: Limits) -> list[str]:
        """Why each limit that this host can't hold is not held; empty when all hold."""
        problems = []
        for name in cgroup.missing(limits):
            if name == "pids" and self.name != "runsc":
                continue  # bounded by RLIMIT_NPROC instead
            problems.append(
                f"{name}: no {name} control group can be made here" + ("" if is_root() else "; run as root")
            )
        if limits.disk is not None:
            problems.append("disk: needs project quotas, which this release does not set")
        return problems


class Crun(Driver):
    def enter(self, root: Path) -> None:
        """crun refuses hosts that have both versions of control groups; show it the unified one alone."""
        if not cgroup.is_unified() and "unified" in cgroup.hierarchies():
            tree = kernel.clone_tree(str(cgroup.hierarchies()["unified"]))
            place = os.open(_GROUPS, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                kernel.attach(tree, place)
            finally:
                os.close(tree)
                os.close(place)

    def settle(self, dir: Path) -> None:
        """crun forgets the root's `nodev`. In a user namespace the kernel itself holds devices back."""
        real_root = not kernel.in_user_namespace()
        super().settle(dir)
        if real_root:
            kernel.mount("none", "/", None, kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_NODEV)

    def base_command(self, dir: Path, network: str) -> list[str]:
        return [*super().base_command(dir, network), "--cgroup-manager", "disabled"]


class Runsc(Driver):
    def enter(self, root: Path) -> None:
        """/tmp is bound from the root (see spec.py): it must be a folder there, not a link that leads to the host's."""
        tmp = root / "tmp"
        if not os.path.lexists(tmp):
            tmp.mkdir()
            tmp.chmod(0o1777)
        if tmp.is_symlink() or not tmp.is_dir():
            raise RuntimeFailed(
                "/tmp of the sandbox is not a folder, which runsc needs", "start it with another runtime"
            )

    def base_command(self, dir: Path, network: str) -> list[str]:
        flags = ["--platform=systrap", "--ignore-cgroups", "--overlay2=none", "--file-access=shared", "--host-uds=open"]
        return [self.path(), f"--root={dir / 'runtime'}", *flags, f"--network={network}"]

    def settle(self, dir: Path) -> None:
        """gVisor's kernel boots for itself."""

    def rotate(self, plan: Plan) -> None:
        raise Unsupported("runsc can't switch the root of a running sandbox", "copy what changed, or start it anew")

    def suspend(self, id: str, dir: Path) -> None:
        """Every process inside stands still, while the sandbox's kernel can still be asked to save them."""
        self._ask(dir, "pause", id)

    def proceed(self, id: str, dir: Path) -> None:
        """Undo `suspend`; of one that is not suspended, nothing."""
        try:
            self._ask(dir, "resume", id)
        except RuntimeFailed:
            if self.suspended(id, dir):
                raise

    def suspended(self, id: str, dir: Path) -> bool:
        [state] = [*(dir / "runtime").glob(f"{id}_*.state")]
        return str(json.loads(state.read_text())["status"]) == "paused"

    def checkpoint(self, id: str, dir: Path, image: Path, leave_running: bool) -> None:
        """Save the memory of every process into the folder `image`. Unless left running, the sandbox ends.

        Uncompressed: the store compresses, and equal pages must look equal to it.
        """
        image.mkdir(parents=True, exist_ok=True)
        flags = [
            "--compression=none",
            "--exclude-committed-zero-pages",
            *(["--leave-running"] if leave_running else []),
        ]
        self._ask(dir, "checkpoint", "--image-path", str(image), *flags, id)
        if not leave_running:
            self.stop(id, dir)

    def _ask(self, dir: Path, *words: str) -> None:
        network = spec.network_of(json.loads((dir / "bundle/config.json").read_text()))
        elevated(_run, [*self.base_command(dir, network), *words], str(dir))


RUNC = Driver("runc", own_limits=True, memory=False, can_rotate=True, calls=False, install="apt-get install runc")
CRUN = Crun("crun", own_limits=False, memory=False, can_rotate=True, calls=False, install="apt-get install crun")
RUNSC = Runsc(
    "runsc",
    own_limits=False,
    memory=True,
    can_rotate=False,
    calls=True,
    install="install runsc (gVisor) of 2024 or newer",
)
DRIVERS: dict[str, Driver] = {driver.name: driver for driver in (RUNC, CRUN, RUNSC)}


def _launch(driver: Driver, plan: Plan, image: list[str]) -> None:
    """Mount the root in a namespace that only the runtime inherits, and run the runtime there."""
    join: list[str] = []

    def launch() -> None:
        if not driver.own_limits and cgroup.usable():
            files = cgroup.make(cgroup.name_of(plan.id, plan.dir), plan.limits)
            join.extend([*_JOIN, *(os.path.relpath(file, _GROUPS) for file in files), "--"])
        kernel.private_mounts()
        overlay.attach(overlay.build(plan), plan.dir / "root")
        os.chdir(_GROUPS if join else "/")
        driver.enter(plan.dir / "root")
        given = door.make(plan.dir, calls=driver.calls)
        try:
            _run([*join, *driver.command(plan, image)], str(plan.dir), given)
        finally:
            os.close(given)
        try:
            driver.settle(plan.dir)
        except FileNotFoundError:
            raise ProcessLookupError from None  # and not here, where the host's files may not be seen any more

    try:
        kernel.in_thread(launch)
    except ProcessLookupError as error:
        raise driver.ended(plan.id, plan.dir) from error
    except OSError as error:
        if disk_full(error):
            raise refused(error) from error
        why, place = error.strerror or str(error), error.filename or ""
        raise RuntimeFailed(f"sandbox {plan.id} could not be started: {why}", "run `sandkeep doctor`").at(
            place
        ) from error


def _run(argv: list[str], dir: str, given: int = subprocess.DEVNULL) -> None:
    """Run a runtime's command to its end; what it and process 1 say goes to log/console. `given`: their standard input."""
    with open(Path(dir) / "log/console", "ab") as console:
        before = console.tell()
        child = subprocess.Popen(
            argv, stdin=given, stdout=console, stderr=console, env={"PATH": _PATH}, start_new_session=True
        )
        # Popen.wait with a time-out sleeps up to 50 ms too long.
        ended = process.wait(child.pid, _PATIENCE)
        if not ended:
            child.kill()
        code = child.wait()
    if not ended:
        raise RuntimeFailed(f"the runtime did not answer in {_PATIENCE:.0f} s: {tail(Path(dir), before)}")
    if code and _full(dir):
        raise StoreFull("no space is left to start the sandbox", "free some space; `sandkeep gc` may help").at(dir)
    if code:
        raise RuntimeFailed(f"the runtime said no ({code}): {tail(Path(dir), before)}", "run `sandkeep doctor`")


def _full(dir: str) -> bool:
    """A runtime that can't write its files says all kinds of things."""
    found = os.statvfs(dir)
    return found.f_bavail * found.f_frsize < _ROOM


def tail(dir: Path, since: int = 0) -> str:
    """The last words in the console, without the stacks of a program that fell over."""
    with open(dir / "log/console", "rb") as console:
        console.seek(max(since, console.seek(0, os.SEEK_END) - 40_000))
        words, _, _ = console.read().decode(errors="replace").partition("\ngoroutine ")
        return words[-2000:].strip()


def _found(dir: Path) -> list[process.Process]:
    """The sandbox's processes found by what they are, those inside and those that launch it.

    A launcher is known by its arguments, and before it has any (between fork and exec) by the mounted root.
    """
    launching = [*process.naming(str(dir / "runtime")), *process.having_mounted(dir / "root")]
    return list(dict.fromkeys([*launching, *process.seeing(dir / "run", RUN)]))


def _kill_found(dir: Path) -> None:
    end = time.monotonic() + _PATIENCE
    while found := [one for one in _found(dir) if one.alive()]:
        if time.monotonic() > end:
            raise RuntimeFailed(f"processes {[one.pid for one in found]} of a sandbox can't be killed")
        for one in found:
            one.kill(patience=5)


def _thaw_if_frozen(group: str) -> None:
    if cgroup.usable() and cgroup.has_freezer(group):
        cgroup.thaw(group)
