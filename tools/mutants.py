"""Plant small faults, one at a time, in a copy of the tree, and see which of them the tests notice.

A fault is one change of the syntax tree: a condition turned round, a comparison replaced, a constant by one off, a statement left
out, two neighbours in the other order, a sync left out. For each, the tests that cover its module run until the first fails.
`COVERS` says which they are. A fault that nobody notices is a missing test, or a line that is not needed.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = "src/sandkeep"
PACKAGES = ("layers", "checkpoints", "store", "sandbox", "runtime", "guest")

# Modules (by the longest prefix) and their test files, quickest first; `*` is any of them.
COVERS = {
    "layers": ["layers*", "saving", "model_pure", "model"],
    "checkpoints": ["checkpoints_*", "keeping", "resumable"],
    "checkpoints/retention": ["model_pure", "checkpoints_forget", "checkpoints_store"],
    "checkpoints/transfer": ["checkpoints_store", "checkpoints_hostile", "keeping"],
    "store": ["store_*", "model_pure", "checkpoints_store"],
    "sandbox": ["sandbox", "saving", "keeping", "home", "crash", "model"],
    "sandbox/memory": ["memory", "resumable"],
    "sandbox/pausing": ["resumable", "memory", "crash", "keeping"],
    "sandbox/ladder": ["resumable", "memory", "keeping"],
    "sandbox/relaunching": ["resumable", "keeping"],
    "sandbox/persistence": ["persistence"],
    "sandbox/namespaces": ["persistence"],
    "sandbox/rhythm": ["persistence"],
    "sandbox/turns": ["turns"],
    "sandbox/carrying": ["keeping", "sandbox"],
    "sandbox/recovery": ["crash", "saving", "keeping"],
    "runtime": ["runtime_plan", "runtime_conformance", "runtime_rotation", "hostile", "rootless"],
    "runtime/image": ["runtime_memory", "memory"],
    "runtime/link": ["link", "guest_files", "sandbox"],
    "guest": ["guest_*", "link", "sandbox"],
    "guest/egress": ["egress_rules", "guest_processes"],
    "guest/tunnel": ["egress_rules", "link"],
}
OPPOSITE = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
SYNCS = {"fsync", "fdatasync", "sync", "syncfs", "sync_folder", "sync_file"}
GOES_ON = (ast.Expr, ast.Assign, ast.AugAssign, ast.Delete)
SIMPLE = (*GOES_ON, ast.Raise, ast.Continue, ast.Break)


@dataclass(frozen=True)
class Fault:
    """Where, what kind, and which of its kind in that file."""

    path: str
    line: int
    kind: str
    number: int
    was: str

    @property
    def module(self) -> str:
        return self.path.removeprefix(SOURCE + "/").removesuffix(".py").replace("/_async/", "/").replace("/_sync/", "/")


class Planter(ast.NodeVisitor):
    """Walks a tree in a fixed order and counts what could be changed; changes the one that is asked for."""

    def __init__(self, path: str, wanted: int | None = None) -> None:
        self.path, self.wanted, self.count = path, wanted, 0
        self.faults: list[Fault] = []
        self.done = ""

    def _may(self, node: ast.stmt | ast.expr, kind: str) -> bool:
        self.count += 1
        self.faults.append(Fault(self.path, node.lineno, kind, self.count, ast.unparse(node).splitlines()[0][:90]))
        return self.count == self.wanted

    def visit_If(self, node: ast.If) -> None:
        self._condition(node)

    def visit_While(self, node: ast.While) -> None:
        self._condition(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._condition(node)

    def _condition(self, node: ast.If | ast.While | ast.IfExp) -> None:
        if not _typing_only(node.test):
            if self._may(node.test, "negate"):
                node.test = ast.UnaryOp(ast.Not(), node.test)
                return
            self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        if self._may(node, "and/or"):
            node.op = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
        elif self._may(node, "less of it"):
            node.values = node.values[:-1]
        else:
            self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if self._may(node, "compare"):
            node.ops[0] = OPPOSITE[type(node.ops[0])]()
            return
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if type(node.value) is int:
            if self._may(node, "+1"):
                node.value += 1
            elif self._may(node, "-1"):
                node.value -= 1
        elif type(node.value) is bool and self._may(node, "bool"):
            node.value = not node.value

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._body(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._body(node)

    def _body(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for part in node.body:
            self.visit(part)

    def generic_visit(self, node: ast.AST) -> None:
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and not isinstance(node, (ast.Module, ast.ClassDef)):
                self._block(block)
        super().generic_visit(node)

    def _block(self, block: list[ast.stmt]) -> None:
        for at, part in enumerate(block):
            if isinstance(part, SIMPLE) and not _words(part):
                kind = "no sync" if _called(part) & SYNCS else "left out"
                if self._may(part, kind):
                    block[at] = ast.copy_location(ast.Pass(), part)
                    return
                following = block[at + 1] if at + 1 < len(block) else None
                if isinstance(part, GOES_ON) and isinstance(following, GOES_ON) and self._may(part, "swapped"):
                    block[at], block[at + 1] = following, part
                    return


class Bodies(Planter):
    """Functions' own statements are a block too."""

    def _body(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._block(node.body)
        super()._body(node)


def _words(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _typing_only(test: ast.expr) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


def _called(node: ast.AST) -> set[str]:
    calls = [one.func for one in ast.walk(node) if isinstance(one, ast.Call)]
    return {one.attr if isinstance(one, ast.Attribute) else getattr(one, "id", "") for one in calls}


def possible(root: Path, path: str) -> list[Fault]:
    planter = Bodies(path)
    planter.visit(ast.parse((root / path).read_text()))
    return planter.faults


def plant(root: Path, fault: Fault) -> None:
    tree = ast.parse((root / fault.path).read_text())
    before = ast.dump(tree)
    Bodies(fault.path, fault.number).visit(tree)
    ast.fix_missing_locations(tree)
    assert ast.dump(tree) != before, fault
    (root / fault.path).write_text(ast.unparse(tree) + "\n")


def sources(packages: list[str]) -> Iterator[str]:
    for package in packages:
        for path in sorted((ROOT / SOURCE / package).rglob("*.py")):
            if "_sync" not in path.parts:
                yield str(path.relative_to(ROOT))


def changed(since: str) -> dict[str, set[int]]:
    """Lines of each file that differ from that commit."""
    diff = subprocess.run(
        ["git", "diff", "-U0", since, "--", SOURCE], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    found: dict[str, set[int]] = {}
    path = ""
    for line in diff.splitlines():
        if line.startswith("+++ b/"):
            path = line[6:]
        elif match := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(match[1]), int(match[2] or 1)
            found.setdefault(path, set()).update(range(first, first + count))
    return found


def tests_of(module: str) -> list[str]:
    prefix = max((name for name in COVERS if module == name or module.startswith(name + "/")), key=len, default="")
    own = sorted((ROOT / "tests").glob(f"test_{module.replace('/', '_')}*.py"))
    found = [str(path.relative_to(ROOT)) for path in own]
    for name in COVERS.get(prefix, []):
        found += sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").glob(f"test_{name}.py"))
    return list(dict.fromkeys(found))


def run(root: Path, names: list[str], seconds: float) -> tuple[int, str]:
    """pytest on these in the copy: its exit code (-1: the time is over) and what it said."""
    python = str(ROOT / ".venv/bin/python")
    process = subprocess.Popen(
        [
            python,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-n",
            "0",
            "--timeout",
            "120",
            f"--basetemp={root.parent / 'pytest'}",
            *names,
        ],
        cwd=root,
        env={**os.environ, "TMPDIR": str(root.parent), "PYTHONPATH": str(root / "src"), "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=seconds)
        return process.returncode, out
    except subprocess.TimeoutExpired:
        return -1, ""
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def noticed(root: Path, fault: Fault, seconds: float) -> str | None:
    """The first test that fails, or that the time is over; None if nothing was noticed."""
    code, out = run(root, [name for name in tests_of(fault.module) if (root / name).exists()], seconds)
    if code == 0:
        return None
    if code == -1:
        return "time is over"
    failed = re.search(r"^(?:FAILED|ERROR) (tests/\S+)", out, re.MULTILINE)
    if failed is None:
        raise SystemExit(f"mutants: the tests of {fault.module} do not run:\n{out[-2000:]}")
    return failed[1]


SWEEP = """
import pathlib, sys
from sandkeep import Sandbox
for record in pathlib.Path(sys.argv[1]).rglob("sandboxes/*/record.json"):
    try:
        Sandbox.attach(record.parent.name, home=record.parents[2]).kill()
    except Exception as error:
        print(f"mutants: {record.parent.name} is left: {error}", file=sys.stderr)
"""


def sweep(folder: Path) -> None:
    """End the sandboxes of tests that were cut off, by the code as it should be."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    subprocess.run([str(ROOT / ".venv/bin/python"), "-c", SWEEP, str(folder)], env=env, check=False)
    shutil.rmtree(folder / "pytest", ignore_errors=True)


def copied(folder: Path) -> Path:
    """What the tests need of the tree; tools and programs that were fetched are the tree's own."""
    root = folder / "tree"
    for name in ("src", "tests", "bench", "tools", "examples", "clients", "docs"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "node_modules"))
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "Makefile", "constraints.txt"):
        shutil.copy(ROOT / name, root / name)
    for name in (".venv", ".build"):
        (root / name).symlink_to(ROOT / name)
    return root


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--number", type=int, default=20)
    options.add_argument("--seed", type=int, default=None)
    options.add_argument("--since", help="only lines that differ from this commit")
    options.add_argument("--packages", default=",".join(PACKAGES))
    options.add_argument("--seconds", type=float, default=600, help="for the tests of one fault")
    options.add_argument("--list", action="store_true", help="say what would be planted, run nothing")
    asked = options.parse_args()
    seed = random.SystemRandom().randrange(1 << 31) if asked.seed is None else asked.seed
    lines = changed(asked.since) if asked.since else None
    faults = [fault for path in sources(asked.packages.split(",")) for fault in possible(ROOT, path)]
    if lines is not None:
        faults = [fault for fault in faults if fault.line in lines.get(fault.path, ())]
    chosen = random.Random(seed).sample(faults, min(asked.number, len(faults)))
    print(f"{len(chosen)} of {len(faults)} possible faults, seed {seed}")
    if asked.list:
        for fault in chosen:
            print(f"  {fault.path}:{fault.line} {fault.kind}: {fault.was}")
        return 0
    signal.signal(signal.SIGTERM, ended)
    return survey(chosen, asked.seconds)


def ended(*_: object) -> None:
    raise SystemExit("mutants: ended")


def survey(faults: list[Fault], seconds: float) -> int:
    survivors, unsure = list[Fault](), 0
    with tempfile.TemporaryDirectory(prefix="sandkeep-mutants-") as folder:
        root = copied(Path(folder))
        for fault in faults:
            original = (root / fault.path).read_text()
            began = time.monotonic()
            plant(root, fault)
            if "/_async/" in fault.path:
                subprocess.run([sys.executable, "tools/unasync.py"], cwd=root, check=True, capture_output=True)
            try:
                by = noticed(root, fault, seconds)
            finally:
                sweep(Path(folder))
            (root / fault.path).write_text(original)
            if "/_async/" in fault.path:
                subprocess.run([sys.executable, "tools/unasync.py"], cwd=root, check=True, capture_output=True)
            if by and by.startswith("tests/") and run(root, [by], seconds)[0] != 0:
                by = f"{by}, which fails without it too"
            verdict = (
                "NOT NOTICED" if by is None else "noticed" if by.startswith("tests/") and " " not in by else "unsure"
            )
            survivors += [fault] if by is None else []
            unsure += verdict == "unsure"
            took = time.monotonic() - began
            print(
                f"{'NOT NOTICED' if by is None else 'noticed':11} {fault.path}:{fault.line} {fault.kind}: {fault.was}"
            )
            print(f"{'':11}   {took:.0f} s{f', by {by}' if by else ''}", flush=True)
    print(f"noticed {len(faults) - len(survivors) - unsure} of {len(faults)}, unsure of {unsure}")
    for fault in survivors:
        print(f"  not noticed: {fault.path}:{fault.line} {fault.kind}: {fault.was}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
