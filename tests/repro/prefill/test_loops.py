"""Closed loops obey Little's law, their requests are what the cell says, and the policies get the worker's own times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from engines.ar.cost import Chunk
from engines.ar.step_mode import Bucket
from engines.errors import UserError
from engines.laps.step_model import StepModel
from repro.prefill.instance import TINY, Setting
from repro.prefill.loops import Loop, LoopCell, LoopGrid, conversations, run_cell, systems
from repro.prefill.times import Shape, step_shapes, step_times

FLOOR_S, TOKEN_S = 2.5e-3, 5e-5


@dataclass(frozen=True)
class Exact:
    """T = floor + token N, padding included."""

    def step_s(self, chunks: Sequence[Chunk], decoding: int, context: int, mode: object = None) -> float:
        tokens = mode.tokens if isinstance(mode, Bucket) else sum(chunk.tokens for chunk in chunks)
        return FLOOR_S + TOKEN_S * tokens


MODEL = StepModel(
    base_s=FLOOR_S,
    request_s=0.0,
    floor_s=0.0,
    token_s=TOKEN_S,
    alpha=0.0,
    history_s=0.0,
    shapes={Bucket(n, b): FLOOR_S + TOKEN_S * n * b for n in (8, 32) for b in (1, 4, 16)},
)


@dataclass(frozen=True, kw_only=True)
class Stub:
    """A measured instance without a model."""

    setting: Setting = TINY
    cost: Any = Exact()
    floor_s: float = FLOOR_S
    slo_s: float = 20 * FLOOR_S
    boundary: int = 48
    step_model: StepModel = MODEL


STUB: Any = Stub()


@pytest.mark.parametrize("system", list(systems(STUB)))
@pytest.mark.parametrize("think", [0.0, 0.02])
def test_littles_law(system: str, think: float) -> None:
    """Clients are in the worker or thinking: c = X (R + Z)."""
    cell = LoopCell(figure="x", system=system, loops=(Loop(num_clients=8, kind="mixed", think_s=think),), seed=0)
    found = run_cell(STUB, cell, 3.0)
    assert found.mean_s is not None
    assert found.in_flight + found.rps * think == pytest.approx(8, rel=0.05)
    assert found.rps * (found.mean_s + think) == pytest.approx(8, rel=0.05)
    assert found.finished == pytest.approx(found.rps * 2.7)
    assert found.padding >= 1


def test_one_long_client_alone_takes_what_its_steps_take() -> None:
    cell = LoopCell(figure="x", system="sglang", loops=(Loop(num_clients=1, kind="long"),), seed=1)
    found = run_cell(STUB, cell, 2.0)
    assert found.mean_s is not None
    assert FLOOR_S + 256 * TOKEN_S <= found.mean_s <= FLOOR_S + 512 * TOKEN_S
    assert found.p90_short_s is None
    assert (found.long_clients, found.short_clients) == (1, 0)


def test_short_first_shields_shorts_from_longs() -> None:
    """Figure 3's point, on exact steps: with 4 longs about, short requests wait for them under SGLang."""
    loops = (Loop(num_clients=4, kind="long"), Loop(num_clients=4, kind="short"))
    p90 = {
        name: run_cell(STUB, LoopCell(figure="x", system=name, loops=loops, seed=0), 3.0).p90_short_s
        for name in ("sglang", "laps", "reserve")
    }
    assert p90["laps"] < p90["sglang"]  # type: ignore[operator]
    assert p90["reserve"] < p90["sglang"]  # type: ignore[operator]


def test_conversations_have_the_published_shares_and_fit() -> None:
    drawn = conversations(STUB, Loop(num_clients=1, kind="mixed"), np.random.default_rng(0), number=4000)
    first = np.array([session.rounds[0].prefill_tokens for session in drawn])
    later = np.array([entry.prefill_tokens for session in drawn for entry in session.rounds[1:]])
    assert (first <= 32).mean() == pytest.approx(0.63, abs=0.03)
    # A long later turn that would not fit ends its session.
    assert (later <= 32).mean() == pytest.approx(0.81, abs=0.04)
    assert max(session.context_tokens for session in drawn) <= TINY.max_len
    lengths = {n for session in drawn for n in (e.prefill_tokens for e in session.rounds)}
    assert all(4 <= n <= 32 or 256 <= n <= 512 for n in lengths)


def test_cells_of_the_figures() -> None:
    cells = list(LoopGrid(seeds=(0,)).cells(("fig1", "fig3", "fig5", "fig6"), FLOOR_S))
    assert len(cells) == 24 + 10 + 15
    assert len(set(cells)) == len(cells)
    windows = {cell.window_s for cell in cells if cell.figure == "fig5"}
    assert windows == {0.0, FLOOR_S / 2, FLOOR_S, 2 * FLOOR_S, 4 * FLOOR_S}
    assert list(LoopGrid(seeds=(0,)).cells(("fig6",), FLOOR_S)) == [cell for cell in cells if cell.figure == "fig6"]


def test_unknown_systems_and_empty_runs_are_refused() -> None:
    cell = LoopCell(figure="x", system="fastest", loops=(Loop(num_clients=1, kind="short"),), seed=0)
    with pytest.raises(UserError, match="system='fastest' is unknown: use one of sglang"):
        run_cell(STUB, cell, 1.0)
    with pytest.raises(UserError, match="duration_s=0"):
        run_cell(STUB, replace(cell, system="sglang"), 0.0)


class Timed:
    """5 ms, then 1 ms a step more."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def timed(self, parts: Sequence[tuple[int, int]], mode: object = None) -> list[float]:
        self.calls.append((tuple(parts), mode))
        return [1e-3 * len(self.calls)]


def test_step_times_are_summed_up() -> None:
    shapes = step_shapes((1, 8), ((4, 16),), (0, 100))
    assert [(s.length, s.batch, s.history) for s in shapes] == [
        (1, 1, 0),
        (8, 1, 0),
        (1, 1, 100),
        (8, 1, 100),
        (16, 4, 0),
    ]
    timed = Timed()
    (row,) = step_times(timed, [Shape(length=16, batch=2, history=9, mode=Bucket(16, 2))], repeats=5)  # type: ignore[arg-type]
    # Three runs to warm up, then 4 to 8 ms.
    assert (row.min_s, row.median_s) == pytest.approx((4e-3, 6e-3))
    assert row.mode == "bucket 16x2"
    assert timed.calls == [(((9, 16), (9, 16)), Bucket(16, 2))] * 8
