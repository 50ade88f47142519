"""`python -m sandkeep` is the command `sandkeep`."""

from sandkeep.cli.main import main

main()
