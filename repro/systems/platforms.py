"""Platforms: a model, a memory, a default executor and the protocol of the paper's runs on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from engines.errors import UserError

ExecutorName = Literal["torch", "roofline"]

GB = 10**9
MIB = 2**20

PAPER_REQUESTS = {"livebench": 128, "burst": 2000, "osc": 2000}
"""Trace sizes that the paper's printed latencies imply (its text states none)."""


@dataclass(frozen=True, kw_only=True)
class Platform:
    """Defaults of every run on the platform; a cell's knobs override them by name."""

    name: str
    title: str
    executor: ExecutorName
    model: str
    """'tiny', or a full-size shape (engines.models.loader.SHAPES)."""
    gpu: str | None
    """Catalogue name of the card the roofline charges; None where only measuring is possible."""
    memory_bytes: int
    gen_length: int = 256
    block_length: int = 32
    steps: int = 256
    max_num_batched_tokens: int
    max_num_logits: int
    max_num_seqs: int = 256
    max_model_len: int
    length_scale: float = 1.0
    rates: tuple[float, ...]
    """Arrival rates of Figure 3 and 4 on this platform, requests/s."""
    num_requests: Mapping[str, int]

    @property
    def device(self) -> str:
        """What a measured run is on where nothing else is asked for."""
        return "cpu" if self.gpu is None else "cuda"

    @property
    def dtype(self) -> str:
        """Of a measured run's weights."""
        return "float32" if self.gpu is None else "bfloat16"


CPU_TINY = Platform(
    name="cpu-tiny",
    title="this CPU, embedded tiny LLaDA",
    executor="torch",
    model="tiny",
    gpu=None,
    memory_bytes=64 * MIB,
    gen_length=64,
    block_length=16,
    steps=64,
    max_num_batched_tokens=1024,
    max_num_logits=256,
    max_num_seqs=64,
    max_model_len=768,
    length_scale=0.25,
    rates=(4.0, 8.0, 16.0, 24.0),
    num_requests=MappingProxyType({"livebench": 32, "burst": 32, "osc": 32}),
)

RTX4090 = Platform(
    name="rtx4090",
    title="NVIDIA RTX 4090 24 GB, LLaDA-8B",
    executor="roofline",
    model="llada-8b",
    gpu="rtx4090",
    memory_bytes=24 * GB,
    max_num_batched_tokens=4000,
    max_num_logits=2048,
    max_model_len=4000,
    rates=(0.1, 0.25, 0.3, 0.4, 0.5),
    num_requests=MappingProxyType(PAPER_REQUESTS),
)

L40S = Platform(
    name="l40s",
    title="NVIDIA L40S 48 GB, LLaDA-8B",
    executor="roofline",
    model="llada-8b",
    gpu="l40s",
    memory_bytes=48 * GB,
    max_num_batched_tokens=16384,
    max_num_logits=2048,
    max_model_len=4096,
    rates=(0.25, 0.5, 0.75, 1.0),
    num_requests=MappingProxyType(PAPER_REQUESTS),
)

H200 = Platform(
    name="h200",
    title="NVIDIA H200 141 GB, LLaDA-8B",
    executor="roofline",
    model="llada-8b",
    gpu="h200",
    memory_bytes=141 * GB,
    max_num_batched_tokens=16384,
    max_num_logits=2048,
    max_model_len=4096,
    rates=(1.0, 2.0, 4.0, 6.0),
    num_requests=MappingProxyType(PAPER_REQUESTS),
)
"""Not a card of the paper, and without a calibration: simulated from datasheet peaks."""

PLATFORMS: Mapping[str, Platform] = MappingProxyType({p.name: p for p in (CPU_TINY, RTX4090, L40S, H200)})


def platform(name: str) -> Platform:
    if name not in PLATFORMS:
        raise UserError(f"platform={name!r} is unknown: use one of {', '.join(PLATFORMS)}")
    return PLATFORMS[name]
