"""Platforms of diffusion LLMs: this CPU, the paper's two cards, and larger ones."""

from __future__ import annotations

from collections.abc import Mapping

from repro.systems.dllm.part import PAPER_REQUESTS, DllmPart
from repro.systems.platforms import GB, MIB, Platform

# Sizes of cpu-tiny follow from half an hour for all measured figures on two quiet cores, three repeats each. The systems serve
# 2.7 to 11.6 req/s there, so 4 and 20 req/s lie below and above nearly all their knees, with 8 and 28 requests; a rate between them would
# cost more than it says. 20 requests saturate: throughput is flat from 8 to 16 at once. Seconds that the figures took, loading and
# the search of batches included:
#
#   Figures 3, 4, 5  372    12 pairs of system and data set, three rates of 6, 8 and 20 requests
#   Figure 8         182    six rungs on three data sets
#   Figure 7         183    nine lengths and two systems
#   growth            83
#   baselines        245    LLaDA and Fast-dLLM without a cache half of it
#   Figure 2          13
#
# Figure 6 (500 problems, 22 times, once: accuracy does not vary) takes about as long as Figure 3 again.
CPU_TINY = Platform(
    name="cpu-tiny",
    title="this CPU, embedded tiny LLaDA",
    executor="torch",
    gpu=None,
    parts=(
        DllmPart(
            model="tiny",
            memory_bytes=64 * MIB,
            gen_length=64,
            block_length=16,
            steps=64,
            max_num_batched_tokens=1024,
            max_num_logits=256,
            max_num_seqs=64,
            max_model_len=768,
            length_scale=0.25,
            rates=(4.0, 20.0),
            load_s=1.4,
            num_requests=dict.fromkeys(("livebench", "burst", "osc"), 24),
            device="cpu",
            dtype="float32",
        ),
    ),
)


def _card(
    gpu: str,
    title: str,
    memory_bytes: int,
    *,
    rates: tuple[float, ...] = (1.0, 2.0, 4.0, 6.0),
    panel_rates: Mapping[str, tuple[float, ...]] | None = None,
    max_num_batched_tokens: int = 16384,
    max_model_len: int = 4096,
) -> Platform:
    part = DllmPart(
        model="llada-8b",
        memory_bytes=memory_bytes,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_logits=2048,
        max_model_len=max_model_len,
        rates=rates,
        panel_rates=panel_rates or {},
        num_requests=PAPER_REQUESTS,
    )
    return Platform(name=gpu, title=f"NVIDIA {title}, LLaDA-8B", executor="roofline", gpu=gpu, parts=(part,))


RTX4090 = _card(
    "rtx4090",
    "RTX 4090 24 GB",
    24 * GB,
    # Both ends of the paper's Figure 3, and in each panel a point at the knees of baselines as published (0.11 to 0.18 req/s,
    # Fast-dLLM's on OSC 0.25; the paper: 42.4 tok/s over 256 tokens, 0.166) and one at dLLM-Serve's.
    rates=(0.1, 0.15, 0.3, 0.5),
    panel_rates={"livebench": (0.1, 0.14, 0.32, 0.5), "burst": (0.1, 0.14, 0.28, 0.5), "osc": (0.1, 0.16, 0.37, 0.5)},
    max_num_batched_tokens=4000,
    max_model_len=4000,
)
L40S = _card(
    "l40s",
    "L40S 48 GB",
    48 * GB,
    # Up to Table 4's rate. Knees as published: Sparse-dLLM 0.12 req/s, dLLM-Cache 0.13 to 0.3, Fast-dLLM 0.2 to 0.6, dLLM-Serve
    # 0.33 to 0.66, by roofline and by measured kernels.
    rates=(0.1, 0.25, 0.5, 1.0),
    panel_rates={
        "livebench": (0.1, 0.2, 0.35, 0.55, 1.0),
        "burst": (0.1, 0.2, 0.3, 0.5, 1.0),
        "osc": (0.1, 0.25, 0.45, 0.65, 1.0),
    },
)

# Cards that are none of the paper's, without a calibration: simulated from datasheet peaks.
A100 = _card("a100", "A100 80 GB", 80 * GB)
H100 = _card("h100", "H100 80 GB", 80 * GB)
H200 = _card("h200", "H200 141 GB", 141 * GB)
B200 = _card("b200", "B200 180 GB", 180 * GB)
