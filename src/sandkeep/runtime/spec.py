"""The OCI bundle: a Plan written as config.json. A pure function of the plan and a few facts of the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from sandkeep.model import Limits
from sandkeep.runtime import cgroup, seccomp
from sandkeep.runtime.plan import CODE, RUN, Plan

# Docker's list without MKNOD; NET_RAW stays for ping inside the sandbox's own network.
_CAPABILITIES = [
    f"CAP_{name}"
    for name in (
        *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "NET_RAW"),
        *("SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
    )
]
_MASKED = [
    *("/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats"),
    *("/proc/sched_debug", "/proc/scsi", "/proc/timer_list", "/proc/timer_stats"),
    *("/sys/devices/virtual/powercap", "/sys/firmware"),
]
_READONLY = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"]
_CPU_PERIOD = 100_000


@dataclass(frozen=True)
class Facts:
    """What the host adds to a bundle."""

    many_ids: bool  # ids other than 0 exist inside
    user_namespace: bool  # we are root only of a user namespace
    cgroups: bool  # the runtime itself sets the limits
    swap_limit: bool  # the host can limit swap
    rlimit_pids: bool = False  # no cgroup: bound the number of processes by RLIMIT_NPROC
    bind_tmp: bool = False  # the runtime would put a tmpfs of its own on an empty /tmp


def bundle(plan: Plan, facts: Facts) -> dict[str, Any]:
    kinds = ["pid", "mount", "ipc", "uts", "cgroup", *(["network"] if plan.network == "none" else [])]
    linux: dict[str, Any] = {
        "namespaces": [{"type": kind} for kind in kinds],
        "seccomp": seccomp.profile(),
        "maskedPaths": _MASKED,
        "readonlyPaths": _READONLY,
        "resources": {"devices": [{"allow": False, "access": "rwm"}]},
    }
    if facts.cgroups:
        linux["cgroupsPath"] = f"/{cgroup.name_of(plan.id, plan.dir)}"
        linux["resources"].update(_resources(plan.limits, facts))
    process: dict[str, Any] = {
        "terminal": False,
        "user": {"uid": 0, "gid": 0},
        "args": plan.argv,
        "env": [f"{name}={value}" for name, value in plan.env.items()],
        "cwd": "/",
        "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), _CAPABILITIES),
        "noNewPrivileges": False,
    }
    if facts.rlimit_pids and plan.limits.pids is not None:
        process["rlimits"] = [{"type": "RLIMIT_NPROC", "soft": plan.limits.pids, "hard": plan.limits.pids}]
    return {
        "ociVersion": "1.0.2",
        "process": process,
        "root": {"path": str(plan.dir / "root"), "readonly": False},
        "hostname": plan.hostname,
        "mounts": _mounts(plan, facts),
        "linux": linux,
    }


def network_of(bundle: dict[str, Any]) -> Literal["none", "host"]:
    return "none" if {"type": "network"} in bundle["linux"]["namespaces"] else "host"


def _resources(limits: Limits, facts: Facts) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if limits.memory is not None:
        found["memory"] = {"limit": limits.memory, **({"swap": limits.memory} if facts.swap_limit else {})}
    if limits.cpus is not None:
        found["cpu"] = {"period": _CPU_PERIOD, "quota": max(1000, int(limits.cpus * _CPU_PERIOD))}
    if limits.pids is not None:
        found["pids"] = {"limit": limits.pids}
    return found


def _mounts(plan: Plan, facts: Facts) -> list[dict[str, Any]]:
    quiet = ["nosuid", "noexec", "nodev"]
    terminals = ["newinstance", "ptmxmode=0666", "mode=0620", *(["gid=5"] if facts.many_ids else [])]
    found = [
        _mount("/proc", "proc", "proc", quiet),
        _mount("/dev", "tmpfs", "tmpfs", ["nosuid", "strictatime", "mode=755", "size=65536k"]),
        _mount("/dev/pts", "devpts", "devpts", ["nosuid", "noexec", *terminals]),
        _mount("/dev/shm", "tmpfs", "shm", [*quiet, "mode=1777", "size=256m"]),
        _mount("/dev/mqueue", "mqueue", "mqueue", quiet),
    ]
    if facts.user_namespace and plan.network == "host":
        # A fresh sysfs needs a network namespace of our own.
        found.append(_mount("/sys", "tmpfs", "tmpfs", [*quiet, "ro", "mode=755", "size=0k"]))
    else:
        found.append(_mount("/sys", "sysfs", "sysfs", [*quiet, "ro"]))
    if facts.bind_tmp:
        found.append(_bind(plan.dir / "root/tmp", "/tmp", ["nosuid", "nodev", "rw"]))
    found.append(_bind(plan.dir / "run", RUN, [*quiet, "ro"]))
    found.append(_bind(plan.dir / "numbers", f"{RUN}/numbers", [*quiet, "rw"]))
    if plan.code is not None:
        found.append(_bind(plan.code, CODE, ["nosuid", "nodev", "ro"]))
    if plan.network == "host":
        found.append(_bind("/etc/resolv.conf", "/etc/resolv.conf", [*quiet, "ro"]))
    for mount in sorted(plan.mounts, key=lambda mount: mount.guest.count("/")):
        found.append(_bind(mount.host, mount.guest, ["nosuid", "nodev", "ro" if mount.readonly else "rw"]))
    return found


def _mount(destination: str, kind: str, source: str, options: list[str]) -> dict[str, Any]:
    return {"destination": destination, "type": kind, "source": source, "options": options}


def _bind(source: object, destination: str, options: list[str]) -> dict[str, Any]:
    return _mount(destination, "bind", str(source), ["bind", "private", *options])
