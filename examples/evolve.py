"""One report, written, reviewed, killed, and read again as it first was. Needs no key and no network.

python examples/evolve.py [STORE]     a folder or s3://bucket/prefix; without it a folder that is removed at the end
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack

from sandkeep import list_checkpoints
from sandkeep.agents import Agent


def main(store: str) -> None:
    agent = Agent("shell", storage=store)
    r1 = agent.run("echo 'Draft v1' > report.txt", checkpoint_comment="initial draft")
    r2 = agent.run("echo reviewed >> report.txt", checkpoint_comment="reviewed")
    agent.kill()

    with Agent("shell", storage=store) as second:
        r3 = second.run("cat report.txt", from_checkpoint=r1.checkpoint.id)
        print("as it first was:", r3.stdout.strip())
        print("r2 and r3 descend from r1:", r2.checkpoint.parent_id == r3.checkpoint.parent_id == r1.checkpoint.id)

    found = list_checkpoints(store)
    print(f"{len(found)} checkpoints")
    for one in found:
        print(one.id, one.metadata["agent"]["prompt"], f"({one.comment})" if one.comment else "")


if __name__ == "__main__":
    with ExitStack() as stack:
        main(sys.argv[1] if len(sys.argv) > 1 else stack.enter_context(tempfile.TemporaryDirectory(prefix="sandkeep-")))
