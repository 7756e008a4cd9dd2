"""Three readings of a baseline: as published, in our implementation, and its cache policy alone."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from support.cells import CPU_TINY, a_cell
from support.engine_runs import Recorder
from support.refusals import refuses
from support.tables import data_beside

from baselines.dllm.dllm_cache.method import PackedFeatureCacheRooflineExecutor as Executor
from baselines.dllm.dllm_cache.method import memory_bytes_per_token, packed_work
from baselines.dllm.dllm_cache.schedule import FeatureCacheConfig
from engines.cost.roofline import L40S, Roofline
from engines.dllm.config import EngineConfig, GenerationConfig, Phase
from engines.dllm.engine import Engine
from engines.dllm.plan import PlanItem, Request, StepOutcome, StepPlan
from engines.errors import UserError
from engines.knobs import knobs_of
from engines.models.loader import load_model
from engines.models.shape import LLADA_8B
from repro.families.dllm import on_torch
from repro.families.dllm.deployment import DllmDeployment
from repro.families.dllm.record import DLLM
from repro.families.dllm.settings import BATCH_RULES, READINGS, BaselineKnobs, DllmSettings
from repro.reports.figures import View
from repro.runs.cell import Cell, Scalar
from repro.runs.experiment import Experiment, prepare

DATA = data_beside(__file__, "readings")

BASELINES = ("fast-dllm", "dllm-cache", "sparse-dllm", "llada")
SMALL = {"num_prompts": 24, "gen_length": 64, "steps": 64}
"""Quick, and in several batches."""
TINY = {"num_prompts": 12, "gen_length": 32, "steps": 32, "length_scale": 0.1}
SHORTEST = {"num_prompts": 3, "gen_length": 16, "block_length": 8, "steps": 16}


def cell_of(system: str, platform: str = "rtx4090", rate: float | None = None, **knobs: Scalar) -> Cell:
    executor = "torch" if platform == "cpu-tiny" else "roofline"
    return a_cell(system, platform=platform, executor=executor, rate=rate, **knobs)


def planned(cell: Cell) -> DllmDeployment:
    deployment = prepare(cell).deployment
    assert isinstance(deployment, DllmDeployment)
    return deployment


@contextmanager
def served(experiment: Experiment) -> Iterator[tuple[Engine, DllmDeployment]]:
    assert isinstance(experiment.deployment, DllmDeployment)
    with experiment.deployment.serving() as (engine, measured):
        yield engine, measured


def facts_of(cell: Cell) -> Mapping[str, Any]:
    with served(prepare(cell)) as (_, measured):
        return measured.facts


# ---- knobs --------------------------------------------------------------------------------------


def test_parallel_decoding_needs_a_batch_of_one_or_continuous_batching():
    for reading in ("published", "efficient"):
        with pytest.raises(UserError, match=r"threshold=0\.9: parallel .*add --batch-size 1"):
            prepare(cell_of("fast-dllm", "cpu-tiny", reading=reading, threshold=0.9))
    assert prepare(cell_of("fast-dllm", "cpu-tiny", reading="policy", threshold=0.9)).deployment.batch_size is None
    assert prepare(cell_of("fast-dllm", "cpu-tiny", batch_rule="one", threshold=0.9)).deployment.batch_size == 1


@pytest.mark.parametrize("reading", READINGS)
def test_a_reading_heeds_its_knobs(reading):
    packed = {"max_num_batched_tokens": 3000, "max_num_logits": 700, "logit_rows": "monolithic"}
    knobs = {"scheduler": "request", **packed} if reading == "policy" else {"batch_size": 3}
    default, asked = (planned(cell_of("sparse-dllm", reading=reading, **extra)) for extra in ({}, knobs))
    heeded = {
        name
        for kind in (DllmSettings, BaselineKnobs)
        for name, knob in knobs_of(kind).items()
        if reading in knob.only.values.get("reading", ()) and "executor" not in knob.only.values
    }
    assert set(knobs) == heeded - {"batch_rule"}  # decides what batch_size does
    if reading == "policy":
        config = asked.config
        assert (config.scheduler, config.max_num_batched_tokens, config.max_num_logits) == ("request", 3000, 700)
        assert asked.kv_rows < default.kv_rows
    else:
        assert asked.batch_size == 3 != default.batch_size


@pytest.mark.parametrize("system", BASELINES)
def test_published_is_the_default_of_a_simulation(system):
    """Asked for or not, it is the same run: a figure's and that of a command share it."""
    readings = ({}, {"reading": "published"}, {"reading": "efficient"})
    default, named, efficient = (prepare(cell_of(system, **SMALL, **extra)) for extra in readings)
    assert default.cell == named.cell
    assert default.run().tables == named.run().tables
    assert efficient.cell.key != default.cell.key
    # A stored cell that is asked for again is itself.
    assert {prepare(each.cell).cell for each in (default, efficient)} == {default.cell, efficient.cell}


@pytest.mark.parametrize("system", BASELINES)
def test_efficient_is_the_default_of_a_measurement(system):
    readings = ({}, {"reading": "efficient"})
    default, named = (prepare(cell_of(system, "cpu-tiny", num_prompts=2, **extra)) for extra in readings)
    assert isinstance(default.deployment, DllmDeployment)
    assert default.deployment.settings.baseline.reading == "efficient"
    assert default.cell.key == named.cell.key


def test_the_reading_that_was_every_cells_default_leaves_the_key_as_it_was():
    """Keys of runs stored while it was: a measured one, and a simulated one as figures asked for it."""
    assert cell_of("fast-dllm", reading="efficient").key == cell_of("fast-dllm").key == "8a7497f5f831"
    assert cell_of("fast-dllm", reading="published").key != "8a7497f5f831"


# ---- published ----------------------------------------------------------------------------------

BATCHING_UPSTREAM = ("fast-dllm", "dllm-cache")
CARD_BYTES = {"rtx4090": (24 * 10**9, 4000), "l40s": (48 * 10**9, 4096)}
"""Memory, and max_model_len."""


def published_batch(system: str, platform: str, tokens: int) -> int:
    """What is left beside weights and guard band, over one member: activations and cache of all its tokens, and logits
    with their copies: a float64 one and its softmax of every row, or a 16-bit softmax of the response's."""
    memory, _ = CARD_BYTES[platform]
    if system == "fast-dllm":
        each = tokens * (LLADA_8B.activation_bytes_per_query_token + 126464 * 18 + LLADA_8B.kv_bytes_per_token)
    else:
        each = tokens * (LLADA_8B.activation_bytes_per_query_token + memory_bytes_per_token(LLADA_8B))
        each += 256 * 126464 * 4
    return max(1, (memory - LLADA_8B.weight_bytes - memory // 20) // each)


@pytest.mark.parametrize("platform", CARD_BYTES)
@pytest.mark.parametrize("system", BATCHING_UPSTREAM)
@pytest.mark.parametrize("input_len", [100, 650, 2000])
def test_published_batches_follow_their_rule(system, platform, input_len):
    def found(**knobs: Scalar) -> tuple[int, str]:
        lengths: dict[str, Scalar] = {"input_len": input_len, "length_scale": 1.0, **knobs}
        facts = facts_of(cell_of(system, platform, reading="published", **lengths))
        assert "batch_peak_bytes" not in facts
        return facts["batch_size"], facts["batch_obtained"]

    _, max_model_len = CARD_BYTES[platform]
    workload = "largest that holds the workload's longest request, in published code's memory"
    assert found() == found(batch_rule="workload") == (published_batch(system, platform, input_len + 256), workload)
    longest = "largest that holds requests of max_model_len tokens, in published code's memory"
    assert found(batch_rule="max_model_len") == (published_batch(system, platform, max_model_len), longest)
    assert found(batch_rule="one") == (1, "one request at a time, in published code's memory")
    assert found(num_prompts=1)[0] == 1


@pytest.mark.parametrize("system", BASELINES)
def test_rules_of_our_own_batches_are_the_memory_models(system):
    """The largest with ``max_model_len`` is the largest of a workload of such requests."""

    def efficient(**knobs: Scalar) -> Cell:
        return cell_of(system, "l40s", reading="efficient", **knobs)

    size = {name: facts_of(efficient(batch_rule=name))["batch_size"] for name in BATCH_RULES}
    longest = facts_of(efficient(input_len=4096 - 256, length_scale=1.0))
    assert size["max_model_len"] == longest["batch_size"]
    assert size["one"] == 1 < size["max_model_len"] < size["workload"]
    asked = prepare(efficient(**SMALL, batch_rule="max_model_len")).run()
    assert asked.tables == prepare(efficient(**SMALL, batch_size=size["max_model_len"])).run().tables


def test_requests_that_published_code_cannot_hold_are_counted_and_run():
    """4000 tokens with logits in 16 bits, their float64 copies and their softmax, do not fit beside 16 GB of
    weights; Sparse-dLLM's 16-bit softmax does."""
    longest: dict[str, Scalar] = {"input_len": 3744, "length_scale": 1.0, "num_prompts": 5}
    counts = {
        (system, platform): facts_of(cell_of(system, platform, reading="published", **longest))["oom_requests"]
        for system, platform in product(BASELINES, CARD_BYTES)
    }
    assert counts == {key: 5 if key == ("fast-dllm", "rtx4090") else 0 for key in counts}

    cell = cell_of("fast-dllm", reading="published", num_prompts=50)
    experiment = prepare(replace(cell, dataset="burst"))
    lengths = [request.total_len for request in experiment.workload.requests]
    # Weights, guard band, activations, logits in 2 + 8 + 8 bytes, and K and V of every token.
    each = LLADA_8B.activation_bytes_per_query_token + 126464 * 18 + LLADA_8B.kv_bytes_per_token
    held = LLADA_8B.weight_bytes + 1_200_000_000
    expected = sum(held + length * each > 24 * 10**9 for length in lengths)
    assert 0 < expected < len(lengths)
    facts = experiment.run().manifest["facts"]
    assert facts["oom_requests"] == expected
    assert "oom_requests" not in facts_of(cell_of("fast-dllm", reading="efficient"))


def test_other_confidences_of_dream_move_what_they_store():
    """Probabilities, their logarithm, the product and its sum: written and read, 8 passes in place of 2."""
    per_value = {
        alg: planned(cell_of("sparse-dllm", model="dream-7b", alg=alg)).sampler.reduction_traffic_per_value(2)
        for alg in ("maskgit_plus", "entropy")
    }
    assert per_value == {"maskgit_plus": 4, "entropy": 16}


@pytest.mark.parametrize("system", BASELINES)
def test_on_a_real_executor_published_code_differs_in_the_batch_alone(system):
    scarce: dict[str, Scalar] = {**TINY, "memory_limit": 14 * 2**20}
    cells = {reading: cell_of(system, "cpu-tiny", reading=reading, **scarce) for reading in ("published", "efficient")}
    facts = {reading: facts_of(cell) for reading, cell in cells.items()}
    assert facts["published"]["batch_size"] < facts["efficient"]["batch_size"]
    assert facts["published"]["batch_size"] == 1 or system not in ("sparse-dllm", "llada")
    assert "oom_requests" not in facts["published"]
    rule = "largest that holds the workload's longest request, by the measured peak, up to"
    assert facts["published"]["batch_obtained"].startswith(rule)
    assert facts["published"]["batch_peak_bytes"] < facts["efficient"]["batch_peak_bytes"]


def test_on_a_real_executor_a_rule_decides_what_is_measured():
    def found(**knobs: Scalar) -> int:
        return facts_of(cell_of("fast-dllm", "cpu-tiny", **{**TINY, "memory_limit": 48 * 2**20, **knobs}))["batch_size"]

    longest = found(input_len=768 - 32, length_scale=1.0)
    assert found(batch_rule="one") == 1 < found(batch_rule="max_model_len") == longest < found(batch_rule="workload")


# ---- policy -------------------------------------------------------------------------------------


def serve(cell: Cell) -> tuple[list[StepPlan], list[tuple[int, ...] | None]]:
    """Everything at once; the plans, and the ids by request."""
    experiment = prepare(cell)
    with served(experiment) as (engine, _):
        recorder = engine.executor = Recorder(engine.executor)
        for request in experiment.workload.requests:
            engine.submit(request)
        engine.run()
        return recorder.plans, [engine.take_output(request.request_id) for request in experiment.workload.requests]


SCARCE: dict[str, dict[str, Scalar]] = {
    "cpu-tiny": {**TINY, **SHORTEST, "num_prompts": 7, "memory_limit": 13 * 2**20, "max_num_batched_tokens": 230},
    "rtx4090": SMALL,
    "l40s": {**SMALL, "max_num_batched_tokens": 4096},
}
"""So that scheduling has something to decide."""


@pytest.mark.parametrize("platform", SCARCE)
@pytest.mark.parametrize("scheduler", ["phase", "request"])
def test_sparse_dllms_policy_is_dllm_serve_but_for_its_decoding(platform, scheduler):
    """Same plans step by step, on both executors: only how tokens are chosen differs."""
    shared: dict[str, Scalar] = {**SCARCE[platform], "scheduler": scheduler}
    policy, _ = serve(cell_of("sparse-dllm", platform, reading="policy", **shared))
    ours, _ = serve(cell_of("dllm-serve", platform, selection="uniform", refresh_delay=1, **shared))
    assert policy == ours
    assert len({len(plan.items) for plan in policy}) >= 2
    assert {item.phase for plan in policy for item in plan.items} == {Phase.FULL, Phase.BUILD, Phase.REUSE}


def test_the_same_policy_makes_the_same_plans_on_both_executors():
    """The tiny model's memory plan with measured activations against itself."""
    experiment = prepare(cell_of("sparse-dllm", "cpu-tiny", reading="policy", **TINY))
    plans = []
    with served(experiment) as (real, measured):
        roofline = Roofline(measured.settings.shape, L40S)
        simulated = Engine(
            measured.scheduler(), measured.method.packed_roofline(roofline, measured.config, measured.sampler)
        )
        for engine in (real, simulated):
            recorder = engine.executor = Recorder(engine.executor)
            for request in experiment.workload.requests:
                engine.submit(request)
            engine.run()
            plans.append(recorder.plans)
    assert plans[0] == plans[1]


@pytest.mark.parametrize(("system", "knobs"), DATA["a_reading_changes_no_token"], ids=str)
def test_a_reading_changes_no_token(monkeypatch, system, knobs):
    """In float64, where no two candidates are close enough for another order of sums to decide."""
    model = load_model("tiny").double()
    monkeypatch.setattr(on_torch, "load", lambda *_: model)
    shared: dict[str, Scalar] = {**TINY, **SHORTEST, **knobs}
    # In batches of 2 and 1, or one by one as published; to search for the largest would take longer.
    sizes = {
        "published": {"batch_size": 2 if system in BATCHING_UPSTREAM else 1},
        "efficient": {"batch_size": 2},
        "policy": {},
    }
    published, efficient, policy = (
        serve(cell_of(system, "cpu-tiny", reading=reading, **shared, **sizes[reading]))[1] for reading in READINGS
    )
    assert published == efficient == policy
    assert len(set(policy)) == 3
    assert None not in policy


@pytest.mark.parametrize(
    ("system", "steps"), [("sparse-dllm", 128), ("fast-dllm", 64), ("llada", 128), ("dllm-cache", 128)]
)
def test_idle_steps_belong_to_the_policy(system, steps):
    """Twice as many steps as tokens: published loops run them, Fast-dLLM's and dLLM-Serve's end with the block."""
    shared: dict[str, Scalar] = {**SMALL, "steps": 128, "num_prompts": 1}
    assert len(serve(cell_of(system, reading="policy", **shared))[0]) == steps
    assert len(serve(cell_of("dllm-serve", **shared))[0]) == 64


@pytest.mark.parametrize(
    ("system", "knobs", "rows"),
    [
        ("fast-dllm", {"cache": "none"}, 0),
        ("fast-dllm", {"cache": "prefix"}, 557),
        ("fast-dllm", {"cache": "dual"}, 557),
        ("sparse-dllm", {}, (557 - 32) // 2 + 32),
        ("dllm-cache", {}, 557),
        ("llada", {}, 0),
    ],
)
def test_a_request_reserves_what_its_policy_keeps(system, knobs, rows):
    plans, _ = serve(cell_of(system, "l40s", reading="policy", input_len=301, length_scale=1.0, num_prompts=3, **knobs))
    experiment = prepare(cell_of(system, "l40s", reading="policy", **knobs))
    with served(experiment) as (engine, _):
        assert engine.scheduler.pool.num_rows == experiment.deployment.kv_rows
        request = Request(request_id=0, prompt_len=301, generation=GenerationConfig())
        engine.submit(request)
        assert engine.scheduler.waiting[0].kv_rows == rows
    assert all(plan.pad_to is None and plan.scheduled_tokens <= 16384 for plan in plans)


# ---- dLLM-Cache, request by request -------------------------------------------------------------

DEMO = FeatureCacheConfig()
CONFIG = EngineConfig(max_num_batched_tokens=16384, max_num_logits=40, suppress_mask_token=False)


def item_of(request: Request) -> PlanItem:
    """Some step in some block: dLLM-Cache asks for no more."""
    start = request.prompt_len
    block = {"block_start": start, "block_end": start + 32, "window_end": start + 32, "masks_left": 32}
    rest = {"commit": 1, "kept_rows": 0, "kv_start": 0, "step_in_block": 0}
    return PlanItem(request_id=request.request_id, phase=Phase.FULL, total_len=request.total_len, **block, **rest)


def execute(executor: Executor, items: Sequence[Request], admitted: Sequence[Request]) -> StepOutcome:
    plan = StepPlan(items=tuple(map(item_of, items)), admitted=tuple(admitted), scheduled_tokens=0)
    return executor.execute(plan)


def test_every_request_counts_its_own_steps():
    """A newcomer refreshes all it has while others select rows; one that was held goes on where it was."""
    generation = GenerationConfig(gen_length=256, block_length=32, steps=256)
    a, b = (Request(request_id=i, prompt_len=100 * i, generation=generation) for i in (1, 2))
    executor = Executor(Roofline(LLADA_8B, L40S), CONFIG, DEMO)
    assert execute(executor, [a], [a]).query_rows == 356
    assert execute(executor, [a], []).query_rows == 64
    assert execute(executor, [a, b], [b]).query_rows == 64 + 456
    assert execute(executor, [b], []).query_rows == 64
    found = [execute(executor, [a, b], []).query_rows for _ in range(5)]
    # a: steps 4 to 8, of which the 8th refreshes the response; b: 3 to 7.
    assert found == [128, 128, 128, 128, 256 + 64]
    executor.release(1)
    executor.release(2)
    assert execute(executor, [a], [a]).query_rows == 356


def test_logits_of_a_packed_step_are_the_blocks_in_chunks():
    generation = GenerationConfig(gen_length=256, block_length=32, steps=256)
    requests = [Request(request_id=i, prompt_len=100, generation=generation) for i in range(3)]
    executor = Executor(Roofline(LLADA_8B, L40S), CONFIG, DEMO)
    found = execute(executor, requests, requests)
    assert found.logit_rows == 96
    work = packed_work([(DEMO.step(1, 100, 256), 3)], LLADA_8B, logit_rows=96, logit_chunks=3)
    assert found.duration_s == executor.roofline.step_time(work).total_s


def test_figures_and_systems_know_the_same_readings():
    assert [View(platform=CPU_TINY, reading=name).reading for name in READINGS] == list(READINGS)
    with refuses("reading='fast'"):
        View(platform=CPU_TINY, reading="fast")


@pytest.mark.parametrize("system", ["fast-dllm", "sparse-dllm", "llada", "dream"])
def test_a_trace_of_many_lengths_is_batched_and_says_so(tmp_path, system):
    """Every request asks for another length, most of them for no whole blocks."""
    path = tmp_path / "trace.jsonl"
    rows = [{"arrival_s": 0.0, "prompt_len": 20 + i, "gen_length": 33 + 5 * i} for i in range(12)]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    model = {"model": "dream-7b", "alg": "entropy"} if system == "dream" else {"model": "llada-8b"}
    trace = {"dataset_path": str(path), "dataset_source": "local", "arrivals": "trace"}
    record = prepare(cell_of(system, "h200", num_prompts=12, reading="efficient", **trace, **model)).run()
    assert DLLM.assess(record).reasons == ()
    assert record.facts["batch_size"] == 12
    assert record.facts["batch_ran"] == {"mean": 12.0, "largest": 12}
    assert record.requests["output_len"] == [row["gen_length"] for row in rows]
