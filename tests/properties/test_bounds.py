"""What policies, planners and models accept ends exactly where their sentences say."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from support.clusters import session
from support.prefill import LINEAR_MODEL

from baselines.ar.dynamo import DynamoConfig
from baselines.ar.sglang import CacheAware
from baselines.ar.vllm import ContinuumConfig, VllmConfig
from engines.ampd.planner import PlannerConfig, PlanningWorkload
from engines.ampd.policies import MAX_LOOKAHEAD, ReorderingQueue, RoutingConfig
from engines.ar.sampling import SamplingParams
from engines.cluster.hardware import PHYSICAL
from engines.cluster.record import Reading
from engines.cluster.sessions import ClosedLoop, Round, Session
from engines.cluster.simulation import StopRule
from engines.errors import UserError
from engines.laps.batching import ClassQueue, TemporalConfig, WaitConfig, shapes_of
from engines.laps.cluster import OpenTurns, PrefillCluster, PrefillConstants, Turn
from engines.laps.latency import StepModel, TwoClasses, fit_floor_form, fit_paper_totals
from engines.laps.ours import Reserve, ReserveConfig
from engines.laps.system import ControllerConfig, LapsConfig, Spatial, laps
from engines.policies.batching import Chunked, PrefillFirst
from engines.policies.routing import RemoteOnly
from engines.policies.views import Slo

SLO = Slo(ttft_s=1.0, itl_s=0.1)
QUEUE = partial(TwoClasses, rate=1.0, short_share=0.5, short_s=0.1, long_s=0.2)
TABLE = partial(PlanningWorkload, sessions=(session(0, 0.0, (5, 5)),), slo=SLO)


def floor_of(lengths: int) -> object:
    tokens = [float(each % lengths + 1) for each in range(8)]
    return fit_floor_form(tokens, [0.0] * 8, tokens)


def totals_of(samples: int) -> object:
    return fit_paper_totals([1.0, 2.0, 3.0, 4.0][:samples], [0.0, 9.0, 1.0, 0.0][:samples], [1.0] * samples)


def model_of(sizes: int) -> object:
    return StepModel.profile(LINEAR_MODEL, lengths=range(8, 8 + sizes), histories=(0, 5), batches=())


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


BOUNDS: tuple[tuple[Callable[..., object], str, Sequence[Any], Sequence[Any]], ...] = (
    (DynamoConfig, "conditional", (), ("always",)),
    (DynamoConfig, "eff_isl_threshold", (0,), (-1,)),
    (DynamoConfig, "eff_isl_ratio_threshold", (0, 1), (-0.01, 1.01)),
    (DynamoConfig, "prefill_busy_threshold", (None, 0), (-0.01,)),
    (DynamoConfig, "decode_busy_threshold", (None, 0), (-0.01,)),
    (CacheAware, "cache_threshold", (0, 1), (-0.01, 1.01)),
    (RoutingConfig, "route_order", (), ("fast",)),
    (RoutingConfig, "window", (), ("all",)),
    (RoutingConfig, "alpha", (0,), (-0.01,)),
    (RoutingConfig, "beta", (0,), (-0.01,)),
    (partial(ReorderingQueue, ttft_s=1.0), "w", (1, MAX_LOOKAHEAD), (0, MAX_LOOKAHEAD + 1)),
    (VllmConfig, "scheduling", (), ("eager",)),
    (VllmConfig, "balance", (), ("luck",)),
    (VllmConfig, "max_num_batched_tokens", (1,), (0, -5)),
    (ContinuumConfig, "keep_s", (0,), (-1,)),
    (RemoteOnly, "dispatch", (), ("best",)),
    *(
        (PlannerConfig, name, (), (value,))
        for name, value in (("latency", "minutes"), ("objective", "min"), ("method", "guess"), ("solver", "cplex"))
    ),
    *((partial(replace, SLO), name, (1e-6,), (0.0, -1.0, math.inf, math.nan)) for name in ("ttft_s", "itl_s")),
    (partial(Reading, scope="round", ttft="every"), "itl", (), ("p90",)),
    (partial(replace, PHYSICAL), "matmul_efficiency", (1,), (1.2,)),
    (partial(replace, PHYSICAL), "bandwidth_efficiency", (1,), (0.0,)),
    (partial(replace, PHYSICAL), "step_overhead_s", (0,), (-1e-3,)),
    (partial(Session, session_id=0, rounds=(Round(1, 1),)), "arrival_s", (0,), (-1.0, math.nan, math.inf)),
    (partial(Session, session_id=0, arrival_s=0.0), "rounds", ((Round(1, 1),),), ((),)),
    (partial(ClosedLoop, sessions=()), "num_clients", (1,), (0,)),
    (partial(ClosedLoop, sessions=(), num_clients=1), "think_s", (0,), (-1,)),
    (StopRule, "until_s", (1e-9,), (0,)),
    (StopRule, "max_live_sessions", (1,), (0,)),
    (SamplingParams, "temperature", (0,), (-0.1, math.inf)),
    (SamplingParams, "top_p", (0.1, 1), (0.0, 1.1)),
    (SamplingParams, "seed", (0,), (-1,)),
    (TABLE, "rate", (1e-9,), (0, -1.0, math.inf)),
    *(
        (make, name, (1,), (0, -1))
        for make in (Chunked, PrefillFirst)
        for name in ("max_num_batched_tokens", "max_num_seqs")
    ),
    (partial(shapes_of, "nearest", 0), "bytes_per_graph", (1,), (0, -1)),
    (partial(shapes_of, "ladder", bytes_per_graph=1), "budget_bytes", (None, 0), (-1,)),
    (ControllerConfig, "form", (), ("fixed",)),
    (ControllerConfig, "period_s", (1e-9,), (0, -0.5)),
    *(
        (ControllerConfig, name, (0,), (-1e-9, math.inf))
        for name in ("cooldown_s", "tau", "alpha", "beta", "gamma", "window_s")
    ),
    (ControllerConfig, "n_min", (1,), (0,)),
    (ControllerConfig, "quantile", (0, 1), (-0.01, 1.01)),
    *((PrefillConstants, f"{name}_efficiency", (1e-9, 1), (0, 1.01)) for name in ("matmul", "attention", "bandwidth")),
    (PrefillConstants, "overlap", (), ("sum",)),
    (PrefillConstants, "kappa", (-0.99, 0), (-1, math.inf)),
    *(
        (PrefillConstants, name, (0,), (-1e-9, math.nan))
        for name in ("layer_launch_s", "step_overhead_s", "request_overhead_s", "graph_launch_s", "graph_check_s")
    ),
    (QUEUE, "rate", (1e-9,), (0, -0.5)),
    (QUEUE, "short_share", (0, 1), (-0.01, 1.01)),
    (QUEUE, "short_s", (1e-9, 0.2), (0, -0.5, 0.21)),
    (partial(TwoClasses, short_share=0.5, short_s=0.5, long_s=0.5), "rate", (1.99,), (2.0, 3.0)),
    (ClassQueue, "boundary", (1,), (0,)),
    (ReserveConfig, "slo_s", (None, 1e-9), (0, -0.5)),
    (ReserveConfig, "share", (None, 1e-9, 1), (0, -0.5, 1.01)),
    (ReserveConfig, "min_step_s", (1e-9, 0.15), (0, -0.5, 0.16)),
    (ReserveConfig, "max_step_s", (0.05,), (0.04, math.inf)),
    (ReserveConfig, "backlog_share", (0,), (-1e-9, math.inf)),
    (ReserveConfig, "aging", (0,), (-1e-9, math.inf)),
    (ReserveConfig, "max_num_seqs", (1,), (0,)),
    (Spatial, "num_short", (1,), (0,)),
    (pools_of, "num_short", (1, 2), (3, 4)),
    (TemporalConfig, "long_dispatch", (), ("both",)),
    (TemporalConfig, "class_rule", (), ("long-first",)),
    (TemporalConfig, "chunk_tokens", (1,), (0,)),
    (TemporalConfig, "short_tokens", (1,), (0,)),
    (TemporalConfig, "max_long_wait_s", (0,), (-1e-9,)),
    *(
        (WaitConfig, name, (0, 0.005), (-1e-9, math.nan))
        for name in ("min_window_s", "slack_s", "margin_s", "max_wait_s")
    ),
    (WaitConfig, "wait", (), ("as-is",)),
    (WaitConfig, "min_window_s", (0.005,), (0.006,)),
    (WaitConfig, "max_window_s", (0,), (math.inf,)),
    (WaitConfig, "slo_s", (None, 1e-9), (0,)),
    (WaitConfig, "token_max", (1,), (0,)),
    (floor_of, "lengths", (4, 8), (3, 1)),
    (totals_of, "samples", (4,), (3,)),
    (model_of, "sizes", (4,), (3,)),
    (turn_of, "tokens", (1,), (0, -1)),
    (turn_of, "history", (0,), (-1,)),
    (turn_of, "answered", (0, 9), (-1, 10)),
    (cluster_of, "num_instances", (1,), (0,)),
    (cluster_of, "cache", (), ("none",)),
    (partial(Spatial, num_short=1), "pooling", (), ("own",)),
    (LapsConfig, "graphs", (), ("best",)),
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
