"""The lineage as lines of text: what goes on stands below, what branches off is indented."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sandkeep.checkpoints.lineage import Ancestor


def drawn(checkpoints: Sequence[Ancestor]) -> Iterator[tuple[str, Ancestor]]:
    """What to write before each, in the order of the lines. Of several children the one with the longest line goes on."""
    children: dict[str | None, list[Ancestor]] = {}
    known = {one.id for one in checkpoints}
    for one in sorted(checkpoints, key=lambda one: one.id):
        older = one.parent_id in known and str(one.parent_id) < one.id
        children.setdefault(one.parent_id if older else None, []).append(one)
    height: dict[str, int] = {}
    for one in sorted(checkpoints, key=lambda one: one.id, reverse=True):
        height[one.id] = 1 + max((height[child.id] for child in children.get(one.id, ())), default=0)
    stack = [("", "", root) for root in reversed(children.get(None, []))]
    while stack:
        first, rest, one = stack.pop()
        yield first, one
        below = children.get(one.id, [])
        if below:
            on = max(below, key=lambda child: height[child.id])
            stack.append((rest, rest, on))
            stack += [(f"{rest}├── ", f"{rest}│   ", child) for child in reversed(below) if child is not on]
