"""`sandkeep doctor`: what works here, what does not, why, and what mends it."""

from __future__ import annotations

import sys

import click

from sandkeep.cli.output import guarded, json_option, show
from sandkeep.runtime.doctor import host, probe
from sandkeep.runtime.driver import DRIVERS
from sandkeep.sandbox.home import Home


@click.command()
@json_option
@guarded
def doctor(as_json: bool) -> None:
    """Probe each runtime for real: start, run, freeze; with runsc also save and restore memory."""
    home = Home().path
    probes, found = [probe(name, home) for name in DRIVERS], host(home)
    if as_json:
        show({"runtimes": probes, "host": found}, True)
    else:
        for one in probes:
            mark = "ok  " if one.healthy else "FAIL"
            click.echo(
                f"{mark} {one.name}  {one.version or 'not installed'}  {', '.join(k for k, v in one.works.items() if v)}"
            )
            for problem in one.problems:
                click.echo(f"       {problem.what}: {problem.why}\n       mend: {problem.mend}")
        for name, value in found.facts.items():
            click.echo(f"     {name}: {value}")
        for problem in found.problems:
            click.echo(f"note {problem.what}: {problem.why}\n     mend: {problem.mend}")
    sys.exit(0 if any(one.healthy for one in probes) else 1)
