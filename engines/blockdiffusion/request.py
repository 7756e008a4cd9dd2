"""What is asked for, and what comes of it; no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from engines.blockdiffusion.rules import DecodeRule, LowConfidence
from engines.errors import require
from engines.knobs import Checked, Needs, Proportion, Range, Seed

AnswerTokens = Annotated[int, Range(1, 2**20)]


@dataclass(frozen=True, kw_only=True)
class BlockSampling(Checked):
    """How tokens are drawn, and what confidence is: the token's probability after temperature, top_k and top_p, in that order
    (LLaDA2, SDAR). Temperature 0 is greedy, its confidence the model's own probability."""

    temperature: Annotated[float, Range(0, 1e6)] = 0.0
    top_k: Annotated[int, Range(1, 2**31 - 1), Needs(temperature=Range(above=0))] | None = None
    top_p: Annotated[Proportion, Needs(temperature=Range(above=0))] = 1.0
    draws: bool = True
    """False takes the likeliest token, whose confidence is still what temperature, top_k and top_p leave of it."""
    seed: Seed = 0


GREEDY = BlockSampling()


@dataclass(frozen=True, kw_only=True)
class BlockRequest:
    request_id: int
    prompt_ids: tuple[int, ...]
    gen_length: AnswerTokens
    rule: DecodeRule = field(default_factory=LowConfidence)
    sampling: BlockSampling = GREEDY
    stop_ids: frozenset[int] = frozenset()
    """A block that holds one of them, beside the prompt, is the last."""
    exits_early: bool = False
    """Ends within a block, once no hole is left in front of a stop token; of rules that edit nothing."""
    arrival_s: float = 0.0

    def __post_init__(self) -> None:
        require(self.gen_length >= 1, f"gen_length={self.gen_length} must be at least 1")
        require(bool(self.prompt_ids), "prompt_ids is empty: give at least one token")
        require(
            not (self.exits_early and self.rule.edits),
            f"exits_early with {type(self.rule).__name__}: its tokens may change until their block is final; leave it out",
        )

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_ids)

    @property
    def total(self) -> int:
        return self.prompt_len + self.gen_length


@dataclass(frozen=True, kw_only=True)
class Answer:
    ids: tuple[int, ...]
    """At most ``gen_length``, up to the first stop token and with it."""
    reason: Literal["stop", "length"]
    denoised: int
    """Forwards that denoised a block, anew after a preemption too."""
    committed: int
    """Forwards that wrote the K/V of a generated block that was final."""
    prefilled: int
    """Blocks of the prompt that were computed, anew after a preemption too; a prefix hit saves them."""
    rows: int
    """Rows that were computed for it."""
