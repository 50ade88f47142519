"""A history as a program that stands alone: nothing but Sandkeep's own names, and what must come out at the end."""

from __future__ import annotations

from typing import Any

from model_history import Played
from model_world import INSIDE, KEEP, LONG, START, Rules

HEAD = '''"""{what}"""
import json, os, sys, tempfile
from pathlib import Path
from sandkeep import Sandbox, Store
from sandkeep.sandbox import squashing
from sandkeep.sandbox.home import Home
from sandkeep.sandbox.sweeping import gc

squashing.LONG, squashing.KEEP = {long}, {keep}
squashing.later = lambda home, base, stack: len(stack) > {long} and squashing.squash_now(home, base, stack[{keep}:])
INSIDE = {inside}
COMMAND = {start} + "'" + INSIDE.replace("'", "'\\\\''") + "'"
folder = Path(tempfile.mkdtemp(prefix="model-"))
homes, store, busy = [folder / "home0", folder / "home1"], folder / "store", {{}}


def edit(sb, edits):
    request = json.dumps({{"roots": {roots}, "alone": {alone}, "edits": edits}}) + "\\n"
    if sb.id not in busy:
        return json.loads(sb.commands.run(COMMAND, stdin=request.encode(), user="root").stdout_bytes)
    process, output = busy[sb.id]
    process.send_stdin(request)
    line = b""
    while not line.endswith(b"\\n"):
        line += next(output)[1]
    return json.loads(line)


def begin(sb):
    process = sb.commands.run(COMMAND, background=True, user="root")
    busy[sb.id] = process, iter(process.output())


def quiet(sb):
    busy.pop(sb.id, None)
    for one in sb.commands.list():
        if one.running:
            sb.commands.connect(one.pid).kill()
            sb.commands.connect(one.pid).wait(60)


'''


def script(rules: Rules, played: Played) -> str:
    assert played.wrong is not None
    text = HEAD.format(
        what=f"On {rules.runtime}: {played.wrong.what}".replace("\\", "/"),
        long=LONG,
        keep=KEEP,
        inside=repr(INSIDE),
        start=repr(START),
        roots=rules.roots,
        alone=rules.alone,
    )
    lines, boxes = list[str](), list[str]()
    for verb, *arguments in played.history:
        lines += _lines(rules, verb, arguments)
        boxes += arguments[1:2] if verb == "fork" else arguments[:1] if verb in ("create", "create_from") else []
    return text + "\n".join([*lines, *_end(played, [box for box in boxes if f"{box}.kill()" not in lines])]) + "\n"


def _lines(rules: Rules, verb: str, a: list[Any]) -> list[str]:
    where = f"runtime={rules.runtime!r}, store=store"
    wake = [f"quiet({a[0]})"]
    table: dict[str, Any] = {
        "create": lambda: [f"{a[0]} = Sandbox(home=homes[{a[1]}], {where})"],
        "create_from": lambda: [f"{a[0]} = Sandbox(home=homes[{a[2]}], {where}, from_checkpoint={a[1]})"],
        "edit": lambda: [f"edit({a[0]}, ["] + [f"    {one!r}," for one in a[1]] + ["])"],
        "busy": lambda: [f"begin({a[0]})"],
        "idle": lambda: wake,
        "snapshot": lambda: [f"{a[1]} = {a[0]}.snapshot()"],
        "checkpoint": lambda: [f"{a[1]} = {a[0]}.checkpoint()"],
        "restore": lambda: [f"{a[0]}.restore({a[1]})", *wake],
        "delete_snapshot": lambda: [f"{a[0]}.delete_snapshot({a[1]})"],
        "fork": lambda: [f"{a[1]} = {a[0]}.fork()"],
        "kill": lambda: [f"{a[0]}.kill()"],
        "pause": lambda: [*wake, f"{a[1]} = {a[0]}.pause()"],
        "resume": lambda: [f"{a[0]}.resume()", *wake],
        "export": lambda: [f"{a[0]}.export_state(folder / {a[1]!r})"],
        "import_": lambda: [f"{a[0]}.import_state(folder / {a[1]!r})", *wake],
        "forget": lambda: [f"Store(store, home=homes[{a[1]}]).forget(keep_last={a[0]})"],
        "forget_one": lambda: [f"Store(store, home=homes[{a[1]}]).forget([{a[0]}])"],
        "unforget": lambda: [f"Store(store, home=homes[{a[1]}]).unforget({a[0]}.id)"],
        "crash": lambda: [f"# here whoever did {a[0]}.{a[1]}() was killed after {a[2] * 0.3:.3f} s"],
        "store_gc": lambda: [f"Store(store, home=homes[{a[0]}]).gc()"],
        "home_gc": lambda: [f"gc(Home(homes[{a[0]}]), cache={a[1]})"],
        "lose_cache": lambda: [f"__import__('shutil').rmtree(homes[{a[0]}] / 'cache', ignore_errors=True)"],
    }
    found: list[str] = table[verb]()
    return found


def _end(played: Played, boxes: list[str]) -> list[str]:
    """What the last step must have shown. A snapshot is looked at by going back to it."""
    wrong, (verb, *arguments) = played.wrong, played.history[-1]
    assert wrong is not None
    lines = []
    if verb == "snapshot" and wrong.differences:
        lines = [f"{arguments[0]}.restore({arguments[1]})", f"quiet({arguments[0]})"]
    if wrong.differences and boxes:
        box = arguments[1] if verb == "fork" else arguments[0]
        lines += [f"seen = edit({box if box in boxes else boxes[-1]}, [])['after']"]
        lines += [f"WANTED = { ({path: wanted for path, (wanted, _) in wrong.differences.items()})!r}"]
        lines += ["for path, wanted in WANTED.items():", "    print(path, 'wanted', wanted, 'found', seen.get(path))"]
    else:
        lines += [f"# and then: {line}" for line in str(wrong).splitlines()]
    return [*lines, *(f"{box}.kill()" for box in boxes)]
