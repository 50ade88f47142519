"""The command `sandkeep`: noun, then verb."""

from __future__ import annotations

import click

from sandkeep.cli import agent, checkpoint, demo, doctor, sandbox, server, store


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
main.add_command(sandbox.gc)
main.add_command(checkpoint.checkpoint)
main.add_command(store.store)
main.add_command(server.serve)
main.add_command(server.key)
