"""The workers of a cluster and what they run on: replicas and tensor-parallel degrees of each phase, the servers they stand on, the
K/V that fits beside the weights, and the links between them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from engines.cluster.cost import CostConstants, StepCost, WorkerCost, link_bytes_per_s
from engines.cost.cards import Gpu
from engines.errors import require
from engines.knobs import Checked, Count, Range
from engines.models.shape import ModelShape

DEGREES = (1, 2, 4, 8)
"""T of AMPD §5."""
GPUS_PER_SERVER = 8


@dataclass(frozen=True, kw_only=True)
class Pool(Checked):
    """``replicas`` workers of ``degree`` GPUs each (TP and DP of AMPD's Table 2)."""

    degree: Annotated[int, Range(1, GPUS_PER_SERVER)]
    """A worker does not span servers."""
    replicas: Count

    def __str__(self) -> str:
        return f"TP{self.degree}x{self.replicas}"


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """``decode`` workers hold the sessions; without ``prefill`` workers they are co-located and do both."""

    decode: tuple[Pool, ...]
    prefill: tuple[Pool, ...] = ()

    def __post_init__(self) -> None:
        require(bool(self.decode), "decode=(): a deployment needs at least one worker that decodes")

    @staticmethod
    def disaggregated(prefill_degree: int, prefill_replicas: int, degree: int, replicas: int) -> Deployment:
        """In the order of Table 2: P:<TP, DP>, D:<TP, DP>."""
        return Deployment(
            prefill=(Pool(degree=prefill_degree, replicas=prefill_replicas),),
            decode=(Pool(degree=degree, replicas=replicas),),
        )

    @staticmethod
    def colocated(degree: int, replicas: int) -> Deployment:
        return Deployment(decode=(Pool(degree=degree, replicas=replicas),))

    @property
    def gpus(self) -> int:
        return sum(pool.degree * pool.replicas for pool in (*self.prefill, *self.decode))

    def __str__(self) -> str:
        decode = "+".join(map(str, self.decode))
        return f"P:{'+'.join(map(str, self.prefill))} D:{decode}" if self.prefill else decode


def place(decode: Sequence[int], prefill: Sequence[int] = ()) -> tuple[list[int], list[int]]:
    """The servers of workers of these degrees: the largest first, those of the two phases in turn so that each finds the other on
    its own server, each on the first with room."""
    free: list[int] = []
    servers = [0] * len(decode), [0] * len(prefill)
    workers = [
        (-degree, index, phase) for phase, each in enumerate((decode, prefill)) for index, degree in enumerate(each)
    ]
    for minus_degree, index, phase in sorted(workers):
        server = next((place for place, room in enumerate(free) if room >= -minus_degree), len(free))
        if server == len(free):
            free.append(GPUS_PER_SERVER)
        free[server] += minus_degree
        servers[phase][index] = server
    return servers


def splits(num_gpus: int, prefill_degrees: Sequence[int], decode_degrees: Sequence[int]) -> Iterator[Deployment]:
    """Every deployment with one degree a phase that uses all GPUs, small prefill pools first."""
    for prefill_gpus in range(1, num_gpus):
        for prefill in prefill_degrees:
            for decode in decode_degrees:
                if prefill_gpus % prefill == 0 and (num_gpus - prefill_gpus) % decode == 0:
                    yield Deployment.disaggregated(
                        prefill, prefill_gpus // prefill, decode, (num_gpus - prefill_gpus) // decode
                    )


def replications(num_gpus: int, degrees: Sequence[int]) -> Iterator[Deployment]:
    """Every co-located deployment with one degree that uses all GPUs."""
    for degree in degrees:
        if num_gpus % degree == 0:
            yield Deployment.colocated(degree, num_gpus // degree)


_LinkName = Literal["intra-server", "inter-server"]


@dataclass(frozen=True, kw_only=True)
class Link:
    name: _LinkName
    latency_s: float
    bytes_per_s: float
    """Bandwidth of one GPU; ranks of a tensor-parallel group send in parallel."""


@dataclass(frozen=True, kw_only=True)
class KvLinks:
    """T_kv of AMPD §3: Hockney's alpha-beta model over the slower of two ends (App. A.1). Transfers do not slow each other down:
    every GPU has its own port."""

    intra: Link
    inter: Link
    kv_bytes_per_token: int

    def between(self, server: int, other_server: int) -> Link:
        return self.intra if server == other_server else self.inter

    def transfer_s(self, tokens: int, link: Link, degree: int, other_degree: int) -> float:
        """Nothing to send takes no time; else latency + bytes over the ports of the smaller group."""
        if tokens <= 0:
            return 0.0
        return link.latency_s + tokens * self.kv_bytes_per_token / (link.bytes_per_s * min(degree, other_degree))


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A model on a kind of GPU, under one reading of what its steps cost."""

    shape: ModelShape
    gpu: Gpu
    constants: CostConstants
    kernels: str | None = None
    """The framework whose measured kernels a step is composed of; None: a roofline."""
    _costs: dict[tuple[int, bool], StepCost] = field(default_factory=dict, init=False, repr=False, compare=False)

    def cost(self, degree: int, *, is_remote: bool = False) -> StepCost:
        key = degree, is_remote
        if key not in self._costs:
            self._costs[key] = WorkerCost(
                self.shape, self.gpu, degree, self.constants, kernels=self.kernels, is_remote=is_remote
            )
        return self._costs[key]

    @property
    def links(self) -> KvLinks:
        constants, latency_s = self.constants, self.constants.transfer_latency_s
        inside = link_bytes_per_s(self.gpu) * constants.nvlink_efficiency
        between = constants.inter_server_gb_s * 1e9 * constants.inter_server_efficiency
        return KvLinks(
            intra=Link(name="intra-server", latency_s=latency_s, bytes_per_s=inside),
            inter=Link(name="inter-server", latency_s=latency_s, bytes_per_s=between),
            kv_bytes_per_token=self.shape.kv_bytes_per_token,
        )

    def kv_capacity(self, degree: int) -> int:
        """Tokens of K/V that fit beside the weights; below 1 where the weights alone do not fit."""
        room = self.gpu.memory_bytes * degree * self.constants.memory_share - self.shape.weight_bytes
        return math.floor(room / self.shape.kv_bytes_per_token)

    def degrees(self, *, min_kv_tokens: int = 1) -> tuple[int, ...]:
        """Tensor-parallel degrees that leave room for so many tokens of K/V."""
        heads = self.shape.n_heads
        found = tuple(degree for degree in DEGREES if heads % degree == 0 and self.kv_capacity(degree) >= min_kv_tokens)
        require(
            bool(found),
            f"model={self.shape.name!r} with {min_kv_tokens} tokens of K/V does not fit {max(DEGREES)} x {self.gpu.name}: "
            "use a smaller model or a larger GPU",
        )
        return found
