"""A model on a kind of GPU: what its workers cost, the links between them, and the K/V that fits beside the weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from engines.ar.cost import CostConstants, StepCost, WorkerCost, link_bytes_per_s
from engines.ar.deployment import DEGREES
from engines.cost.cards import Gpu
from engines.errors import require
from engines.models.shape import ModelShape

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
