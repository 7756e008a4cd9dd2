"""Platforms of autoregressive systems: clusters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from repro.systems.platforms import Platform


class _Objectives(NamedTuple):
    """Milliseconds, as printed."""

    ttft_ms: float
    itl_ms: float


PAPER_OBJECTIVES: Mapping[tuple[str, str], _Objectives] = {
    ("Qwen3-32B", "toolbench"): _Objectives(350, 40),
    ("Qwen3-32B", "gaia"): _Objectives(1000, 35),
    ("Qwen3-32B", "hotpotqa"): _Objectives(450, 30),
    ("Qwen3-32B", "dureader"): _Objectives(1200, 40),
    ("Llama-3.1-70B", "toolbench"): _Objectives(1000, 50),
    ("Llama-3.1-70B", "gaia"): _Objectives(1500, 35),
    ("Llama-3.1-70B", "hotpotqa"): _Objectives(2500, 45),
    ("Llama-3.1-70B", "dureader"): _Objectives(5000, 50),
    ("Mixtral-8x7B", "toolbench"): _Objectives(130, 30),
    ("Mixtral-8x7B", "gaia"): _Objectives(350, 20),
    ("Mixtral-8x7B", "hotpotqa"): _Objectives(150, 25),
    ("Mixtral-8x7B", "dureader"): _Objectives(300, 50),
}
"""Titles of the panels of AMPD Figure 4."""


@dataclass(frozen=True, kw_only=True)
class ArPart:
    """A cell's knobs override these by name."""

    system: ClassVar[str] = "ampd"
    """Where none is named."""
    model: str
    """A shape by name (engines.models.shape)."""
    num_gpus: int
    """All of the platform; a trace's card says how many of them its runs take."""
    trace: str = "dureader"
    """Where no data set is named."""
    constants: str
    """A reading of the cost model (engines.ar.cost)."""
    rates: tuple[float, ...]
    """Arrival rates of Figure 4, sessions/s."""
    num_sessions: int
    objectives: Mapping[tuple[str, str], _Objectives]
    """By model and trace."""


_PAPER = ArPart(
    model="Llama-3.1-70B",
    num_gpus=32,
    constants="physical",
    rates=(0.8, 1.2, 1.6, 2.0, 2.4),
    num_sessions=99,
    objectives=PAPER_OBJECTIVES,
)
"""What AMPD serves on its cluster (§7.1). The number of sessions follows from Figure 6, whose values are multiples of 1/99."""

H20X32 = Platform(
    name="h20x32", title="4 servers of 8 NVIDIA H20 96 GB", executor="roofline", gpu="h20", parts=(_PAPER,)
)
H200X32 = Platform(
    name="h200x32", title="4 servers of 8 NVIDIA H200 141 GB", executor="roofline", gpu="h200", parts=(_PAPER,)
)
"""The same load and objectives on cards whose kernels were measured; the H20's are transferred from them."""
