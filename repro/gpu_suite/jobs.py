"""What the GPU suite measures: a list of jobs per platform, in order of worth, each with the seconds it should take.

A job is a stored run of a cell, or a JSON file with what it found. Sizes are the paper's but for fewer requests, so
that a cell of LLaDA-8B takes a minute or two on an H200; ``cpu-tiny`` runs the same stages at a size for tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from engines.errors import UserError
from repro.paths import REPO
from repro.reports.figures import FIGURES, View, default_reading
from repro.runs.cell import Cell, Scalar
from repro.runs.store import Store
from repro.systems.platforms import GB, MIB, Platform, platform
from repro.systems.settings import default_profile_every

OURS = "dllm-serve"
SYSTEMS = (OURS, "fast-dllm", "sparse-dllm", "dllm-cache")
"""Fast-dLLM with its dual cache, its default."""

BENCHMARKS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "peaks": (),
        "attention": (),
        "kernels": (),
        "logits": ("--model", "llada-8b"),
        "step": ("--model", "llada-8b", "--batch", "1", "8", "32", "--length", "512"),
    }
)
"""Script in ``benchmarks`` -> its options on a card."""
SLOWER_THAN_PEAK = 2.5
"""Times datasheet peaks that a step is expected to take."""
STEP_OVERHEAD_S, PREPARATION_S = 0.02, 15.0
"""Expected of a step besides what the roofline charges, and of a cell before its first step."""

Facts = Mapping[str, Any]


class JobFailedError(RuntimeError):
    """A job ran to its end and what it found is not as it must be; ``facts`` say what."""

    def __init__(self, message: str, facts: Facts) -> None:
        super().__init__(message)
        self.facts = facts


@dataclass(frozen=True, kw_only=True)
class Job:
    """``kind``: estimates of one kind err alike."""

    stage: str
    name: str
    """Of a file, unique in the suite."""
    kind: str
    estimate_s: float
    run: Callable[[float], Facts]
    """Given the seconds it may take at most, which only a process of its own can be held to."""
    cell: Cell | None = None
    """Prepared; where there is one the stored run says whether the job is done."""
    needs: tuple[str, ...] = ()
    """Jobs that come first."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    name: str
    rates: tuple[float, ...]
    num_requests: int


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes of the suite on one platform."""

    platform: Platform
    weights: str
    has_tests: bool
    golden_per_method: int | None
    """Cases replayed of each method; None is all."""
    agreement: tuple[tuple[str, str], ...]
    """(model, weights) of each comparison."""
    agreement_prompts: int
    systems: tuple[str, ...]
    requests: Mapping[str, int]
    """Data set -> requests at once of a throughput cell."""
    limits: tuple[tuple[int, Mapping[str, Scalar]], ...]
    """(bytes, settings of the packed systems that go with so little)."""
    gen_length: int | None
    """Shorter than the platform's, where given."""
    figures: tuple[Figure, ...]
    growth: bool
    benchmarks: Mapping[str, tuple[str, ...]]
    """Script -> its options."""
    cell_s: float | None = None
    """Of a cell where no roofline tells."""
    other_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def device(self) -> str:
        return self.platform.device

    @property
    def knobs(self) -> dict[str, Scalar]:
        shorter: dict[str, Scalar] = (
            {} if self.gen_length is None else {"gen_length": self.gen_length, "steps": self.gen_length}
        )
        return {**({} if self.weights == "checkpoint" else {"weights": self.weights}), **shorter}


_SMALL_CARD: Mapping[str, Scalar] = MappingProxyType({"max_num_batched_tokens": 4000})
"""The paper's token budget on its 24 GB card (Table 3)."""


def _card_scale(where: Platform) -> Scale:
    limits = [(24 * GB, _SMALL_CARD), (48 * GB, MappingProxyType({})), (where.memory_bytes, MappingProxyType({}))]
    # Saturated first: it is the rate that three of the figures share.
    rates = (where.rates[-1], where.rates[1])
    figures = tuple(
        Figure(name=name, rates=rates, num_requests=16) for name in ("fig3", "fig4", "fig5", "table4", "fig7", "fig8")
    )
    return Scale(
        platform=where,
        weights="random",
        has_tests=True,
        golden_per_method=None,
        # In both precisions at once the full-size model takes 48 GB, and its float32 copy is made beside it.
        agreement=(("tiny", "checkpoint"), *((("llada-8b", "random"),) if where.memory_bytes >= 64 * GB else ())),
        agreement_prompts=16,
        systems=SYSTEMS,
        requests=MappingProxyType({"osc": 32, "burst": 16}),
        # The whole card first: it is what the card's own numbers are.
        limits=tuple(reversed([limit for limit in limits[:-1] if limit[0] < where.memory_bytes] + [limits[-1]])),
        gen_length=None,
        figures=figures,
        growth=True,
        benchmarks=BENCHMARKS,
        other_s=MappingProxyType({"tests": 120.0, "goldens": 90.0, "agreement": 30.0, "benchmark": 60.0, "draw": 15.0}),
    )


def _tiny_scale(where: Platform) -> Scale:
    return Scale(
        platform=where,
        weights="checkpoint",
        has_tests=False,
        golden_per_method=1,
        agreement=(("tiny", "checkpoint"),),
        agreement_prompts=2,
        systems=(OURS, "sparse-dllm"),
        requests=MappingProxyType({"osc": 2}),
        limits=(
            (where.memory_bytes, MappingProxyType({})),
            (48 * MIB, MappingProxyType({"max_num_batched_tokens": 512})),
        ),
        gen_length=16,
        figures=(Figure(name="table4", rates=(8.0,), num_requests=2),),
        growth=False,
        benchmarks=MappingProxyType({"peaks": (), "nosuch": ()}),
        cell_s=3.0,
        other_s=MappingProxyType({"goldens": 5.0, "agreement": 3.0, "benchmark": 10.0, "draw": 5.0}),
    )


def scale_of(name: str) -> Scale:
    where = platform(name)
    return _tiny_scale(where) if where.gpu is None else _card_scale(where)


def all_jobs(scale: Scale, root: Path) -> list[Job]:
    """In the order they are run. Cells are prepared: what cannot run is refused here, before anything does."""
    jobs = [
        *_test_jobs(scale),
        *_golden_jobs(scale),
        *_agreement_jobs(scale),
        *_throughput_jobs(scale, root),
        *_growth_jobs(scale, root),
        *_benchmark_jobs(scale, root),
        *_figure_jobs(scale, root),
    ]
    first: dict[str, Job] = {}
    for job in jobs:  # figures share cells: the first that asks for one runs it
        first.setdefault(job.name, job)
    return list(first.values())


def runs_of(root: Path) -> Path:
    return root / "runs"


# -- correctness ------------------------------------------------------------------------------------------


def _test_jobs(scale: Scale) -> Iterable[Job]:
    if scale.has_tests:
        yield Job(stage="tests", name="gpu-tests", kind="tests", estimate_s=scale.other_s["tests"], run=_run_tests)


def _run_tests(limit_s: float) -> Facts:
    done = _process([sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "tests"], limit_s)
    facts = {"returncode": done.returncode, "output": done.stdout[-4000:]}
    if done.returncode == 5:
        return {**facts, "note": "no test is marked gpu"}
    if done.returncode != 0:
        raise JobFailedError(_last_line(done), facts)
    return {**facts, "note": _last_line(done)}


def _golden_jobs(scale: Scale) -> Iterable[Job]:
    yield Job(
        stage="goldens",
        name="goldens",
        kind="goldens",
        estimate_s=scale.other_s["goldens"],
        run=lambda _: _run_goldens(scale.device, scale.golden_per_method),
    )


def _run_goldens(device: str, per_method: int | None) -> Facts:
    from repro.checks.goldens import GOLDEN_DIR, METHODS, read_cases, verify

    cases = [case for case in read_cases(GOLDEN_DIR) if case.required]
    chosen = [case for name in METHODS for case in [c for c in cases if c.method == name][:per_method]]
    results = verify(chosen, device=device)
    methods = {
        name: {"cases": len(own), "passed": sum(result.passed for result in own)}
        for name in METHODS
        if (own := [result for result in results if result.case.method == name])
    }
    failed = {result.case.id: result.difference for result in results if not result.passed}
    passed = len(results) - len(failed)
    facts = {
        "device": device,
        "dtype": "float32",
        "cases": len(results),
        "passed": passed,
        "methods": methods,
        "failed": failed,
        "note": f"{passed} of {len(results)} cases",
    }
    if failed:
        name, difference = next(iter(failed.items()))
        raise JobFailedError(
            f"{len(failed)} of {len(results)} golden cases differ, the first: {name}: {difference}", facts
        )
    return facts


def _agreement_jobs(scale: Scale) -> Iterable[Job]:
    for model, weights in scale.agreement:
        yield Job(
            stage="agreement",
            name=f"agreement-{model}",
            kind="agreement",
            estimate_s=scale.other_s["agreement"],
            run=lambda _, model=model, weights=weights: _run_agreement(scale, model, weights),  # type: ignore[misc]
        )


def _run_agreement(scale: Scale, model: str, weights: str) -> Facts:
    from repro.checks.agreement import load_pair, top1_agreement
    from repro.runs.experiment import prepare

    # Prompts of the data set in the lengths of the platform that serves the model.
    where = scale.platform if model == scale.platform.model else platform("cpu-tiny")
    knobs: dict[str, Scalar] = {"num_requests": scale.agreement_prompts}
    if weights == "random":
        knobs["weights"] = weights
    cell = Cell(
        system=OURS,
        dataset="burst",
        platform=where.name,
        executor="torch",
        rate=None,
        seed=0,
        knobs=tuple(knobs.items()),
    )
    requests = prepare(cell).workload.requests
    forget_models()
    exact, rounded = load_pair(model, weights=weights, device=scale.device)  # type: ignore[arg-type]
    found = top1_agreement(exact, rounded, requests).to_dict()
    return {
        "model": model,
        "weights": weights,
        "device": scale.device,
        "prompts": "burst",
        **found,
        "note": f"{100 * found['share']:.2f} % of {found['n']} masked positions",
    }


# -- cells ------------------------------------------------------------------------------------------------


def _throughput_jobs(scale: Scale, root: Path) -> Iterable[Job]:
    """Saturation: every request there at once. The profiled run is a run of its own: profiling disturbs."""
    where = scale.platform
    plain, profiled = [], []
    for dataset, num_requests in scale.requests.items():
        for memory_bytes, small in scale.limits:
            for system in scale.systems:
                knobs: dict[str, Scalar] = {**scale.knobs, "num_requests": num_requests}
                if memory_bytes != where.memory_bytes:
                    knobs |= {"memory_bytes": memory_bytes, **(small if system == OURS else {})}
                cell = Cell(
                    figure="saturation",
                    system=system,
                    dataset=dataset,
                    platform=where.name,
                    executor="torch",
                    rate=None,
                    seed=0,
                    knobs=tuple(knobs.items()),
                )
                plain.append(_cell_job(scale, "throughput", cell, root))
                if system == OURS:
                    every = default_profile_every(scale.device)
                    taken_apart = replace(cell, knobs=(*cell.knobs, ("profile_every", every)))
                    profiled.append(_cell_job(scale, "profile", taken_apart, root))
    return [*plain, *profiled]


def _growth_jobs(scale: Scale, root: Path) -> Iterable[Job]:
    if scale.growth:
        yield from _figure_of(scale, Figure(name="growth", rates=scale.platform.rates, num_requests=1), "growth", root)


def _figure_jobs(scale: Scale, root: Path) -> Iterable[Job]:
    for figure in scale.figures:
        yield from _figure_of(scale, figure, "figures", root)


def figure_view(scale: Scale, figure: Figure) -> View:
    """Measured on the platform, whatever its default."""
    where = replace(scale.platform, executor="torch", rates=tuple(sorted(figure.rates)))
    knobs = {"num_requests": figure.num_requests, **scale.knobs}
    return View(platform=where, reading=default_reading(where), knobs=tuple(knobs.items()))


def _figure_of(scale: Scale, figure: Figure, stage: str, root: Path) -> Iterable[Job]:
    view, module = figure_view(scale, figure), FIGURES[figure.name].load()
    order = {rate: i for i, rate in enumerate(figure.rates)}
    wanted = sorted(module.cells(view), key=lambda cell: 0 if cell.rate is None else order[cell.rate])
    jobs = [_cell_job(scale, stage, view.applied(cell), root) for cell in wanted]
    yield from jobs
    yield Job(
        stage=stage,
        name=f"draw-{figure.name}",
        kind="draw",
        estimate_s=scale.other_s["draw"],
        run=lambda _: _draw(figure, view, [job.cell for job in jobs if job.cell is not None], root),
        needs=tuple(job.name for job in jobs),
    )


def _draw(figure: Figure, view: View, cells: Sequence[Cell], root: Path) -> Facts:
    store = Store(runs_of(root))
    rendered = (
        FIGURES[figure.name]
        .load()
        .render([store.load(cell, with_steps=False) for cell in cells], view, root / "figures")
    )
    return {
        "files": [str(path.relative_to(root)) for path in rendered.files],
        "notes": list(rendered.notes),
        "note": ", ".join(path.name for path in rendered.files),
    }


def _cell_job(scale: Scale, stage: str, cell: Cell, root: Path) -> Job:
    from repro.runs.experiment import prepare

    prepared = prepare(cell).cell
    return Job(
        stage=stage,
        name=prepared.folder_name,
        kind=f"cell of {cell.system}",
        estimate_s=scale.cell_s or expected_cell_s(cell),
        run=lambda _: _run_cell(prepared, root),
        cell=prepared,
    )


def _run_cell(cell: Cell, root: Path) -> Facts:
    from repro.runs.experiment import run_cell
    from repro.runs.runner import run_cells

    store = Store(runs_of(root))
    (outcome,) = run_cells([cell], run_cell, store)
    run = store.load(cell, with_steps=False)
    facts = {"throughput_tok_s": run.summary["throughput_tok_s"], "valid": run.validity.valid}
    if outcome.validity is not None and not outcome.validity.valid:
        raise JobFailedError(f"INVALID: {'; '.join(outcome.validity.reasons)}", facts)
    throughput = facts["throughput_tok_s"]
    return {**facts, "note": "-" if throughput is None else f"{throughput:.1f} tok/s"}


def expected_cell_s(cell: Cell) -> float:
    """From the simulated run of the same cell, at what a card reaches of its peaks."""
    from repro.runs.experiment import prepare, run

    left_out = ("weights", "device", "dtype", "profile_every", "basis")
    knobs = tuple(knob for knob in cell.knobs if knob[0] not in left_out)
    record = run(prepare(replace(cell, executor="roofline", knobs=knobs)))
    last_arrival = max(record.requests["arrival_s"])
    busy = sum(record.steps["duration_s"])
    return round(PREPARATION_S + max(last_arrival, SLOWER_THAN_PEAK * busy + STEP_OVERHEAD_S * record.num_steps), 1)


# -- benchmarks -------------------------------------------------------------------------------------------


def _benchmark_jobs(scale: Scale, root: Path) -> Iterable[Job]:
    for name in scale.benchmarks:
        yield Job(
            stage="benchmarks",
            name=f"benchmark-{name}",
            kind=f"benchmark {name}",
            estimate_s=scale.other_s["benchmark"],
            run=lambda limit_s, name=name: _run_benchmark(name, scale, root, limit_s),  # type: ignore[misc]
        )


def _run_benchmark(name: str, scale: Scale, root: Path, limit_s: float) -> Facts:
    script = REPO / "benchmarks" / f"{name}.py"
    if not script.is_file():
        return {"note": f"benchmarks/{name}.py does not exist: nothing was measured"}
    forget_models()
    rows = root / "benchmarks" / f"{name}.json"
    rows.parent.mkdir(parents=True, exist_ok=True)
    takes_json = "--json" in script.read_text(encoding="utf-8")
    where = ["--json", str(rows.resolve())] if takes_json else []
    done = _process([sys.executable, str(script), *where, *scale.benchmarks[name]], limit_s)
    facts = {"returncode": done.returncode, "output": (done.stdout + done.stderr)[-4000:]}
    if done.returncode != 0:
        raise JobFailedError(_last_line(done), facts)
    note = f"{rows.relative_to(root)}" if rows.is_file() else (done.stdout.strip().splitlines() or ["no output"])[0]
    return {**facts, "note": note}


# -- helpers ----------------------------------------------------------------------------------------------


def forget_models() -> None:
    """Give the memory of loaded models back to the device, and lift a limit that a run has left."""
    import gc

    import torch

    from engines.runtime.memory_limit import limit_memory
    from repro.systems import backend

    backend.load.cache_clear()
    gc.collect()
    if torch.cuda.is_available():
        limit_memory(torch.device("cuda"), None)


def _process(command: Sequence[str], limit_s: float) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (str(REPO), os.environ.get("PYTHONPATH"))))
    try:
        return subprocess.run(
            command,
            cwd=REPO,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
            timeout=max(1.0, limit_s),
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"{' '.join(command[1:3])} did not end within {limit_s:.0f} s: give a larger --budget"
        ) from error


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stdout + done.stderr).strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"
