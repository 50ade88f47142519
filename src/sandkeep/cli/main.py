"""The command `sandkeep`: noun, then verb."""

from __future__ import annotations

import os
import sys

import click

from sandkeep.cli import agent, checkpoint, demo, doctor, sandbox, server, store

for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
    if getattr(sys, name) is None:  # closed by the caller: what is opened next must not take its number
        setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="sandkeep")
def main() -> None:
    """Sandboxes that never lose their state.

    Exit codes: 0 done, 1 failed, 2 wrong usage, 3 not found, 4 busy or in conflict, 5 damaged data.
    """


main.add_command(demo.demo)
main.add_command(agent.agent)
main.add_command(doctor.doctor)
main.add_command(sandbox.sandbox)
main.add_command(sandbox.kill)
main.add_command(sandbox.gc)
main.add_command(sandbox.purge)
main.add_command(checkpoint.checkpoint)
main.add_command(store.store)
main.add_command(server.serve)
main.add_command(server.key)
