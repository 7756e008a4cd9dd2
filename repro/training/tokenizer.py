"""The byte-level BPE of the tiny model, trained on generated problems so that every task word is one token."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from repro.files import replace_text
from repro.tasks.mini import GENERATORS

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
