"""What diffusion-LLM systems run on a platform by default, and the protocol of the paper's runs on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

Dtype = Literal["float32", "float16", "bfloat16"]

PAPER_REQUESTS = {"livebench": 128, "burst": 2000, "osc": 2000}
"""Trace sizes that the paper's printed latencies imply (its text states none)."""

LEAST_REQUESTS = 8
"""The fewest requests of a run whose number follows the rate."""


@dataclass(frozen=True, kw_only=True)
class DllmPart:
    """A cell's knobs override these by name."""

    system: ClassVar[str] = "dllm-serve"
    """Where none is named."""
    model: str
    """'tiny', or a full-size shape (engines.models.checkpoint.PUBLISHED_CONFIGS)."""
    memory_bytes: int
    device: str = "cuda"
    """What a measured run is on."""
    dtype: Dtype = "bfloat16"
    """Dtype of a measured run's weights."""
    gen_length: int = 256
    block_length: int = 32
    steps: int = 256
    max_num_batched_tokens: int
    max_num_logits: int
    max_num_seqs: int = 256
    max_model_len: int
    length_scale: float = 1.0
    rates: tuple[float, ...]
    """Arrival rates of Figure 3 and 4, requests/s; the first and the last are those of every panel."""
    panel_rates: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """By data set, where its systems have their knees elsewhere."""
    num_requests: Mapping[str, int]
    load_s: float | None = None
    """Seconds that requests arrive for in a run of Figures 3 to 5, whose number then follows the rate; None for
    ``num_requests`` at every rate."""

    def rates_of(self, dataset: str) -> tuple[float, ...]:
        return self.panel_rates.get(dataset, self.rates)

    def requests_at(self, rate: float) -> int | None:
        return None if self.load_s is None else max(LEAST_REQUESTS, round(rate * self.load_s))
