"""Whether the tests of two states of the code find the same small mistakes: a sample of mutants, run in both.

A mutant is one changed operator, constant, condition, return value or left-out statement, in a statement that stands in
both trees word for word, once, in a function of the same name; in the later tree below ps/, proto/codec/ or
worker/client/. Statements of compiled functions are left out (coverage does not see them), and those that no test of
the earlier tree runs. Which of these and which change: by --seed.

Each mutant runs in a copy of its tree, against the tests whose coverage contexts touch its statement, the narrowest
first, until one fails, or for 60 seconds:

killed      a test failed that passes without the change
survived    all passed, or none touches the statement
unfinished  none had failed when time was up; it counts as not killed
broken      the test that failed does so without the change, too: repair it, and delete the entry to run it again

    make bench-mutants ARGS="--before OLD OLD/.coverage --after . .coverage"

with data of `pytest --cov --cov-context=test`. The result file is written after every mutant, and a run that is started
again goes on from it. Exits 1 if more than 2 fewer mutants are killed in the later tree.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from coverage import CoverageData

from timing import print_table

ROOT = Path(__file__).resolve().parents[1]
SEARCHED = ("ps", "proto", "worker")  # where statements may have stood before
MUTATED = ("ps/", "proto/codec/", "worker/client/")  # where they must stand after
COMPILED = {"compiled", "inlined", "called", "intrinsic", "overload", "njit", "jit"}
LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", "runs", "build", "dist", ".coverage*", ".mypy_cache", ".hypothesis")
ALLOWED_LOSS = 2  # mutants
TEST_SECONDS = 30  # a test that hangs has failed
COMPILE_SECONDS = 900  # for a changed file with compiled functions, before the tests' time begins
MOST_TESTS = 300

Change = tuple[str, ast.stmt]  # "kind: old -> new", and the changed statement
COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add}
JUNCTIONS = {ast.And: ast.Or, ast.Or: ast.And}


# ---------------------------------------------------------------- statements and their changes


@dataclass(frozen=True)
class Key:
    """What a statement has in common in both trees."""

    function: str
    text: str


@dataclass(frozen=True)
class Site:
    """A statement, or the first lines of a compound one, in a file."""

    path: str  # below the tree's root
    first: int  # line, from 1
    last: int
    indent: str
    is_elif: bool
    head: ast.stmt  # with an empty body

    def replaced(self, lines: Sequence[str], statement: ast.stmt) -> list[str]:
        """The file's lines with another statement here, the others on the same lines as before."""
        text = ast.unparse(statement).splitlines()
        if hasattr(statement, "body"):
            text = text[:1]  # without the empty body
        new = [("el" if self.is_elif else "") + text[0], *text[1:]]
        room = self.last - self.first + 1
        new = [self.indent + line for line in new] + [""] * (room - len(new))
        return [*lines[: self.first - 1], *new, *lines[self.last :]]


def sites_of(path: str, source: str) -> Iterator[tuple[Key, Site]]:
    """The statements of all functions of a file but for compiled ones."""
    lines = source.splitlines()

    def visit(node: ast.AST, function: str) -> Iterator[tuple[Key, Site]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                if not COMPILED & {_name(decorator) for decorator in child.decorator_list}:
                    yield from visit(child, child.name)
                continue
            if isinstance(child, ast.stmt) and function and not isinstance(child, ast.ClassDef):
                site = _site(child)
                if site is not None:
                    text = " ".join(" ".join(lines[site.first - 1 : site.last]).split())
                    yield Key(function, text), site
            yield from visit(child, function)

    def _site(node: ast.stmt) -> Site | None:
        head, last = node, node.end_lineno or node.lineno
        if isinstance(node, ast.If | ast.While | ast.For | ast.AsyncFor | ast.With | ast.AsyncWith):
            last = node.body[0].lineno - 1
            head = copy.copy(node)
            head.body = [ast.Pass()]
            if not isinstance(head, ast.With | ast.AsyncWith):
                head.orelse = []
        elif hasattr(node, "body"):
            return None  # try and match have no expression of their own
        if last < node.lineno:
            return None  # a body on the same line
        while last > node.lineno and not lines[last - 1].split("#")[0].strip():
            last -= 1  # comments between head and body
        line = lines[node.lineno - 1]
        if line[: node.col_offset].strip():
            return None  # two statements on a line
        return Site(path, node.lineno, last, line[: node.col_offset], line[node.col_offset :].startswith("elif"), head)

    yield from visit(ast.parse(source), "")


def _name(decorator: ast.expr) -> str:
    while isinstance(decorator, ast.Call):
        decorator = decorator.func
    return decorator.attr if isinstance(decorator, ast.Attribute) else getattr(decorator, "id", "")


def changes_of(statement: ast.stmt) -> list[Change]:
    """Every change of a statement, in an order that its text alone decides."""
    found: list[Change] = []

    def change(what: str, edit: Callable[[ast.stmt], ast.stmt | None]) -> None:
        copied = copy.deepcopy(statement)
        found.append((what, edit(copied) or copied))

    for number, node in enumerate(_expressions(statement)):
        old = ast.unparse(node)
        for kind, value in _variants(node):
            change(f"{kind}: {old} -> {ast.unparse(value)}", lambda its, n=number, v=value: _replace(its, n, v))
    if isinstance(statement, ast.If | ast.While):
        negated = ast.UnaryOp(ast.Not(), statement.test)
        change("negated condition", lambda its: setattr(its, "test", negated))
    if isinstance(statement, ast.AugAssign) and type(statement.op) in OPERATORS:
        change("operator", lambda its: setattr(its, "op", OPERATORS[type(statement.op)]()))
    if isinstance(statement, ast.Return) and statement.value is not None and ast.unparse(statement.value) != "None":
        change("return None", lambda its: setattr(its, "value", ast.Constant(None)))
    if _droppable(statement):
        change("left out", lambda its: ast.Pass())
    return found


def _expressions(statement: ast.stmt) -> list[ast.expr]:
    """The expressions of a statement that may change; no annotations and no parts of texts."""
    found: list[ast.expr] = []

    def visit(node: ast.AST) -> None:
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "body") or isinstance(node, ast.JoinedStr):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.expr):
                    found.append(child)
                if isinstance(child, ast.AST):
                    visit(child)

    visit(statement)
    return found


def _variants(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, ast.Compare):
        for at, op in enumerate(node.ops):
            ops = [COMPARISONS[type(op)]() if n == at else it for n, it in enumerate(node.ops)]
            yield "comparison", ast.Compare(node.left, ops, node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield "operator", ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield "constant", ast.Constant(node.value + 1)
    elif isinstance(node, ast.BoolOp):
        yield "and, or", ast.BoolOp(JUNCTIONS[type(node.op)](), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not", node.operand


def _replace(statement: ast.stmt, number: int, value: ast.expr) -> None:
    """Put `value` in place of the statement's expression of this number."""
    target = _expressions(statement)[number]
    for node in ast.walk(statement):
        for name, field in ast.iter_fields(node):
            if field is target:
                setattr(node, name, value)
            elif isinstance(field, list):
                field[:] = [value if item is target else item for item in field]


def _droppable(statement: ast.stmt) -> bool:
    """Whether what follows can still run without it: no new local name is bound here."""
    if isinstance(statement, ast.Assign):
        return all(isinstance(target, ast.Attribute | ast.Subscript) for target in statement.targets)
    is_call = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call | ast.Await)
    return is_call or isinstance(statement, ast.AugAssign | ast.Raise | ast.Delete)


# ---------------------------------------------------------------- trees and their tests


class Tree:
    """A checkout, and which tests ran which of its lines."""

    def __init__(self, root: Path, coverage: Path) -> None:
        self.root = root.resolve()
        self._data = CoverageData(str(coverage))
        self._data.read()
        self._contexts: dict[str, dict[int, list[str]]] = {}

    @cached_property
    def sites(self) -> dict[Key, Site]:
        """Statements that stand in this tree once."""
        found: dict[Key, list[Site]] = defaultdict(list)
        for folder in SEARCHED:
            for path in sorted((self.root / folder).rglob("*.py")):
                if "_pb2" not in path.name:
                    for key, site in sites_of(str(path.relative_to(self.root)), path.read_text()):
                        found[key].append(site)
        return {key: sites[0] for key, sites in found.items() if len(sites) == 1}

    def tests_of(self, site: Site) -> list[str]:
        """Ids of the tests that run a statement: one case of every test function, then a second one, and so on."""
        cases: dict[str, list[str]] = defaultdict(list)
        for context in self.contexts(site.path).get(site.first, ()):
            test = context.rpartition("|")[0]
            if test:
                cases[test.partition("[")[0]].append(test)
        narrow = sorted(cases, key=lambda function: (self._breadth[function], function))
        rounds = zip_longest(*(sorted(set(cases[function])) for function in narrow))
        return [test for test in chain.from_iterable(rounds) if test][:MOST_TESTS]

    def contexts(self, path: str) -> dict[int, list[str]]:
        """Contexts by line of a file; the data may have been collected in another copy of the tree."""
        if path not in self._contexts:
            measured = [name for name in self._data.measured_files() if name.endswith(f"/{path}")]
            name = min(measured, key=len, default=None)
            self._contexts[path] = {} if name is None else self._data.contexts_by_lineno(name)
        return self._contexts[path]

    @cached_property
    def _breadth(self) -> Counter[str]:
        """Lines of the files with statements that each test function runs, over its cases."""
        count: Counter[str] = Counter()
        for path in {site.path for site in self.sites.values()}:
            for contexts in self.contexts(path).values():
                count.update({context.partition("|")[0].partition("[")[0] for context in contexts})
        return count

    def run(self, site: Site, statement: ast.stmt, seconds: float) -> dict[str, object]:
        """What the tests say to a statement in place of this one."""
        tests = self.tests_of(site)
        told: dict[str, object] = {"file": site.path, "line": site.first, "tests": len(tests)}
        if not tests:
            return {**told, "verdict": "survived"}
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder, "tree")
            # it keeps times: compiled kernels stay valid
            shutil.copytree(self.root, place, symlinks=True, ignore=LEFT_OUT)
            file = place / site.path
            original = file.read_text()
            file.write_text("\n".join(site.replaced(original.splitlines(), statement)) + "\n")
            if "compiled" in original or site.path == "proto/routing.py":  # of which all others are made
                pytest(place, [tests[0], "--collect-only"], COMPILE_SECONDS)
            begun = time.monotonic()
            code, said = pytest(place, tests, seconds)
            told["seconds"] = round(time.monotonic() - begun, 1)
        if code is None:
            return {**told, "verdict": "unfinished"}
        if code == 0:
            return {**told, "verdict": "survived"}
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", said, re.MULTILINE)
        told["killed_by"] = failed[1] if failed else said.strip()[-300:]
        return {**told, "verdict": "killed" if self._passes(failed[1] if failed else tests[0]) else "broken"}

    def _passes(self, test: str) -> bool:
        """Whether a test passes in the tree as it is; the copy keeps caches out of the tree."""
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder, "tree")
            shutil.copytree(self.root, place, symlinks=True, ignore=LEFT_OUT)
            return pytest(place, [test], COMPILE_SECONDS)[0] == 0


def pytest(tree: Path, words: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """Exit code and output of a run in a tree; no code if time was up."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    options = ["-x", "-q", "-p", "no:cacheprovider", "--tb=no", f"--timeout={TEST_SECONDS}", "--hypothesis-seed=0"]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *words],
            cwd=tree,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what a test started
        process.wait()
        output.seek(0)
        return code, output.read()


# ---------------------------------------------------------------- the sample


def choose(before: Tree, after: Tree, count: int, seed: int) -> list[dict[str, Any]]:
    """Statements and changes, the same for the same trees and seed."""
    rng = random.Random(seed)
    chosen: list[dict[str, Any]] = []
    common = before.sites.keys() & after.sites.keys()
    keys = sorted(
        (key for key in common if after.sites[key].path.startswith(MUTATED)), key=lambda k: (k.function, k.text)
    )
    rng.shuffle(keys)
    for key in keys:
        if len(chosen) == count:
            break
        changes = [what for what, _ in changes_of(after.sites[key].head)]
        if changes and before.tests_of(before.sites[key]):
            chosen.append({"function": key.function, "text": key.text, "change": rng.choice(changes)})
    return chosen


def changed(site: Site, what: str) -> ast.stmt:
    return next(statement for name, statement in changes_of(site.head) if name == what)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for side in ("before", "after"):
        parser.add_argument(f"--{side}", nargs=2, type=Path, required=True, metavar=("TREE", "COVERAGE"))
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60, help="for the tests of a mutant")
    parser.add_argument("--output", type=Path, default=ROOT / "runs/mutants.json")
    options = parser.parse_args()
    os.nice(19)
    trees = {"before": Tree(*options.before), "after": Tree(*options.after)}
    if options.output.exists():
        result = json.loads(options.output.read_text())
    else:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        result = {"seed": options.seed, "mutants": choose(**trees, count=options.count, seed=options.seed)}
    for number, mutant in enumerate(result["mutants"], 1):
        key = Key(mutant["function"], mutant["text"])
        for side, tree in trees.items():
            if side in mutant:
                continue
            site = tree.sites.get(key)
            if site is None:
                mutant[side] = {"verdict": "gone"}  # from a result file of other trees
            else:
                mutant[side] = tree.run(site, changed(site, mutant["change"]), options.seconds)
            print(f"{number}/{len(result['mutants'])} {side} {json.dumps(mutant[side])} {mutant['change']}", flush=True)
            written = options.output.with_suffix(".new")
            written.write_text(json.dumps(result, indent=1))
            written.replace(options.output)
    show(result["mutants"])


def show(mutants: Sequence[dict[str, Any]]) -> None:
    """Verdicts, survivors, and the bar."""
    verdicts = {side: Counter(mutant[side]["verdict"] for mutant in mutants) for side in ("before", "after")}
    names = sorted(verdicts["before"].keys() | verdicts["after"].keys())
    print_table(["", *names], [[side, *(count[name] for name in names)] for side, count in verdicts.items()])
    for mutant in mutants:
        if {mutant["before"]["verdict"], mutant["after"]["verdict"]} != {"killed"}:
            after = mutant["after"]
            print(f"{mutant['before']['verdict']}, then {after['verdict']}: {after.get('file')}:{after.get('line')}")
            print(f"    in {mutant['function']}: {mutant['text']}\n    {mutant['change']}")
    lost = verdicts["before"]["killed"] - verdicts["after"]["killed"]
    passed = lost <= ALLOWED_LOSS and not any(count["broken"] + count["gone"] for count in verdicts.values())
    print(json.dumps({"bench": "mutants", **verdicts, "lost": lost, "passed": passed}))
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
