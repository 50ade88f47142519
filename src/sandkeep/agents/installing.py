"""An agent's program as a layer: installed once in a sandbox of its own, then shared by every sandbox that stands on it.

The stack is remembered like that of a known checkpoint (`known/agents/<agent>.json`): a cache, dropped by `gc --cache` and
made again when it is missed. Blocking.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sandkeep.agents.spec import TRUSTED, AgentSpec
from sandkeep.checkpoints.catalog import Store
from sandkeep.errors import Busy, RuntimeFailed
from sandkeep.model import CheckpointInfo, Mount, RestoreReport
from sandkeep.runtime.base import resolve
from sandkeep.sandbox import Sandbox, beginning, journal, killing, lifecycle
from sandkeep.sandbox.home import Home, lock, read_known, write_json
from sandkeep.sandbox.machine import Machine
from sandkeep.sandbox.restoring import become
from sandkeep.sandbox.saving import take

_SHOWN = "/mnt/agents"
_PASSED = ("npm_config_registry", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")


def create(home: Home, spec: AgentSpec, packages: Path | None, **options: Any) -> str:
    """A sandbox with the agent's program in it; its id."""
    machine = lifecycle.create(home, **options)
    try:
        if spec.package:
            while not _stand(machine, spec):
                _install(home, spec, packages, options["runtime"])
    except BaseException:
        killing.kill(machine)
        raise
    return machine.id


def create_from(
    home: Home, spec: AgentSpec, packages: Path | None, store: Store, checkpoint: CheckpointInfo, **options: Any
) -> tuple[str, RestoreReport]:
    """A sandbox that is what a checkpoint says, on the agent's program where the checkpoint holds a part only; and how it came."""
    under: Callable[[], list[str]] | None = None
    if spec.package and checkpoint.scope == "workspace":
        _install(home, spec, packages, options["runtime"])

        def under() -> list[str]:
            stack = _recall(home, spec)
            if stack is None:
                raise Busy(f"the program of agent {spec.name} was removed meanwhile, by `gc --cache`", "try again")
            return stack

    options |= {"cwd": None}
    machine, report = beginning.create_from(home, store, checkpoint.id, "files", under=under, **options)
    return machine.id, report


def _stand(machine: Machine, spec: AgentSpec) -> bool:
    """Put the new sandbox on the agent's layers. False if they are not here."""
    with machine.held() as record:
        with machine.home.layers_lock():
            stack = _recall(machine.home, spec)
            if stack is not None:
                journal.begin(machine.folder, "fetch", stack=stack)  # in use from now on
        if stack is not None:
            become(machine, record, stack, {})
        return stack is not None


def _file(home: Home, spec: AgentSpec) -> Path:
    of = "\0".join((spec.package, spec.version, spec.install, resolve("host", home.path).fingerprint))
    return home.path / "known" / "agents" / f"{spec.name}-{hashlib.sha256(of.encode()).hexdigest()[:16]}.json"


def _recall(home: Home, spec: AgentSpec) -> list[str] | None:
    known = read_known(_file(home, spec))
    return list(known["stack"]) if known is not None and home.layers.here(known["stack"]) else None


def _install(home: Home, spec: AgentSpec, packages: Path | None, runtime: str) -> None:
    home.ensure()
    with lock(home.path / "agents.lock"):
        if _recall(home, spec) is not None:
            return
        source = packages / spec.name if packages is not None else None
        local = source is not None and source.is_dir()
        mounts = [Mount(str(source), _SHOWN)] if local else []
        with Sandbox(home=home.path, runtime=runtime, network="none" if local else "host", mounts=mounts) as sandbox:
            line = f"cp -a --no-preserve=ownership {_SHOWN}/. {shlex.quote(spec.into)}/" if local else _line(spec)
            env = {} if local else {name: os.environ[name] for name in _PASSED if name in os.environ}
            done = sandbox.commands.run(
                f"mkdir -p {shlex.quote(spec.into)} && {line}",
                user="root",
                cwd="/",
                env={"HOME": "/root", **TRUSTED, **env},
            )
            program = f"{spec.into}/{spec.program}"
            if done.exit_code != 0 or not sandbox.files.exists(program):
                raise RuntimeFailed(
                    f"agent {spec.name} could not be installed: {(done.stderr or done.stdout).strip()[-2000:]}",
                    "set npm_config_registry, or SANDKEEP_AGENT_PACKAGES to a folder with <agent>/ npm prefixes",
                )
            sandbox.commands.run("rm -rf /root/.npm /tmp/* && chmod -R a+rX /opt/agents", user="root", cwd="/")
            machine = sandbox._held
            with machine.held() as record:
                stack = take(machine, record).stack
                _file(home, spec).parent.mkdir(parents=True, exist_ok=True)
                write_json(_file(home, spec), {"stack": stack})


def _line(spec: AgentSpec) -> str:
    return spec.install.format(
        into=shlex.quote(spec.into), package=shlex.quote(spec.package), version=shlex.quote(spec.version)
    )
