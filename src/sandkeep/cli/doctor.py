"""`sandkeep doctor`: what works here, what does not, why, and what mends it."""

from __future__ import annotations

import sys

import click

from sandkeep.cli.output import guarded, json_option, plain, show
from sandkeep.runtime.doctor import examine


@click.command()
@json_option
@guarded
def doctor(as_json: bool) -> None:
    """Probe each runtime for real: start, run, freeze; with runsc also save and restore memory."""
    report = examine()
    if as_json:
        show(report, True)
    else:
        for probe in report.probes:
            mark = "ok  " if probe.healthy else "FAIL"
            click.echo(
                f"{mark} {probe.name}  {probe.version or 'not installed'}  {', '.join(k for k, v in probe.works.items() if v)}"
            )
            for what, why, mend in probe.problems:
                click.echo(f"       {what}: {why}\n       mend: {mend}")
        for name, value in plain(report.facts).items():
            click.echo(f"     {name}: {value}")
    sys.exit(0 if any(probe.healthy for probe in report.probes) else 1)
