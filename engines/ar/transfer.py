"""Moving K/V between workers: Hockney's alpha-beta model over the slower of two ends (AMPD App. A.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engines.ar.constants import CostConstants
from engines.ar.cost import link_bytes_per_s
from engines.hardware.catalogue import Gpu
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
    """T_kv of AMPD §3. Transfers do not slow each other down: every GPU has its own port."""

    intra: Link
    inter: Link
    kv_bytes_per_token: int

    @staticmethod
    def of(shape: ModelShape, gpu: Gpu, constants: CostConstants) -> KvLinks:
        return KvLinks(
            intra=Link(
                name="intra-server",
                latency_s=constants.transfer_latency_s,
                bytes_per_s=link_bytes_per_s(gpu) * constants.nvlink_efficiency,
            ),
            inter=Link(
                name="inter-server",
                latency_s=constants.transfer_latency_s,
                bytes_per_s=constants.inter_server_gb_s * 1e9 * constants.inter_server_efficiency,
            ),
            kv_bytes_per_token=shape.kv_bytes_per_token,
        )

    def between(self, server: int, other_server: int) -> Link:
        return self.intra if server == other_server else self.inter

    def transfer_s(self, tokens: int, link: Link, degree: int, other_degree: int) -> float:
        """Nothing to send takes no time; else latency + bytes over the ports of the smaller group."""
        if tokens <= 0:
            return 0.0
        return link.latency_s + tokens * self.kv_bytes_per_token / (link.bytes_per_s * min(degree, other_degree))
