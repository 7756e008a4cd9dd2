"""Simulated runs of every policy and of what it can be told, on small workloads: the numbers stored in ``numbers.json``.

Other tests say why a policy decides as it does; this one says that no number of a simulated run changes by the way. One that is
meant to change is stored anew by ``python tests/properties/test_same_numbers.py``.
"""

import asyncio
import json
import math
import random
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from support.cells import a_cell
from support.clusters import profiled, session
from support.prefill import h200_14b
from support.virtual_time import run_virtually

from engines.ampd.planner import PlanningWorkload, coefficients
from engines.laps.latency import FloorForm, TwoClasses, fit_floor_form, fit_paper_form, fit_paper_totals, waits_s
from engines.policies.views import FALLBACK, Bucket, Chunk, Rung, Slo
from repro.runs.cell import Cell, Scalar
from repro.runs.experiment import prepare
from repro.runs.http_driver import Clock, Reply, drive_http
from repro.systems.http.endpoint import _read
from repro.systems.http.record import tables_of

STORED = Path(__file__).with_name("numbers.json")
LATE: dict[str, Scalar] = {"transient": True}
"""Near capacity and beyond."""
SPLIT, BOTH = {"deployment": "P:TP4x2 D:TP4x2"}, {"deployment": "TP8x2"}


def prefill(system: str, rate: float | None = 55.0, **knobs: Scalar) -> Cell:
    given = {"num_prompts": 120, **knobs}
    return _cell(system, "lmsys-chat-1m", "h200", rate, given)


def cluster(system: str, rate: float | None = 1.5, **knobs: Scalar) -> Cell:
    return _cell(system, "dureader", "h20x32", rate, {"num_prompts": 14, "transient": True, **knobs})


def dllm(system: str, rate: float | None = 4.0, **knobs: Scalar) -> Cell:
    return _cell(system, "burst", "rtx4090", rate, {"num_prompts": 10, **knobs})


def block(rate: float | None = 4.0, where: str = "h200-llada2-mini", **knobs: Scalar) -> Cell:
    return _cell("block-diffusion", "burst", where, rate, {"num_prompts": 10, **knobs})


def _cell(system: str, dataset: str, where: str, rate: float | None, knobs: Mapping[str, Scalar]) -> Cell:
    return a_cell(system, dataset=dataset, platform=where, executor="roofline", rate=rate, seed=1, **knobs)


CELLS = (
    *(
        prefill(name)
        for name in ("laps", "laps-graphs-only", "laps-disaggregation-only", "reserve", "srpt", "sglang-pd", "vllm-pd")
    ),
    *(prefill("laps", wait=wait) for wait in ("off", "guarded", "printed")),
    *(prefill("laps", graphs=graphs, kappa=0.1) for graphs in ("none", "nearest", "ladder")),
    *(prefill("laps", 90.0, **LATE, **own) for own in ({"long_dispatch": "single"}, {"class_rule": "urgency"}, {})),
    prefill("laps", deadlines=False, max_window_s=0.05),
    *(prefill("laps", graphs="nearest", joins=joins) for joins in ("same", "shorter")),
    prefill("laps", 90.0, while_waiting="idle", **LATE),
    prefill("laps", 70.0, graph_budget_gb=2.0, min_window_s=0.002, chunk_tokens=700, max_long_wait_s=0.1, boundary=100),
    prefill("laps", None, clients=12, decode="mixed", answer_tokens=20, overlap="add"),
    prefill("laps", None, clients=12, decode="apart", kappa=0.3, think_s=0.1),
    prefill("laps", 150.0, num_instances=4, cache="instance", arrivals="gamma", burstiness=0.4, **LATE),
    *(
        prefill("laps", 300.0, num_instances=4, num_prompts=1500, **LATE, **own)
        for own in ({}, {"controller": "printed"}, {"pooling": "each", "num_short": 2}, {"controller": "off"})
    ),
    prefill("reserve", 90.0, longest_wait_s=6.0, **LATE),
    prefill("reserve", 120.0, deadlines=False, graphs="ladder", **LATE),
    prefill("reserve", 200.0, num_instances=3, share=0.4, aging=0.5, **LATE),
    prefill("on-time"),
    *(prefill("on-time", 120.0, **own, **LATE) for own in ({}, {"share": 0.0}, {"patience": 1.0, "num_instances": 2})),
    prefill("sglang-pd", 90.0, prefill_graphs=True, max_num_batched_tokens=1000, **LATE),
    *(
        prefill("sglang-pd-router", 200.0, num_instances=4, cache="instance", routing=how, **LATE)
        for how in ("round-robin", "least-requests", "least-tokens", "cache-aware")
    ),
    prefill("sglang-pd", None, long_clients=2, short_clients=6),
    prefill("vllm-pd", 200.0, num_instances=4, max_num_batched_tokens=700, **LATE),
    *(
        cluster("ampd", **SPLIT, window_s=3.0, route_order=order, window=window)
        for order, window in (("random", "done"), ("load", "backlog"))
    ),
    *(cluster("ampd", 4.0, **SPLIT, alpha=0.05, beta=0.5, window="age", w=w) for w in (1, 4)),
    cluster("ampd", 4.0, **SPLIT, adaptive_routing=False, prefill_reordering=False, dispatch="round-robin"),
    *(cluster("ampd", 4.0, **SPLIT, queue_order="on-time", adaptive_routing=routing) for routing in (True, False)),
    *(
        cluster("dynamo-sim", 3.0, **SPLIT, **own)
        for own in ({}, {"conditional": "isl_bounding", "eff_isl_threshold": 900})
    ),
    *(
        cluster("dynamo-sim", 3.0, **SPLIT, conditional=how, prefill_busy_threshold=0.5)
        for how in ("prefill_load", "isl_or_load")
    ),
    *(
        cluster("dynamo-sim", 3.0, **SPLIT, history_read="own-cache", affinity=affinity)
        for affinity in ("prefix", "cost", "none")
    ),
    *(
        cluster(name, 3.0, **BOTH, scheduling=how, balance=balance)
        for name in ("vllm-sim", "continuum-sim")
        for how, balance in (("prefill-first", "memory"), ("chunked", "sessions"), ("chunked", "round-robin"))
    ),
    *(dllm(name) for name in ("dllm-serve", "fast-dllm", "sparse-dllm", "dllm-cache", "llada")),
    *(
        dllm("dllm-serve", None, scheduler=name, refresh_delay=0, max_num_batched_tokens=2500)
        for name in ("lookahead", "request", "phase")
    ),
    dllm("dllm-serve", None, retention_ratio=0.3, max_num_seqs=3),
    *(
        dllm(name, reading=how)
        for name in ("fast-dllm", "dllm-cache", "sparse-dllm")
        for how in ("policy", "published")
    ),
    dllm("fast-dllm", None, reading="published", batch_rule="batch"),
    block(),
    block(None, max_num_batched_tokens=256, max_num_seqs=6),
    block(20.0, rule="joint-threshold", max_post_steps=4),
    block(20.0, batching="first-done", tokens_per_forward=3.0),
    block(20.0, batching="synchronous", kernels="sglang", step_overhead_s=0.001, prefix_overhead_s=0.002),
    block(20.0, "h200-sdar-8b", rule="static", steps=2, prefix_cache=False),
    block(20.0, "h100-sdar-8b", rule="dynamic", shared_len=64, request_overhead_s=0.0001),
    block(None, "h20-llada2-mini", autoregressive=True, cost="roofline"),
)


def named(cell: Cell) -> str:
    knobs = " ".join(f"{name}={value}" for name, value in cell.knobs)
    return f"{cell.system} {cell.dataset} {cell.rate} {knobs}"


def run(cell: Cell) -> dict[str, float]:
    """The sum of each column of its tables."""
    return sums(prepare(cell).run().tables)


def sums(tables: Mapping[str, Mapping[str, Sequence[object]]]) -> dict[str, float]:
    """Those that are not zero."""
    found = {
        f"{table}.{name}": math.fsum(numbers(own)) for table, columns in tables.items() for name, own in columns.items()
    }
    return {name: value for name, value in found.items() if value}


def numbers(column: Sequence[object]) -> Iterator[float]:
    return (each for each in column if isinstance(each, int | float) and math.isfinite(each))


def step_model() -> dict[str, float]:
    _, model = h200_14b()
    modes = (None, FALLBACK, Bucket(64, 4), Rung(384))
    times = {f"{mode}": model.step_s([Chunk(900, 60)] * 3 + [Chunk(0, 5)], 0, 0, mode) for mode in modes}
    names = ("base_s", "request_s", "floor_s", "token_s", "alpha", "history_s", "fallback_s", "mean_error")
    shapes = {"shapes": sum(model.shapes.values()), "work_s": model.work_s(700, 300), "knee": model.knee_tokens}
    return {**times, **shapes, **{name: getattr(model, name) for name in names}}


def latency_fits() -> dict[str, float]:
    draw = random.Random(5)
    points = [(tokens, history) for tokens in (8, 64, 150, 300, 700, 2000) for history in (0, 500, 4000)]
    planted = FloorForm(base_s=2e-3, c=0.01, beta=4e-5, alpha=1e-9, gamma_r=5e-8, mean_error=0.0)
    times = [planted.time_s(*point) * draw.uniform(0.8, 1.25) for point in points]
    tokens, histories = [float(each) for each, _ in points], [float(each) for _, each in points]
    forms = {
        "floor": fit_floor_form(tokens, histories, times),
        "without base": fit_floor_form(tokens, histories, times, has_base=False),
        "totals": fit_paper_totals(tokens, histories, times),
        "apart": fit_paper_form(tokens, histories, times, times[::-1]),
    }
    return {f"{name} {part}": value for name, form in forms.items() for part, value in asdict(form).items()}


def waits() -> dict[str, float]:
    queue = TwoClasses(rate=6.0, short_share=0.6, short_s=0.03, long_s=0.25)
    gaps, service = queue.drawn(500, seed=4)
    return {
        "walk": float(waits_s(gaps, service).sum()),
        **{name: getattr(queue, name) for name in ("load", "mean_s", "wait_s", "hol_penalty_s")},
    }


def planner() -> dict[str, float]:
    model = profiled(num_gpus=16)
    draw = random.Random(3)
    sessions = tuple(
        session(index, 1.1 * index, *((draw.randint(300, 1500), draw.randint(5, 60)) for _ in range(3)))
        for index in range(60)
    )
    found: dict[str, float] = {}
    for rate in (0.4, 3.0):
        load = PlanningWorkload(sessions=sessions, rate=rate, slo=Slo(ttft_s=2.0, itl_s=0.05))
        for method in ("closed", "cached", "direct"):
            table = coefficients(model, load, (2, 8), 24, method)
            for phase, own in (("prefill", table.prefill), ("decode", table.decode)):
                found |= {f"{rate} {method} {phase} {key}": each.seconds + each.of_slo for key, each in own.items()}
    return found


def performance() -> dict[str, float]:
    model = profiled(num_gpus=16)
    prefills = {f"prefill {each}": model.prefill_s(*each) for each in ((0, 100, 2), (5000, 30, 4), (900, 4000, 8))}
    decodes = {f"decode {each}": model.decode_s(*each) for each in ((1, 2), (7, 4), (90, 8), (5000, 4))}
    transfers = {f"transfer {each}": model.transfer_s(*each) for each in ((0, 2, 4), (10, 2, 2), (9000, 8, 4))}
    return {**prefills, **decodes, **transfers}


REPLY = (
    (
        0.3,
        b'data: {"choices": [{"delta": {"role": "assistant"}}]}\n\ndata: {"choices": [{"delta": {"content": "One"}}]}\n',
    ),
    (0.02, b'\ndata: {"choices": [{"delta": {"content": ", two"}}]}\n\n'),
    (
        0.05,
        b'data: {"choices": [{"delta": {"content": ", three"}}]}\n\ndata: {"choices": [{"delta": {"content": "."}}]}\n\n',
    ),
    (0.01, b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n'),
    (0.01, b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 6}}\n\ndata: [DONE]\n\n'),
)
"""Network reads of a streamed answer, each some seconds after the one before."""


class Recorded:
    """A body that comes as it was recorded, ``pace`` times as slowly."""

    def __init__(self, pace: float) -> None:
        self._pace = pace

    async def iter_any(self) -> AsyncIterator[bytes]:
        for wait_s, content in REPLY:
            await asyncio.sleep(self._pace * wait_s)
            yield content


@dataclass(frozen=True)
class Talk:
    """A conversation of so many turns; its body is what each of them sends."""

    session_id: int
    arrival_s: float
    delays_s: tuple[float, ...]
    prompt_len: int = 9
    asked_tokens: int = 6

    @property
    def body(self) -> Mapping[str, object]:
        return {"pace": 1.0 + self.session_id}

    def ask(self, turn: int, replies: Sequence[Reply]) -> "Talk":
        return self


async def replayed(body: Mapping[str, Any], clock: Clock) -> Reply:
    reply = Reply()
    await _read(Recorded(body["pace"]), reply, clock, is_chat=True, most=None, needs_count=True)
    return reply


def http_run() -> dict[str, float]:
    talks = [Talk(0, 0.0, (0.5, 0.0)), Talk(1, 0.1, (0.0,)), Talk(2, 0.2, (0.0,))]
    tables = tables_of(run_virtually(drive_http(talks, replayed, max_concurrency=2)))
    return sums(tables)


FORMULAS = (http_run, step_model, latency_fits, waits, planner, performance)


@cache
def stored() -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = json.loads(STORED.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("cell", CELLS, ids=named)
def test_no_run_changes_by_the_way(cell):
    assert run(cell) == pytest.approx(stored()[named(cell)], rel=1e-6)


@pytest.mark.parametrize("formula", FORMULAS)
def test_no_formula_changes_by_the_way(formula):
    """What least squares leave of a perfect fit is rounding."""
    assert formula() == pytest.approx(stored()[formula.__name__], rel=1e-6, abs=1e-15)


def rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.9g}") for name, value in values.items()}


if __name__ == "__main__":
    found = {named(cell): rounded(run(cell)) for cell in CELLS} | {each.__name__: rounded(each()) for each in FORMULAS}
    lines = [f" {json.dumps(name)}: {json.dumps(values)}" for name, values in found.items()]
    STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
