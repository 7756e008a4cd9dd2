"""Simulated runs of every policy and of what it can be told, on small workloads: the numbers stored in ``numbers.json``.

Other tests say why a policy decides as it does; this one says that no number of a simulated run changes by the way. One that is
meant to change is stored anew by ``python tests/properties/test_same_numbers.py``.
"""

import asyncio
import json
import math
import random
import shlex
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
from support.tables import data_beside
from support.virtual_time import run_virtually

from engines.ampd.planner import PlanningWorkload, coefficients
from engines.laps.latency import FloorForm, TwoClasses, fit_floor_form, fit_paper_form, fit_paper_totals, waits_s
from engines.policies.views import FALLBACK, Bucket, Chunk, Rung, Slo
from repro.families.http.endpoint import _read
from repro.families.http.record import tables_of
from repro.runs.cell import Cell
from repro.runs.experiment import prepare
from repro.runs.http_driver import Clock, Reply, drive_http

STORED = Path(__file__).with_name("numbers.json")


def cells() -> Iterator[Cell]:
    for group in data_beside(__file__, "numbers_runs"):
        for line in group["runs"]:
            system, rate, *words = shlex.split(line)
            own = {name: value_of(text) for name, _, text in (word.partition("=") for word in words)}
            given = {"rate": value_of(rate), "seed": 1, **group["knobs"], **own}
            yield a_cell(system, group["dataset"], group["platform"], "roofline", **given)


def value_of(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


CELLS = tuple(cells())


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
    gaps, service = queue.draw(500, seed=4)
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
    await _read(Recorded(body["pace"]), reply, clock, is_chat=True, limit=None, needs_count=True)
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
