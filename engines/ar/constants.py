"""Constants of the cost model that no datasheet gives, as named readings.

No paper states them. ``physical`` is what a well-built engine reaches on this hardware; the other
readings lower or raise single constants until one printed figure is met, and say which. None of them
meets all figures at once (``repro reproduce ampd/readings``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from engines.errors import UserError
from engines.knobs import Proportion, Range, Seconds, check_fields

Role = Literal["assumed", "fitted", "implied"]
"""assumed: chosen beforehand, from common experience. fitted: the best of a search against printed results, which
are then no prediction. implied: follows from one printed figure, named in the note."""

_INTER_SERVER_GB_S = 25.0
"""Per GPU: the paper prints 200 GB/s per server of 8 GPUs (AMPD §7.1), which is one 200 Gb/s port each."""


@dataclass(frozen=True, kw_only=True)
class CostConstants:
    name: str
    role: Role
    note: str
    matmul_efficiency: Proportion
    """Share of the datasheet's matrix peak."""
    attention_efficiency: Proportion
    """Share of the same peak that attention over a prompt reaches."""
    bandwidth_efficiency: Proportion
    """Share of the datasheet's memory bandwidth. Values below 0.6 stand in for engine overhead, not for hardware."""
    layer_launch_s: Seconds = 0.0
    """Least time of a layer in any step: a step is launch-bound below ``n_layers`` times this."""
    step_overhead_s: Seconds = 2e-3
    """Scheduling, sampling and detokenising of every step."""
    prefill_overhead_s: Seconds = 0.0
    """Added for every prefill, wherever it runs."""
    remote_prefill_overhead_s: Seconds = 0.0
    """Added for a prefill away from its decode worker: handshake, block allocation, registration."""
    tensor_parallel_loss: Annotated[float, Range(least=0)] = 0.0
    """A degree of n does the work of n / (1 + loss log2 n) GPUs, besides its communication."""
    all_reduce_latency_s: Seconds = 12e-6
    """Latency of each of the two all-reduces per layer."""
    nvlink_efficiency: Proportion = 0.7
    inter_server_gb_s: Annotated[float, Range(above=0)] = _INTER_SERVER_GB_S
    """Per GPU, one direction."""
    inter_server_efficiency: Proportion = 0.8
    transfer_latency_s: Seconds = 1e-3
    """The alpha of a KV transfer (AMPD App. A.1, Hockney's model)."""
    memory_share: Proportion = 0.85
    """Share of a GPU's memory for weights and KV; the rest holds activations, graphs and the runtime."""

    def __post_init__(self) -> None:
        check_fields(self)


PHYSICAL = CostConstants(
    name="physical",
    role="assumed",
    note="Shares of peak a tuned engine reaches, 2 ms a step, no other overhead.",
    matmul_efficiency=0.6,
    attention_efficiency=0.6,
    bandwidth_efficiency=0.8,
)
TRIAL_R2 = replace(
    PHYSICAL,
    name="trial-r2",
    role="fitted",
    note="One of the best of about 110 sets against Figure 4: slower decode and dearer remote prefill than hardware explains.",
    matmul_efficiency=0.5,
    attention_efficiency=0.5,
    bandwidth_efficiency=0.35,
    layer_launch_s=0.1e-3,
    remote_prefill_overhead_s=10e-3,
)
_LAUNCH_BOUND = replace(
    PHYSICAL,
    name="launch-bound",
    role="implied",
    note="Decode steps of 21 to 30 ms, as the axes of Figure 8 ask: 0.3 ms a layer.",
    layer_launch_s=0.3e-3,
)
_COSTLY_REQUEST = replace(
    PHYSICAL,
    name="costly-request",
    role="implied",
    note="50 ms a prefill, as ToolBench's 13.9 % local prefills ask (Figure 5).",
    prefill_overhead_s=50e-3,
    layer_launch_s=0.1e-3,
)
_COSTLY_REMOTE = replace(
    PHYSICAL,
    name="costly-remote",
    role="implied",
    note="80 ms for a remote prefill, with which co-location beats disaggregation on GAIA (Figure 4).",
    prefill_overhead_s=20e-3,
    remote_prefill_overhead_s=80e-3,
    layer_launch_s=0.2e-3,
)

CONSTANTS: tuple[CostConstants, ...] = (PHYSICAL, TRIAL_R2, _LAUNCH_BOUND, _COSTLY_REQUEST, _COSTLY_REMOTE)


def cost_constants(name: str) -> CostConstants:
    for constants in CONSTANTS:
        if constants.name == name.lower():
            return constants
    raise UserError(f"constants={name!r} are unknown: use one of {', '.join(each.name for each in CONSTANTS)}")
