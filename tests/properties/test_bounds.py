"""What policies, planners and models accept ends exactly where their sentences say."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import pytest
from support.clusters import session
from support.prefill import LINEAR_MODEL
from support.tables import data_beside

from engines.ampd.planner import PlanningWorkload
from engines.ampd.policies import MAX_LOOKAHEAD, ReorderingQueue
from engines.cluster.hardware import PHYSICAL
from engines.cluster.sessions import ClosedLoop, Round, Session
from engines.errors import UserError
from engines.laps.batching import shapes_of
from engines.laps.cluster import OpenTurns, PrefillCluster, Turn
from engines.laps.ours import Reserve, ReserveConfig
from engines.laps.system import Spatial, laps
from engines.policies.views import Slo

SLO = Slo(ttft_s=1.0, itl_s=0.1)
TABLE = partial(PlanningWorkload, sessions=(session(0, 0.0, (5, 5)),), slo=SLO)


def turn_of(**fields: int) -> object:
    given = {"history": 9, "tokens": 1, "answered": 0, **fields}
    return cluster_of().simulate(
        OpenTurns(turns=[Turn(0.0, 0, 0, given["history"], given["tokens"], given["answered"])])
    )


def arrivals_at(*times_s: float) -> object:
    return cluster_of().simulate(
        OpenTurns(turns=[Turn(time_s, index, 0, 0, 1) for index, time_s in enumerate(times_s)])
    )


def cluster_of(**fields: Any) -> PrefillCluster:
    return PrefillCluster(system=laps(LINEAR_MODEL), cost=LINEAR_MODEL, **fields)


def pools_of(num_short: int) -> object:
    system = replace(laps(LINEAR_MODEL), spatial=Spatial(num_short=num_short))
    return PrefillCluster(system=system, cost=LINEAR_MODEL, num_instances=3)


Bound = tuple[Callable[..., object], str, Sequence[Any], Sequence[Any]]
"""What is made, a field of it, and values just inside its bounds and just outside."""


def stored_bounds() -> Iterator[Bound]:
    for each in data_beside(__file__, "bounds"):
        module, _, name = each.pop("of").partition(":")
        make = partial(getattr(import_module(module), name), **each.pop("with", {}))
        for field, values in each.items():
            yield make, field, values["inside"], values["outside"]


BOUNDS: tuple[Bound, ...] = (
    *stored_bounds(),
    (partial(ReorderingQueue, ttft_s=1.0), "w", (1, MAX_LOOKAHEAD), (0, MAX_LOOKAHEAD + 1)),
    *((partial(replace, SLO), name, (1e-6,), (0.0, -1.0, math.inf, math.nan)) for name in ("ttft_s", "itl_s")),
    (partial(replace, PHYSICAL), "matmul_efficiency", (1,), (1.2,)),
    (partial(replace, PHYSICAL), "bandwidth_efficiency", (1,), (0.0,)),
    (partial(replace, PHYSICAL), "step_overhead_s", (0,), (-1e-3,)),
    (partial(Session, session_id=0, rounds=(Round(1, 1),)), "arrival_s", (0,), (-1.0, math.nan, math.inf)),
    (partial(Session, session_id=0, arrival_s=0.0), "rounds", ((Round(1, 1),),), ((),)),
    (partial(ClosedLoop, sessions=()), "num_clients", (1,), (0,)),
    (partial(ClosedLoop, sessions=(), num_clients=1), "think_s", (0,), (-1,)),
    (TABLE, "rate", (1e-9,), (0, -1.0, math.inf)),
    (partial(shapes_of, "nearest", 0), "bytes_per_graph", (1,), (0, -1)),
    (partial(shapes_of, "ladder", bytes_per_graph=1), "budget_bytes", (None, 0), (-1,)),
    (pools_of, "num_short", (1, 2), (3, 4)),
    (turn_of, "tokens", (1,), (0, -1)),
    (turn_of, "history", (0,), (-1,)),
    (turn_of, "answered", (0, 9), (-1, 10)),
    (cluster_of, "num_instances", (1,), (0,)),
    (cluster_of, "cache", (), ("none",)),
    (cluster_of, "slo_s", (None, 1e-9), (0,)),
    (cluster_of, "boundary", (1,), (0,)),
)


@pytest.mark.parametrize(
    ("make", "name", "inside", "outside"), BOUNDS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_bounds(make, name, inside, outside):
    for value in inside:
        make(**{name: value})
    for value in outside:
        with pytest.raises(UserError, match=name):
            make(**{name: value})


def test_turns_may_arrive_together_and_not_backwards():
    arrivals_at(0.0, 0.0, 1.0, 1.0)
    for times_s in ((-0.1,), (0.0, 1.0, 0.9), (math.nan,)):
        with pytest.raises(UserError, match="sort what arrives"):
            arrivals_at(*times_s)


def test_the_least_wait_that_can_be_kept_is_the_one_that_is_said():
    with pytest.raises(UserError, match=r"give at least (\S+) s") as refused:
        Reserve(LINEAR_MODEL, ReserveConfig(longest_wait_s=0.7))
    least = float(str(refused.value).rpartition("least ")[2].removesuffix(" s"))
    assert least == pytest.approx(0.4 + 2 * 0.15 + 0.4)
    assert Reserve(LINEAR_MODEL, ReserveConfig(longest_wait_s=least)).share == pytest.approx(1.0)
    with pytest.raises(UserError, match="give at least"):
        Reserve(LINEAR_MODEL, ReserveConfig(longest_wait_s=least - 0.001))
