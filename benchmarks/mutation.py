"""Mutation testing: small changes of the code, one at a time, each of which some test should notice.

The changes are cosmic-ray's. Places in ``TARGETS`` are drawn at random, of each one change, and the tests that reach the
changed line are run, cheapest first, in clones of the commit that is checked out. ``docs/mutation.md`` says what survived and why.

    python benchmarks/mutation.py --count 400 --seed 0
"""

from __future__ import annotations

import argparse
import ast
import csv
import importlib
import itertools
import math
import multiprocessing
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from queue import Queue

from cosmic_ray.commands.init import _all_work_items
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from coverage import CoverageData

REPO = Path(__file__).resolve().parents[1]
PACKAGES = ("engines", "baselines", "repro", "paper_figures")
TARGETS = (
    *(
        f"engines/{name}.py"
        for name in ("dllm/scheduling/*", "dllm/cache/*", "ampd/*", "ampd/planner/*", "laps/*", "policies/*")
    ),
    *(f"engines/server/{name}.py" for name in ("answer", "body", "completion", "format")),
    *(f"baselines/{name}.py" for name in ("ar/*", "dllm/static/scheduler")),
    *(f"repro/reports/{name}.py" for name in ("claims*", "determined", "predictions", "roles")),
    "paper_figures/*/*.py",
)
COMPARISONS = frozenset({"compare", "comparison", "gains", "growth", "repeats", "retention"})
"""Modules of figures that verdicts rest on; of others only ``findings`` is changed and what it needs: no lines and colours."""
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["torch", "pandas", "pyarrow.parquet", "matplotlib.pyplot", "hypothesis", "pytest", "scipy.stats", "typer", "rich"]
)
ALWAYS = (
    "tests/properties/test_dataclasses.py::test_records_take_keywords_and_do_not_change",
    "tests/properties/test_dataclasses.py::test_every_argument_may_be_named",
)
"""Tests that read the code and do not execute it."""
FIRST_S, MOST_S = 10.0, 30.0
"""Seconds of tests, as recorded, that are run first, and at most."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """``before`` and ``after`` are its line."""

    module: str
    line: int
    operator: str
    occurrence: int
    before: str = ""
    after: str = ""
    outcome: str = ""
    noticed_by: str = ""
    reason: str = ""

    def source(self, root: Path) -> str:
        source = (root / self.module).read_text(encoding="utf-8")
        return str(mutate_code(source, get_operator(self.operator)(), self.occurrence))


def drawn(count: int, seed: int) -> Iterator[Mutant]:
    """All places are equally likely. Changes that do not compile, or are of annotations alone, are passed over."""
    rng = random.Random(seed)
    paths = sorted({path for pattern in TARGETS for path in REPO.glob(pattern)})
    sources = {path.relative_to(REPO).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    asked = {module: _asked_lines(module, ast.parse(source)) for module, source in sources.items()}
    places: dict[tuple[str, int, int], list[tuple[str, int]]] = {}
    for item in _all_work_items(paths, {}):
        (change,) = item.mutations
        module = Path(change.module_path).relative_to(REPO).as_posix()
        if change.start_pos[0] in asked[module]:
            places.setdefault((module, *change.start_pos), []).append((change.operator_name, change.occurrence))
    order = sorted(places)
    rng.shuffle(order)
    for place in order:
        changes = places[place]
        rng.shuffle(changes)
        mutants = (Mutant(module=place[0], line=place[1], operator=name, occurrence=each) for name, each in changes)
        found = next((each for each in mutants if _differs(sources[each.module], each)), None)
        if found is not None:
            lines = zip(sources[found.module].splitlines(), found.source(REPO).splitlines(), strict=False)
            before, after = next((old, new) for old, new in lines if old != new)
            yield replace(found, before=before.strip(), after=after.strip())
            count -= 1
        if count == 0:
            return


def _asked_lines(module: str, tree: ast.Module) -> set[int]:
    wanted: Sequence[ast.AST] = tree.body
    if module.startswith("paper_figures") and Path(module).stem not in COMPARISONS:
        named: dict[str, ast.AST] = {}
        for node in tree.body:
            targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [node])
            named |= {getattr(each, "name", None) or getattr(each, "id", ""): node for each in targets}
        waiting, found = ["findings"], set()
        while waiting:
            if (name := waiting.pop()) in named and name not in found:
                found.add(name)
                waiting += [each.id for each in ast.walk(named[name]) if isinstance(each, ast.Name)]
        wanted = [named[name] for name in found]
    return {line for node in wanted for line in _lines(node)}


def _lines(node: ast.AST) -> range:
    """Decorators included."""
    first = min(each.lineno for each in (node, *getattr(node, "decorator_list", ())))  # type: ignore[attr-defined]
    return range(first, node.end_lineno + 1)  # type: ignore[attr-defined]


def _differs(source: str, mutant: Mutant) -> bool:
    """In what is executed: annotations are strings here."""

    def executed(text: str) -> str:
        tree = ast.parse(text)
        for node in ast.walk(tree):
            for name in {"returns", "annotation"} & set(node._fields):
                setattr(node, name, None)
        return ast.dump(tree)

    try:
        return executed(source) != executed(mutant.source(REPO))
    except (SyntaxError, AttributeError):  # the tool trips over exceptions with dotted names
        return False


class Reach:
    """Which tests execute a line, and how long each takes; those that notice any edit are left out."""

    def __init__(self, folder: Path) -> None:
        self._root = folder
        self._data = CoverageData(str(folder / ".coverage"))
        self._data.read()
        self.seconds: dict[str, float] = {}
        self.of_edits: list[str] = []
        for case in ElementTree.parse(folder / "tests.xml").iter("testcase"):
            name = f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}"
            if any(case.find(kind) is not None for kind in ("failure", "error")):
                self.of_edits.append(name)
            elif case.find("skipped") is None:
                self.seconds[name] = float(case.attrib["time"])

    def tests(self, mutant: Mutant) -> list[str]:
        """Tests that execute the statement; where importing does, or nothing, those that execute any function of the module and
        those of files that import it."""
        tree = ast.parse((REPO / mutant.module).read_text(encoding="utf-8"))
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        inside = {line for node in functions for line in range(node.body[0].lineno, _lines(node).stop)}
        statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and mutant.line in _lines(node)]
        least = min(statements, key=lambda node: len(_lines(node)))
        own = set(_lines(least)) - {line for each in getattr(least, "body", ()) for line in _lines(each)}
        found = self._of(mutant.module, own & inside)
        found = found or self._of(mutant.module, inside) | self._importing(mutant.module)
        return [*ALWAYS, *sorted(found, key=lambda test: (self.seconds[test], test))]

    def _importing(self, module: str) -> set[str]:
        package, _, name = module.removesuffix(".py").replace("/", ".").rpartition(".")
        imports = re.compile(rf"^from ({package}\.{name} import|{package} import .*\b{name}\b)", re.MULTILINE)
        files = {test.partition("::")[0] for test in self.seconds}
        found = {file for file in files if imports.search((self._root / file).read_text(encoding="utf-8"))}
        return {test for test in self.seconds if test.partition("::")[0] in found}

    def _of(self, module: str, lines: set[int]) -> set[str]:
        contexts = self._data.contexts_by_lineno(str(self._root / module))
        return {name.partition("|")[0] for line in lines for name in contexts.get(line, ())} & self.seconds.keys()


def clone(folder: Path) -> Path:
    subprocess.run(["git", "clone", "-q", "--shared", REPO, folder], check=True)
    return folder


def pytest(folder: Path, *arguments: str, cpu_s: float | None = None) -> tuple[int | None, str]:
    """Exit status, None after too much processor time, and output. A process that has torch loaded forks one for each call."""
    output = folder / "output.txt"
    process = FORKS.Process(target=_pytest, args=(folder, output, arguments, cpu_s))
    process.start()
    # What waits for ever takes no processor time; every test has its own limit, see pyproject.toml.
    process.join(None if cpu_s is None else 20 * cpu_s)
    if process.is_alive():
        os.killpg(process.pid or 0, signal.SIGKILL)
        return None, ""
    status = process.exitcode
    return None if status == -signal.SIGXCPU else status, output.read_text(encoding="utf-8", errors="replace")


def _pytest(folder: Path, output: Path, arguments: Sequence[str], cpu_s: float | None) -> None:
    """In a clone, whose own code is what processes that tests start import too."""
    os.setsid()
    os.nice(15)
    os.chdir(folder)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if cpu_s is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(cpu_s), resource.RLIM_INFINITY))
    sys.path[:] = [str(folder), *(path for path in sys.path if path not in ("", str(REPO), str(REPO / "benchmarks")))]
    os.environ.update(PYTHONPATH=str(folder), PYTHONDONTWRITEBYTECODE="1")
    sys.dont_write_bytecode = True
    status = int(importlib.import_module("pytest").main(["-p", "no:cacheprovider", *arguments]))
    sys.stdout.flush()
    os._exit(status)


def record(folder: Path, jobs: int) -> None:
    """Run all tests once, every target with a statement more that does nothing: what fails now notices any edit."""
    clone(folder)
    for path in {path for pattern in TARGETS for path in folder.glob(pattern)}:
        path.write_text(path.read_text(encoding="utf-8") + "\n_NOTHING = 0\n", encoding="utf-8")
    options = [f"--cov={name}" for name in PACKAGES]
    # It bounds the size of files, of coverage's too.
    apart = "--deselect=tests/repro/test_files.py"
    pytest(folder, *options, "--cov-context=test", "--cov-report=", "--junitxml=tests.xml", f"-n{jobs}", apart)


def judged(mutant: Mutant, reach: Reach, folder: Path) -> Mutant:
    """Killed where a test fails, or takes too long."""
    tests = reach.tests(mutant)
    total_s = list(itertools.accumulate(reach.seconds.get(test, 1.0) for test in tests))
    first = sum(each <= FIRST_S for each in total_s) or 1
    most = max(first, sum(each <= MOST_S for each in total_s))
    path, listed = folder / mutant.module, folder / "tests-to-run"
    original = path.read_text(encoding="utf-8")
    path.write_text(mutant.source(folder), encoding="utf-8")
    try:
        for batch in filter(None, (tests[:first], tests[first:most])):
            listed.write_text("\n".join(batch), encoding="utf-8")
            limit_s = 30 + 5 * sum(reach.seconds.get(test, 1.0) for test in batch)
            status, output = pytest(folder, "-x", f"@{listed}", cpu_s=limit_s)
            # Some changes cannot be imported; then pytest does not find the tests either and calls that wrong usage.
            assert status not in (4, 5) or "ERROR collecting" in output, f"{mutant.module}: {output[-2000:]}"
            if status is None:
                return replace(mutant, outcome="killed", noticed_by="time")
            if status:
                return replace(
                    mutant, outcome="killed", noticed_by=max(_failed(output, batch), key=len, default="its import")
                )
    finally:
        path.write_text(original, encoding="utf-8")
    return replace(mutant, outcome="survived" if tests[len(ALWAYS) :] else "not reached")


def _failed(output: str, tests: Sequence[str]) -> list[str]:
    lines = [line.partition(" ")[2] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return [test for test in tests if any(line == test or line.startswith(f"{test} - ") for line in lines)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--record", type=Path, help="which tests reach what: a folder of a run before, or to make")
    parser.add_argument("--out", type=Path, default=REPO / "docs" / "mutation.csv")
    asked = parser.parse_args()
    known = {}
    if asked.out.exists():
        with asked.out.open(newline="", encoding="utf-8") as file:
            known = {(row["module"], row["before"], row["after"]): row["reason"] for row in csv.DictReader(file)}
    with tempfile.TemporaryDirectory(prefix="mutation-") as scratch, ThreadPoolExecutor(asked.jobs) as pool:
        folder = asked.record or Path(scratch) / "record"
        if not folder.exists():
            print("mutate: all tests once, with coverage", flush=True)
            record(folder, asked.jobs)
        reach = Reach(folder)
        print(
            f"mutate: {len(reach.seconds)} tests; noticing any edit: {', '.join(reach.of_edits) or 'none'}", flush=True
        )
        clones: Queue[Path] = Queue()
        for index in range(asked.jobs):
            clones.put(clone(Path(scratch) / f"clone-{index}"))

        def judge(mutant: Mutant) -> Mutant:
            place = clones.get()
            found = judged(mutant, reach, place)
            clones.put(place)
            change = f"{found.module}:{found.line}  {found.before}  ->  {found.after}"
            print(f"{found.outcome:<11} {change}  {found.noticed_by}", flush=True)
            return replace(found, reason=known.get((found.module, found.before, found.after), ""))

        outcomes = list(pool.map(judge, drawn(asked.count, asked.seed)))
        noticing, unchanged = sorted({each.noticed_by for each in outcomes if "::" in each.noticed_by}), clones.get()
        (unchanged / "tests-to-run").write_text("\n".join(noticing), encoding="utf-8")
        flaky = _failed(pytest(unchanged, "@tests-to-run")[1], noticing)
        outcomes = [replace(each, outcome="survived") if each.noticed_by in flaky else each for each in outcomes]
    with asked.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Mutant)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, sorted(outcomes, key=lambda each: (each.outcome, each.module, each.line))))
    counts = Counter(each.outcome for each in outcomes)
    print(f"mutate: {counts['killed']} of {len(outcomes)} killed, {counts['killed'] / len(outcomes):.1%}")


if __name__ == "__main__":
    main()
