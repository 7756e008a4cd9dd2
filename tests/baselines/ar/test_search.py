from collections.abc import Sequence
from itertools import product
from typing import get_args

import numpy as np
import pytest
from support.clusters import hardware, profiled, session

from baselines.ar.dynamo import DynamoConfig, dynamo
from baselines.ar.search import disaggregated_shortlist, search
from baselines.ar.vllm import ContinuumConfig, Scheduling, VllmConfig, continuum, vllm
from engines.ampd.performance import PerformanceModel
from engines.ampd.planner.coefficients import PlanningWorkload
from engines.ar.cluster.cluster import Cluster, StopRule
from engines.ar.deployment import Deployment, replications
from engines.ar.hardware import Hardware
from engines.ar.metrics import Reading, attainment, observe
from engines.ar.session import OpenLoop, Session
from engines.errors import UserError
from engines.policies.task import Slo

PLATFORM = hardware()
MODEL = profiled(num_gpus=8)
SLO = Slo(ttft_s=1.0, itl_s=0.03)
READING = Reading(scope="round", ttft="every", itl="p95")


def dynamo_candidates(
    hardware: Hardware,
    model: PerformanceModel,
    deployments: Sequence[Deployment],
    *,
    configs: Sequence[DynamoConfig] = (DynamoConfig(),),
) -> tuple[Cluster, ...]:
    return tuple(dynamo(hardware, deployment, model, config) for deployment, config in product(deployments, configs))


def vllm_candidates(
    hardware: Hardware,
    num_gpus: int,
    *,
    longest_context: int,
    schedulings: Sequence[Scheduling] = get_args(Scheduling),
    is_continuum: bool = False,
) -> tuple[Cluster, ...]:
    """Every degree that holds the longest session, with whole and with chunked prefills."""
    build, made = (continuum, ContinuumConfig) if is_continuum else (vllm, VllmConfig)
    degrees = hardware.degrees(min_kv_tokens=longest_context)
    return tuple(
        build(hardware, deployment, made(scheduling=scheduling))
        for deployment, scheduling in product(replications(num_gpus, degrees), schedulings)
    )


def sample(seed: int, rate: float = 1.5, num: int = 60) -> OpenLoop:
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate, num)).tolist()
    lengths = rng.integers((200, 10), (900, 40), (num, 3, 2)).tolist()
    return OpenLoop(sessions=tuple(session(index, times[index], *map(tuple, lengths[index])) for index in range(num)))


def planning(rate: float = 1.5) -> PlanningWorkload:
    sessions: tuple[Session, ...] = tuple(sample(9, rate).sessions)
    return PlanningWorkload(sessions=sessions, rate=rate, slo=SLO)


def test_best_deployment_is_that_of_trying_all():
    clusters = vllm_candidates(PLATFORM, 8, longest_context=3000)
    assert sorted(str(each.deployment) for each in clusters) == ["TP2x4"] * 2 + ["TP4x2"] * 2 + ["TP8x1"] * 2
    one = sample(1)
    found = search(clusters, [one], SLO, READING)
    tried = {id(each): attainment(observe(each.simulate(one)), SLO, READING) for each in clusters}
    assert found[0].attainment == max(tried.values())
    assert [each.attainment for each in found] == sorted(tried.values(), reverse=True)


def test_a_third_of_the_candidates_goes_on_after_each_sample():
    clusters = vllm_candidates(PLATFORM, 8, longest_context=3000)
    found = search(clusters, [sample(1), sample(2), sample(3)], SLO, READING)
    assert [each.num_samples for each in found] == [3, 2, 1, 1, 1, 1]
    assert len(found) == len(clusters)


def test_a_third_is_rounded_up():
    clusters = vllm_candidates(PLATFORM, 8, longest_context=3000)[:4]
    found = search(clusters, [sample(1), sample(2)], SLO, READING)
    assert [each.num_samples for each in found] == [2, 2, 1, 1]
    assert all(0 <= each.attainment < 1 for each in found)
    assert found[0].attainment >= found[1].attainment


def test_what_meets_every_objective_is_tried_no_more():
    generous = Slo(ttft_s=100.0, itl_s=10.0)
    clusters = vllm_candidates(PLATFORM, 8, longest_context=3000)
    found = search(clusters, [sample(1, num=8), sample(2, num=8)], generous, READING)
    assert {each.num_samples for each in found} == {1}


def test_a_candidate_alone_is_tried_on_every_sample():
    (one,) = search(
        vllm_candidates(PLATFORM, 8, longest_context=3000)[:1], [sample(1, num=8), sample(2, num=8)], SLO, READING
    )
    assert one.num_samples == 2


def test_shortlist_holds_the_best_of_all_splits():
    """Simulated, the best of the shortlist of four is the best of all six."""
    every = disaggregated_shortlist(PLATFORM, MODEL, planning(), 8, size=99)
    short = disaggregated_shortlist(PLATFORM, MODEL, planning(), 8, size=4)
    assert len(every) == 6
    assert every[:4] == short
    samples = [sample(1), sample(2)]
    best_of_all = search(dynamo_candidates(PLATFORM, MODEL, every), samples, SLO, READING)[0]
    best_of_short = search(dynamo_candidates(PLATFORM, MODEL, short), samples, SLO, READING)[0]
    assert best_of_short.attainment == pytest.approx(best_of_all.attainment, abs=0.02)


def test_equal_attainment_prefers_the_lower_latency():
    generous = Slo(ttft_s=100.0, itl_s=10.0)
    found = search(vllm_candidates(PLATFORM, 8, longest_context=3000), [sample(1)], generous, READING)
    assert {each.attainment for each in found} == {1.0}
    latencies = [each.e2el_s for each in found]
    assert latencies == sorted(latencies)


def test_degrees_that_cannot_hold_the_longest_session_are_left_out():
    capacity = PLATFORM.kv_capacity(2)
    clusters = vllm_candidates(PLATFORM, 8, longest_context=capacity + 1)
    assert {each.deployment.decode[0].degree for each in clusters} == {4, 8}


def test_candidate_that_is_given_up_ranks_last():
    clusters = vllm_candidates(PLATFORM, 8, longest_context=3000, schedulings=("prefill-first",))
    found = search(clusters, [sample(1, rate=6.0)], SLO, READING, stop=StopRule(until_s=25.0))
    assert found[-1].e2el_s == float("inf")


def test_nothing_to_search_is_refused():
    with pytest.raises(UserError, match="no candidate deployments"):
        search((), [sample(1)], SLO, READING)
    with pytest.raises(UserError, match="no samples"):
        search(vllm_candidates(PLATFORM, 8, longest_context=3000), [], SLO, READING)
