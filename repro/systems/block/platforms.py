"""Platforms of block-diffusion systems: one card and one model each."""

from __future__ import annotations

from engines.cost.cards import gpu
from repro.systems.block.part import BlockPart
from repro.systems.platforms import Platform


def _card(card: str, model: str, title: str, tokens_per_forward: float) -> Platform:
    memory = gpu(card).memory_bytes
    part = BlockPart(model=model, memory_limit=memory, tokens_per_forward=tokens_per_forward)
    return Platform(
        name=f"{card}-{model}",
        title=f"NVIDIA {card.upper()} {memory / 1e9:g} GB, {title}",
        executor="roofline",
        gpu=card,
        parts=(part,),
    )


# A block of 4 takes two steps and one of 32 eight: assumed, as no released weights were run.
H20_LLADA2_MINI = _card("h20", "llada2-mini", "LLaDA2-mini", 4.0)
H200_LLADA2_MINI = _card("h200", "llada2-mini", "LLaDA2-mini", 4.0)
H200_SDAR_8B = _card("h200", "sdar-8b", "SDAR-8B", 2.0)
H100_SDAR_8B = _card("h100", "sdar-8b", "SDAR-8B", 2.0)
