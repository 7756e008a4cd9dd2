"""Batches as a function of (config, step): resuming needs no generator state."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engines.models.tokenizer import TextTokenizer
from repro.tasks import mini_chain, mini_code
from repro.tasks.mini import GENERATORS
from repro.tasks.problem import Problem
from repro.training.config import Stage, TrainConfig


@dataclass(frozen=True, kw_only=True)
class Batch:
    """B sequences of prompt + answer region, right-padded to T columns with the end-of-text id."""

    ids: np.ndarray
    """[B, T] int64, clean."""
    lengths: np.ndarray
    """[B]; prompt + gen_length. Columns beyond it are padding and must not be attended."""
    prompt_lengths: np.ndarray
    """[B]."""
    answer_lengths: np.ndarray
    """[B]; answer tokens before the first end-of-text."""


def encode_problems(problems: Sequence[Problem], tokenizer: TextTokenizer, gen_length: int) -> Batch:
    prompts = tokenizer.encode_batch([problem.prompt for problem in problems])
    answers = tokenizer.encode_batch([problem.answer for problem in problems])
    too_long = max(map(len, answers))
    if too_long > gen_length:
        raise ValueError(f"an answer of {too_long} tokens does not fit gen_length={gen_length}")
    lengths = np.array([len(prompt) + gen_length for prompt in prompts])
    ids = np.full((len(problems), _round_up(int(lengths.max()))), tokenizer.eos_token_id, dtype=np.int64)
    for row, prompt, answer in zip(ids, prompts, answers, strict=True):
        row[: len(prompt)] = prompt
        row[len(prompt) : len(prompt) + len(answer)] = answer
    return Batch(
        ids=ids,
        lengths=lengths,
        prompt_lengths=lengths - gen_length,
        answer_lengths=np.array([len(answer) for answer in answers]),
    )


def make_batch(config: TrainConfig, tokenizer: TextTokenizer, step: int) -> Batch:
    """All tasks in equal number, of one number of facts and distractors so that lengths are close."""
    rng = np.random.default_rng((config.seed, step))
    current = next(
        i for i, stage in enumerate(config.curriculum) if step < stage.until * config.steps or stage.until == 1.0
    )
    if current and rng.random() < config.rehearsal:
        current = int(rng.integers(current))
    stage = config.curriculum[current]
    num_facts = _draw(rng, stage.num_facts)
    num_distractors = _draw(rng, stage.num_distractors)
    columns = _round_up(22 + 7 * num_facts + 5 * num_distractors + config.gen_length)
    count = max(1, config.tokens_per_batch // columns // len(config.tasks))
    seed = config.seed * 1_000_003 + step
    sizes = {"num_facts": num_facts, "num_distractors": num_distractors}
    problems = [
        problem
        for task in config.tasks
        for problem in GENERATORS[task](seed, count, "train", **sizes, **_settings_of(task, stage))
    ]
    return encode_problems(problems, tokenizer, config.gen_length)


def _settings_of(task: str, stage: Stage) -> dict[str, Any]:
    if task == mini_code.TASK:
        return {"num_used": stage.num_operations, "num_words": stage.num_names}
    sums = {"drill_share": stage.drill_share, "num_names": stage.num_names}
    if task == mini_chain.TASK:
        return {"num_used": stage.num_terms, **sums}
    return {"num_used": stage.num_used, "listing_share": stage.listing_share, **sums}


def _round_up(columns: int) -> int:
    """Few distinct shapes: on a CPU a matrix product of a new shape costs more to plan than to run."""
    return -(-columns // 16) * 16


def _draw(rng: np.random.Generator, span: int | tuple[int, int]) -> int:
    return span if isinstance(span, int) else int(rng.integers(span[0], span[1] + 1))
