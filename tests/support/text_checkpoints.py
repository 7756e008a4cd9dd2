"""Random checkpoints that read and write text, in the layouts of the hub."""

from dataclasses import replace
from pathlib import Path

import torch
from support.checkpoints import DREAM, dream_weights, write
from support.tiny_models import MHA
from support.tokenizers import LLADA_SPECIAL, write_dream_tokenizer, write_tokenizer

from engines.models.tokenizer import load_tokenizer

LLADA = replace(MHA, name="llada-with-text", vocab=256 + len(LLADA_SPECIAL))
MASK, EOS, EOT = (256 + LLADA_SPECIAL.index(token) for token in ("<|mdm_mask|>", "<|endoftext|>", "<|eot_id|>"))
HEAD = "model.transformer.ff_out.weight"


def write_llada(directory: Path, *, shards: int = 1, mask_gain: float = 0.0, **tokenizer: object) -> Path:
    """Bytes and LLaDA's special tokens; every layout detail as on the hub."""
    directory.mkdir()
    write_tokenizer(directory, **tokenizer)
    config = replace(LLADA.config, mask_token_id=MASK, eos_token_id=EOS, pad_token_id=EOS)
    weights = LLADA.weights()
    weights[HEAD][MASK] *= mask_gain
    write(
        directory, config.to_dict() | {"n_kv_heads": None, "torch_dtype": "bfloat16"}, weights, torch.bfloat16, shards
    )
    return directory


def write_dream(directory: Path, *, shards: int = 1, **tokenizer: object) -> Path:
    directory.mkdir()
    base = load_tokenizer(write_dream_tokenizer(directory, **tokenizer))
    config = replace(
        DREAM,
        vocab_size=base.vocab_size + 2,
        mask_token_id=base.mask_token_id,
        eos_token_id=base.eos_token_id,
        pad_token_id=base.eos_token_id,
    )
    weights = dream_weights(config)
    weights["lm_head.weight"][base.mask_token_id] = 0
    write(directory, config.to_dict(), weights, torch.bfloat16, shards)
    return directory
