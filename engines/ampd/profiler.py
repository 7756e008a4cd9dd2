"""Profiles the simulated hardware; a live profiler implements the same three methods by timing workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engines.ampd.performance import PerformanceModel, profile
from engines.ar.cluster.cluster import Hardware
from engines.ar.deployment import GPUS_PER_SERVER
from engines.ar.transfer import Link


@dataclass(frozen=True, kw_only=True)
class SimulatedProfile:
    hardware: Hardware
    link: Link

    def prefill_s(self, history: int, tokens: int, degree: int) -> float:
        """On a decode worker. What a remote prefill adds besides its transfers the model does not know (eqs. 1, 2)."""
        return self.hardware.cost(degree).prefill_s(history, tokens)

    def decode_s(self, batch: int, context: int, degree: int) -> float:
        return self.hardware.cost(degree).decode_s(batch, batch * context)

    def transfer_s(self, tokens: int, source_degree: int, target_degree: int) -> float:
        return self.hardware.links.transfer_s(tokens, self.link, source_degree, target_degree)


def profile_hardware(
    hardware: Hardware, *, num_gpus: int, degrees: Sequence[int] | None = None, decode_context: int = 1024
) -> PerformanceModel:
    """Transfers are timed on the link that workers of a cluster of ``num_gpus`` use: theta names no server."""
    links = hardware.links
    return profile(
        SimulatedProfile(hardware=hardware, link=links.intra if num_gpus <= GPUS_PER_SERVER else links.inter),
        hardware.degrees() if degrees is None else degrees,
        decode_context=decode_context,
    )
