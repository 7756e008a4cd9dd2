"""Requests in the order of their predicted answers, the shortest first, on one of vLLM's replicas.

A trained model predicts ranks in the paper. Here a prediction is the true length times noise, as nothing has to be learnt to schedule by it."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated

from baselines.ar.vllm import VllmConfig, vllm
from engines.cluster.hardware import Deployment
from engines.cluster.simulation import Cluster
from engines.knobs import Count, Range
from engines.policies.views import OpenQueue, PrefillTask
from repro.families.cluster.ampd import SEARCH, ArSystem
from repro.families.cluster.ampd_settings import ClusterSettings, sessions_of
from repro.workloads.rounds import RecordedRound, TracedSession


@dataclass(slots=True, eq=False)
class ShortestPredicted(OpenQueue):
    predicted: Mapping[int, float] = field(default_factory=dict)
    """Tokens of the answer, by session."""

    def peek(self, now: float) -> PrefillTask:
        return min(self, key=lambda task: (task.kind != "recompute", self.predicted[task.session_id], task.order))


@dataclass(frozen=True, kw_only=True)
class RankedConfig(VllmConfig):
    noise: Annotated[float, Range(0, 10)] = 0.5
    """Standard deviation of the logarithm of a predicted length over the true one."""


def ranked(settings: ClusterSettings, deployment: Deployment) -> Cluster:
    draw = random.Random(settings.workload.seed)
    predicted = {
        each.session_id: each.rounds[0].decode_tokens * draw.lognormvariate(0, settings.own.noise)
        for each in sessions_of(settings.workload).sessions
    }
    cluster = vllm(settings.ground.hardware, deployment, settings.own)
    make_queue = partial(ShortestPredicted, predicted=predicted)
    return replace(cluster, policies=replace(cluster.policies, make_local_queue=make_queue))


RANKED = ArSystem(
    name="ranked",
    title="Ranked by predicted length",
    own=RankedConfig,
    build=ranked,
    is_disaggregated=False,
    deployment=SEARCH,
)


@dataclass(frozen=True, kw_only=True)
class Chat:
    """Lengths like ShareGPT's: means of 161 and 338 tokens, as the paper on vLLM prints them. That they are log-normal is assumed."""

    num_prompts: Count = 2000
    spread: Annotated[float, Range(0, 3)] = 1.0
    """Standard deviation of the logarithms."""

    def sessions(self, seed: int):
        draw = random.Random(seed)

        def tokens(mean: float) -> int:
            return min(2048, max(1, round(mean * draw.lognormvariate(-(self.spread**2) / 2, self.spread))))

        for _ in range(self.num_prompts):
            yield TracedSession((RecordedRound(tokens(161.0), tokens(338.0)),))
