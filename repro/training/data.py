"""The tokenizer of the tiny model, in which every task word is one token; and batches as a function of (config, step): resuming needs no
generator state.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from engines.models.tokenizer import TextTokenizer
from repro.files import replace_text
from repro.tasks import mini_chain, mini_code
from repro.tasks.mini import GENERATORS
from repro.tasks.problem import Problem
from repro.training.config import Stage, TrainConfig

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
MASK, EOS, BOS = "<|mdm_mask|>", "<|endoftext|>", "<|startoftext|>"

# Numbers below 100 are one token (with the blank before it): a sum is then one look-up. Words with their blank, runs of punctuation, runs of white space.
_PIECES = r" ?[0-9]{1,2}| ?[A-Za-z_]+| ?[^\sA-Za-z_0-9]+|\s+(?!\S)|\s+"


def train_tokenizer(tasks: Sequence[str], *, seed: int, problems_per_task: int, vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[EOS, BOS, MASK],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts: list[str] = []
    for task in tasks:
        for problem in GENERATORS[task](seed, problems_per_task, "train"):
            texts += (problem.prompt, problem.answer)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, *, max_length: int) -> None:
    """The Hugging Face layout: ``tokenizer.json`` and ``tokenizer_config.json``."""
    replace_text(directory / TOKENIZER_FILES[0], tokenizer.to_str(pretty=True))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "mask_token": MASK,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    replace_text(directory / TOKENIZER_FILES[1], json.dumps(config, indent=2) + "\n")


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
