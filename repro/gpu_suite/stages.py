"""What the GPU suite measures: cells and checks in order of worth, each with the seconds it should take.

Sizes are the paper's but for the number of requests, which saturates the card, so that a cell of LLaDA-8B takes a minute or
two on an H200; ``cpu-tiny`` runs the same stages at a size for tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from engines.dllm.config import EngineConfig
from engines.dllm.memory.budget import divide_memory
from engines.models.shape import model_shape
from repro.gpu_suite import prefill
from repro.gpu_suite.checks import check_cell
from repro.gpu_suite.prefill import MIXING, PREFILL
from repro.reports.figures import View, default_reading, figure
from repro.runs.cell import Cell, Scalar
from repro.systems.dllm.part import DllmPart
from repro.systems.dllm.settings import default_profile_every
from repro.systems.platforms import GB, MIB, Platform, platform

STEP_BATCHES, STEP_LENGTH = (1, 16, 64, 256), 256
"""Requests of the steps that are timed, and tokens of each."""

OURS = "dllm-serve"
COMPARED = (OURS, "fast-dllm", "sparse-dllm", "dllm-cache")
"""Fast-dLLM with its dual cache, its default."""
ONE_REFRESH: Mapping[str, Scalar] = {"refresh_delay": 0}
"""dLLM-Serve with a single refresh of each block, the faster of the two by the simulator: measured beside the published."""

FIRST = ("tests", MIXING, "throughput", "step", "small-card", "goldens", "profile", "shapes")
"""Stages of the first minutes on a card, in this order: what the verdict rests on. The suite has them first too."""

Knobs = Mapping[str, Scalar]


def title_of(cell: Cell) -> str:
    """The system, and what sets it apart from the same system beside it."""
    is_single = ONE_REFRESH.items() <= cell.knob_values.items()
    return f"{cell.system}, one refresh" if is_single else cell.system


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A cell of a stage; ``estimate_s`` None is what its simulated run says."""

    stage: str
    cell: Cell
    estimate_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A figure to draw once all its runs are there."""

    name: str
    view: View
    cells: tuple[Cell, ...]


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests of a data set, all there at once."""

    dataset: str
    num_prompts: int


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes of the suite on one platform."""

    where: Platform
    knobs: Knobs
    """Set in every cell."""
    first_knobs: Knobs
    """Set in the cells of the first minutes besides."""
    saturating: Load
    second: Load
    small_card: tuple[Load, Knobs]
    """Another memory: its load, and what all systems get; the packed one the smaller token budget besides."""
    packed_small: Knobs
    models: Mapping[str, Mapping[str, Knobs]]
    """Shapes beside the platform's own model, each saturated: with knobs of single systems."""
    shape_knobs: Knobs
    """Set in the cells of those shapes."""
    tests: str | None
    """Folders and files of the tests marked gpu; None where there are none."""
    golden_per_method: int
    agreement: tuple[tuple[str, str, str], ...]
    """(model, weights, platform of its prompts)."""
    agreement_prompts: int
    benchmarks: Mapping[str, str]
    """Script -> its options."""
    step_benchmarks: Mapping[str, str]
    """Likewise; what the verdict rests on."""
    figures: Mapping[str, tuple[tuple[float, ...], int]]
    """Name -> rates, the saturated one first, and requests per run."""
    cell_s: float | None = None
    """Seconds expected of a cell where no roofline tells."""
    check_s: Mapping[str, float] = field(default_factory=dict)


def scale_of(name: str, memory_bytes: int | None = None) -> Scale:
    """``memory_bytes`` is what the card that is there has; a platform that counts on more is held to it."""
    where = platform(name)
    return _tiny(where) if where.gpu is None else _card(where, memory_bytes)


def _card(where: Platform, memory_bytes: int | None) -> Scale:
    part = where.part(DllmPart)
    knobs: dict[str, Scalar] = {"weights": "random"}
    if memory_bytes is not None and memory_bytes < part.memory_bytes:
        where = where.with_part(DllmPart, memory_bytes=memory_bytes)
        knobs["memory_limit"] = memory_bytes
        part = where.part(DllmPart)
    rates = (part.rates[-1], part.rates[1])
    return Scale(
        where=where,
        knobs=knobs,
        # Half the paper's tokens: twenty minutes are to hold two loads and two shapes.
        first_knobs={"gen_length": 128, "steps": 128},
        saturating=Load(dataset="osc", num_prompts=256),
        second=Load(dataset="burst", num_prompts=256),
        small_card=(Load(dataset="osc", num_prompts=64), {"memory_limit": 24 * GB}),
        # The paper's token budget on its 24 GB card (Table 3).
        packed_small={"max_num_batched_tokens": 4000},
        # What dLLM-Cache does on Dream unless told otherwise lets members of a static batch fall out of step.
        models={"dream-7b": {"dllm-cache": {"alg": "entropy"}}},
        shape_knobs={"gen_length": 64, "steps": 64},
        tests="tests/gpu",
        golden_per_method=0,
        # In both precisions at once the full-size model takes 48 GB, and its float32 copy is made beside it.
        agreement=(
            ("tiny", "checkpoint", "cpu-tiny"),
            *((("llada-8b", "random", where.name),) if part.memory_bytes >= 64 * GB else ()),
        ),
        agreement_prompts=16,
        benchmarks={"attention": "", "kernels": "", "logits": "--model llada-8b"},
        # A Refresh of 256 requests is 65,536 rows: some 1.5 s, ten times a round.
        step_benchmarks={
            "peaks": "",
            "step": f"--model llada-8b --batch {' '.join(map(str, _step_batches(part)))} --length {STEP_LENGTH} --repeats 2 --warmup 1",
            "host": "",
        },
        figures=dict.fromkeys(("fig3", "fig4", "fig5", "table4", "fig7", "fig8", "growth"), (rates, 64)),
        check_s={
            "tests": 120.0,
            "goldens": 90.0,
            "agreement": 30.0,
            "benchmark": 60.0,
            "peaks": 10.0,
            "step": 150.0,
            "host": 30.0,
        },
    )


def _step_batches(part: DllmPart) -> list[int]:
    """Those whose pool and activations the card holds beside the weights."""
    shape, held = model_shape("llada-8b"), []
    for size in STEP_BATCHES:
        config = EngineConfig(
            max_num_batched_tokens=size * STEP_LENGTH,
            max_num_logits=part.max_num_logits,
            max_model_len=STEP_LENGTH,
            max_num_seqs=size,
        )
        rows = size * (config.sparsity.kept_rows(STEP_LENGTH - part.block_length) + part.block_length)
        if divide_memory(shape, part.memory_bytes, config, logit_rows="decomposed").kv_rows >= rows:
            held.append(size)
    return held


def _tiny(where: Platform) -> Scale:
    return Scale(
        where=where,
        knobs={"gen_length": 16, "steps": 8},
        first_knobs={},
        saturating=Load(dataset="osc", num_prompts=2),
        second=Load(dataset="burst", num_prompts=2),
        small_card=(Load(dataset="osc", num_prompts=2), {"memory_limit": 48 * MIB}),
        packed_small={"max_num_batched_tokens": 512},
        models={},
        shape_knobs={},
        tests=None,
        golden_per_method=1,
        agreement=(("tiny", "checkpoint", "cpu-tiny"),),
        agreement_prompts=2,
        benchmarks={"logits": "--rows 64 --max-num-logits 64 --repeats 1"},
        step_benchmarks={
            "peaks": "",
            "step": "--batch 1 4 --length 64 --block 8 --repeats 1 --warmup 1",
            "host": "--requests 64 --blocks 1",
        },
        figures={"table4": ((64.0,), 2)},
        cell_s=3.0,
        check_s={"goldens": 5.0, "agreement": 3.0, "benchmark": 10.0},
    )


def stages(scale: Scale) -> list[Planned]:
    """All cells in the order of worth; one that several stages ask for is run in the first."""
    first: dict[str, Planned] = {}
    for asked in _all(scale):
        first.setdefault(asked.cell.key, asked)
    return list(first.values())


def _all(scale: Scale) -> Iterator[Planned]:
    (small, small_knobs), first = scale.small_card, scale.first_knobs
    if scale.tests is not None:
        yield _check(scale, "tests", "GPU_TESTS", "tests", paths=scale.tests)
    yield from _prefill(scale, MIXING)
    yield from _saturated(scale, "throughput", scale.saturating, first)
    yield from _benchmarks(scale, "step", scale.step_benchmarks)
    yield from _saturated(scale, "small-card", small, {**small_knobs, **first}, {OURS: scale.packed_small})
    yield _check(scale, "goldens", "GOLDENS", "goldens", per_method=scale.golden_per_method)
    every = default_profile_every(scale.where.part(DllmPart).device)
    # A run of its own: profiling disturbs.
    yield _cell(scale, "profile", OURS, scale.saturating, {"profile_every": every, **first})
    for model, own in scale.models.items():
        yield from _saturated(scale, "shapes", scale.saturating, {"model": model, **scale.shape_knobs}, own)
    yield from _prefill(scale, PREFILL)
    yield from _saturated(scale, "paper-length", scale.saturating, {})
    yield from _saturated(scale, "burst", scale.second, {})
    yield from _benchmarks(scale, "kernels", scale.benchmarks)
    for model, weights, prompts_of in scale.agreement:
        yield _check(
            scale,
            "agreement",
            "AGREEMENT",
            "agreement",
            model=model,
            weights=weights,
            prompts_of=prompts_of,
            num_prompts=scale.agreement_prompts,
        )
    for drawn in figures(scale):
        yield from (Planned(stage="figures", cell=cell, estimate_s=scale.cell_s) for cell in drawn.cells)


def _check(scale: Scale, stage: str, name: str, kind: str, **knobs: Scalar) -> Planned:
    cell = check_cell(name, scale.where.name, **knobs)
    return Planned(stage=stage, cell=cell, estimate_s=scale.check_s[kind])


def _prefill(scale: Scale, stage: str) -> Iterator[Planned]:
    memory_bytes = None if scale.where.gpu is None else scale.where.part(DllmPart).memory_bytes
    for script in prefill.scripts(stage, memory_bytes):
        cell = check_cell("BENCHMARK", scale.where.name, script=script.name, options=script.options)
        yield Planned(stage=stage, cell=cell, estimate_s=script.estimate_s)


def _benchmarks(scale: Scale, stage: str, scripts: Mapping[str, str]) -> Iterator[Planned]:
    for script, options in scripts.items():
        kind = script if script in scale.check_s else "benchmark"
        on_device = {} if script != "host" else {"has_device": False}
        yield _check(scale, stage, "BENCHMARK", kind, script=script, options=options, **on_device)


def _saturated(
    scale: Scale, stage: str, load: Load, knobs: Knobs, own: Mapping[str, Knobs] | None = None
) -> Iterable[Planned]:
    """Every system, in one run of the suite; ``own`` are knobs of single ones. Ours is also served with a single refresh."""
    for system in COMPARED:
        every = {**knobs, **(own or {}).get(system, {})}
        yield _cell(scale, stage, system, load, every)
        if system == OURS:
            yield _cell(scale, stage, system, load, {**every, **ONE_REFRESH})


def _cell(scale: Scale, stage: str, system: str, load: Load, knobs: Knobs) -> Planned:
    cell = Cell(
        figure="saturation",
        system=system,
        dataset=load.dataset,
        platform=scale.where.name,
        executor="torch",
        rate=None,
        seed=0,
        knobs=tuple({**scale.knobs, "num_prompts": load.num_prompts, **knobs}.items()),
    )
    return Planned(stage=stage, cell=cell, estimate_s=scale.cell_s)


def figures(scale: Scale) -> Sequence[Drawn]:
    """Measured on the platform, whatever its default."""
    drawn = []
    for name, (rates, num_prompts) in scale.figures.items():
        where = replace(scale.where, executor="torch")
        view = View(
            platform=where,
            reading=default_reading(where),
            knobs=tuple({"num_prompts": num_prompts, **scale.knobs}.items()),
            rates=tuple(sorted(rates)),
            is_grouped=False,
        )
        order = {rate: i for i, rate in enumerate(rates)}
        cells = [view.applied(cell) for cell in figure(name).load().cells(view)]
        cells.sort(key=lambda cell: 0 if cell.rate is None else order[cell.rate])
        drawn.append(Drawn(name=name, view=view, cells=tuple(cells)))
    return drawn
