"""Who imports whom, read from the sources: no cycles, no edge against the order of the layers, no torch in a policy."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from support.sources import files, text, tree

from repro.paths import REPO

LAYERS = ("engines", "baselines", "repro", "paper_figures")
"""A layer imports those before it."""

LEAVES = {
    "engines.models": {"engines.errors", "engines.models"},
    "engines.cost": {"engines.errors", "engines.models", "engines.cost"},
    "engines.runtime": {"engines.errors", "engines.runtime"},
    "engines.attention": {"engines.errors", "engines.attention"},
    "engines.kernels": {"engines.errors", "engines.models", "engines.kernels"},
    "engines.parallel": {"engines.errors", "engines.models", "engines.parallel"},
    "engines.policies": {"engines.errors", "engines.policies"},
}
"""Packages that know tensors, shapes, devices or plans only -> all they may import of this repository."""

POLICIES = (
    *("engines.dllm.config", "engines.dllm.plan", "engines.dllm.sequence"),
    *("engines.dllm.engine", "engines.dllm.method", "engines.dllm.config", "engines.dllm.scheduling"),
    *("engines.dllm.memory", "engines.dllm.simulated"),
    *("engines.cost.roofline", "engines.server", "engines.laps", "engines.policies", "baselines.ar.sglang"),
    *("baselines.dllm.static.scheduler", "repro.runs.system"),
    *("repro.families.dllm.system", "baselines.servers", "repro.families.http"),
    *("repro.families.http.system", "repro.serving", "repro.workloads"),
)
"""Plain Python over plain data: none of it, nor what it imports, loads torch."""

HEAVY = ("torch", "transformers", "datasets", "lm_eval", "vllm", "ray", "pandas", "matplotlib", "pyarrow")


@cache
def modules() -> dict[str, ast.Module]:
    found = {}
    for layer in LAYERS:
        for path in files(layer):
            parts = path.relative_to(REPO).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = tree(path)
    return found


def imports(module: ast.AST, *, lazy: bool, typed: bool = False) -> Iterator[str]:
    """What is imported when the module runs; ``lazy`` adds what its functions import when they are called, ``typed`` what only a
    type checker imports."""
    for node in ast.iter_child_nodes(module):
        if not isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
            continue
        if (
            isinstance(node, ast.If)
            and isinstance(node.test, ast.Name)
            and node.test.id == "TYPE_CHECKING"
            and not typed
        ):
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not lazy:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                own = f"{node.module}.{alias.name}"
                yield own if own in modules() else str(node.module)
        yield from imports(node, lazy=lazy, typed=typed)


@cache
def edges(*, lazy: bool, typed: bool = False) -> dict[str, set[str]]:
    return {
        name: set(imports(module, lazy=lazy, typed=typed)) & modules().keys() - {name}
        for name, module in modules().items()
    }


def check_acyclic(graph: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_there_is_no_cycle_among_modules():
    """Not even of imports inside functions, or for a type checker."""
    check_acyclic(edges(lazy=True, typed=True))


def test_there_is_no_cycle_among_packages():
    """The folders of a layer, each with all that is below it; a module directly in a layer stands for itself."""

    def package(name: str) -> str:
        return ".".join(name.split(".")[:2])

    found: dict[str, set[str]] = {}
    for name, targets in edges(lazy=True).items():
        found.setdefault(package(name), set()).update(map(package, targets))
    check_acyclic({name: targets - {name} for name, targets in found.items()})


LEAST_LINES = 90


def test_no_small_module_has_one_importer():
    """One that is imported inside functions alone is optional, or loaded by some runs only. Plug-ins have no importer."""
    importers: dict[str, list[str]] = {}
    for name, targets in edges(lazy=True).items():
        for target in targets:
            importers.setdefault(target, []).append(name)
    small = {
        name
        for name, (first, *others) in importers.items()
        if not others and name in edges(lazy=False)[first] and 0 < lines_of(name) < LEAST_LINES
    }
    assert small == set()


def lines_of(name: str) -> int:
    """Zero for a package."""
    path = REPO / f"{name.replace('.', '/')}.py"
    return text(path).count("\n") if path.is_file() else 0


def test_layers_import_downwards_alone():
    rank = {layer: i for i, layer in enumerate(LAYERS)}
    wrong = [
        (name, target)
        for name, targets in edges(lazy=True).items()
        for target in targets
        if rank[target.partition(".")[0]] > rank[name.partition(".")[0]]
    ]
    assert wrong == []


@pytest.mark.parametrize("leaf", LEAVES)
def test_leaves_know_no_engine(leaf):
    allowed = LEAVES[leaf]
    wrong = [
        (name, target)
        for name, targets in edges(lazy=True).items()
        if name == leaf or name.startswith(f"{leaf}.")
        for target in targets
        if not any(target == prefix or target.startswith(f"{prefix}.") for prefix in allowed | {"engines"})
        or target.startswith(("engines.dllm", "engines.ar", "engines.cluster", "engines.ampd", "engines.laps"))
    ]
    assert wrong == []


def reached(start: str) -> set[str]:
    """Modules that are loaded with those of a package or module, without calling anything."""
    graph, seen = edges(lazy=False), set[str]()
    waiting = [name for name in modules() if name == start or name.startswith(f"{start}.")]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += graph[name]
            parent = name.rpartition(".")[0]
            waiting += [parent] if parent in graph else []
    return seen


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_load_no_torch(policy):
    loaded = reached(policy)
    assert loaded
    direct = {
        name
        for name in loaded
        if {"torch", "triton"} & {i.partition(".")[0] for i in imports(modules()[name], lazy=False)}
    }
    assert direct == set()


ARITHMETIC = "engines.models.shape, engines.cost.roofline, engines.dllm.memory"
HARNESS = "repro.runs.step_driver, repro.runs.progress, repro.runs.sweep, repro.runs.family"
SIMULATION = (
    "from repro.runs.cell import Cell; from repro.runs.experiment import prepare\n"
    "knobs = (('num_prompts', 3), ('deployment', 'P:TP4x1 D:TP4x1'))\n"
    "prepare(Cell(system='dynamo-sim', dataset='toolbench', platform='h20x32', executor='roofline', rate=0.5, seed=0,"
    " knobs=knobs)).run()"
)
LIGHT = (
    (f"import {ARITHMETIC}, repro.reports.claims", (*HEAVY, "numpy", "yaml")),
    (f"import repro, {HARNESS}", (*HEAVY, "rich")),
    ("import repro.cli.main, repro.workloads, repro.checks.doctor", HEAVY),
    (SIMULATION, ("torch",)),
)
"""What one interpreter does in turn -> what must not be loaded by then."""


def test_what_is_light_loads_nothing_heavy():
    lines = [f"{done}\nfound += [[n for n in {barred} if n in sys.modules]]" for done, barred in LIGHT]
    code = "\n".join(["import sys", "found = []", *lines, "print(found)"])
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{[[]] * len(LIGHT)}\n", "")


def test_files_are_short_and_the_harness_has_few_modules_at_its_root():
    """At most 900 lines a file."""
    long = {
        str(path.relative_to(REPO)): lines
        for folder in LAYERS
        for path in files(folder)
        if (lines := len(text(path).splitlines())) > 900
    }
    assert long == {}
    assert len(list((REPO / "repro").glob("*.py"))) <= 12


def test_a_method_is_in_the_file_of_its_name():
    for name in ("llada", "dream", "fast_dllm", "sparse_dllm", "dllm_cache"):
        folder = REPO / "baselines" / "dllm"
        assert (folder / f"{name}.py").is_file() or Path(folder, name, "method.py").is_file()


def test_real_workers_and_policies_know_no_simulator():
    """Simulated, torch and live workers ask the same policies, and a policy does not know which of them does."""
    simulated = tuple(f"engines.cluster.{name}" for name in ("simulation", "worker", "decode"))
    real = ("engines.policies", "engines.ar.torch", "engines.server", "engines.ampd.policies")
    wrong = [
        (name, target)
        for name, targets in edges(lazy=True).items()
        if name.startswith(real)
        for target in targets
        if target.startswith(simulated)
    ]
    assert wrong == []
