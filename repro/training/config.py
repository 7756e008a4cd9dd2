"""All hyper-parameters of the tiny model. They are frozen, so one config and one seed name one checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from engines.errors import UserError, require
from engines.knobs import Checked, Needs, Range, Seed
from engines.models.block_config import BlockLength
from repro.files import read_yaml
from repro.tasks.mini import GENERATORS
from repro.tasks.problem import Span


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of the curriculum, which lasts until ``until`` (a fraction of all steps)."""

    until: float
    num_facts: Span
    num_distractors: Span
    num_used: Span = (2, 3)
    """How many facts a mini-gsm question needs."""
    num_operations: Span = (2, 5)
    """How many words a mini-code function composes."""
    num_terms: Span = (5, 8)
    """How many facts a mini-chain question needs."""
    listing_share: float = 0.0
    """Share of mini-gsm problems that need only recall. It makes recall frequent in the training texts."""
    drill_share: float = 0.0
    """Share of mini-gsm and mini-chain problems that need only addition. It makes arithmetic frequent in the training texts."""
    num_names: int = 16
    """Names and glossary words in use."""


def _stage(raw: Mapping[str, Any]) -> Stage:
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in raw.items()}
    return Stage(**values)


CURRICULA: Mapping[str, tuple[Stage, ...]] = {
    task: tuple(map(_stage, stages)) for task, stages in read_yaml(Path(__file__).with_name("curriculum.yaml")).items()
}
"""The curriculum by the first task that a model is trained on."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Checked):
    seed: Seed = 0
    """Seed of the weights and of the training texts."""
    steps: Annotated[int, Range(1, 10**7)] = 3600
    """Optimiser steps."""
    tasks: tuple[str, ...] = ("mini-gsm", "mini-code")
    """Tasks to train on. Every batch has equally many problems of each."""
    start: Annotated[str, Needs(block_diffusion=None, canvas=None)] | None = None
    """Checkpoint of this shape to start from, with its tokenizer and weights; by default both are made anew."""

    d_model: int = 160
    n_layers: int = 4
    n_heads: int = 8
    mlp_hidden_size: int = 448
    max_sequence_length: Annotated[int, Range(1, 10**5)] = 1024
    """The most tokens of a prompt and its answer. It may differ from that of start."""
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    weight_tying: bool = False

    vocab_size: int = 768
    """Upper limit; the tokenizer's training stops earlier if no pair of pieces repeats."""
    tokenizer_problems: int = 3000
    """Problems per task on which the tokenizer is trained."""

    gen_length: Annotated[int, Range(1, 512)] = 64
    """Tokens of the answer region."""
    block_lengths: tuple[int, ...] = (16, 32)
    tokens_per_batch: Annotated[int, Range(1, 10**7)] = 3072
    """Approximate rows of a batch, with padding."""
    curriculum: tuple[Stage, ...] = ()
    """The stages of training. By default those of the first task, or of mini-gsm."""
    rehearsal: float = 0.15
    """Share of batches drawn from a random earlier stage."""

    matrix_learning_rate: Annotated[float, Range(above=0, most=1)] = 5e-3
    """Peak rate of Muon, which trains the matrices of the blocks."""
    learning_rate: Annotated[float, Range(above=0, most=1)] = 3e-3
    """Peak rate of AdamW, which trains the embedding, the head and the gains."""
    final_rate_share: float = 0.02
    """Both rates end at this share of their peak."""
    warmup_steps: Annotated[int, Range(0, 10**7)] = 100
    """Steps in which both rates rise to their peak."""
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.05
    grad_clip: float = 1.0
    fill_weight: float = 0.1
    """Loss weight of end-of-text positions after the first."""
    pattern_shares: tuple[float, float, float] = field(default=(0.25, 0.35, 0.40))
    """Shares of the mask patterns: whole answer, random within a block, left-to-right within a block."""

    block_diffusion: BlockLength | None = None
    """Tokens of a block. If given, train a block-diffusion model with SDAR's architecture instead of a LLaDA."""
    canvas: Annotated[BlockLength, Needs(block_diffusion=None, start=None)] | None = None
    """Tokens of a canvas. If given, train a model with DiffusionGemma's architecture instead of a LLaDA."""
    replaced_shares: tuple[float, float] = (0.2, 0.15)
    """Share of a block-diffusion model's noisy blocks that get wrong visible tokens, and the share of wrong tokens in them."""

    bfloat16: bool = True
    threads: int = 1
    """Threads to train with. More threads change the order of sums and so the weights, and on two cores gain little."""
    log_every: int = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.block_diffusion is None or self.gen_length % self.block_diffusion == 0,
            f"block_diffusion={self.block_diffusion} must divide gen_length={self.gen_length}",
        )
        if any(self.gen_length % block for block in self.block_lengths):
            raise UserError(f"block_lengths={self.block_lengths} must all divide gen_length={self.gen_length}")
        require(bool(self.tasks), "tasks=() must name at least one")
        for task in self.tasks:
            require(task in GENERATORS, f"tasks={task!r} is no task of embedded models: use {', '.join(GENERATORS)}")
        if not self.curriculum:
            object.__setattr__(self, "curriculum", CURRICULA.get(self.tasks[0], CURRICULA["mini-gsm"]))
        ends = [stage.until for stage in self.curriculum]
        if not ends or ends[-1] != 1.0 or ends != sorted(set(ends)):
            raise UserError(f"curriculum ends at {ends}: give increasing `until`, the last one 1.0")
        if abs(sum(self.pattern_shares) - 1) > 1e-6:
            raise UserError(f"pattern_shares={self.pattern_shares} must add up to 1")
