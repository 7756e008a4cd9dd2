"""Platforms of autoregressive systems: clusters."""

from __future__ import annotations

from repro.systems.ar.part import PAPER_OBJECTIVES, ArPart
from repro.systems.platforms import Platform

H20X32 = Platform(
    name="h20x32",
    title="4 servers of 8 NVIDIA H20 96 GB",
    executor="roofline",
    gpu="h20",
    parts=(
        ArPart(
            model="Llama-3.1-70B",
            num_gpus=32,
            constants="physical",
            rates=(0.8, 1.2, 1.6, 2.0, 2.4),
            num_sessions=99,
            objectives=PAPER_OBJECTIVES,
        ),
    ),
)
"""AMPD's cluster (§7.1). The number of sessions follows from Figure 6, whose values are multiples of 1/99."""
