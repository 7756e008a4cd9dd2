"""A random causal checkpoint that reads and writes text, as the hub has them."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from support.causal import small_model
from support.tokenizers import BYTES, CHATML_JINJA
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from engines.models.qwen2_config import CausalConfig

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB = len(BYTES) + len(SPECIAL)
END, TURN_START, TURN_END = range(len(BYTES), VOCAB)


def write_causal(
    folder: Path, *, adds_bos: bool = False, seed: int = 1, shape: CausalConfig | None = None, **config: Any
) -> Path:
    """Bytes and ChatML's special tokens. ``adds_bos`` puts an end of text in front of raw prompts, as GPT-2's line does."""
    folder.mkdir()
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(BYTES)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", END)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    own = {"eos_token": "<|im_end|>", "chat_template": CHATML_JINJA}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [TURN_END, END]}))
    model = small_model(seed, vocab_size=VOCAB, config=shape)
    shape = model.config
    fields = {
        "model_type": shape.family,
        "architectures": [f"{shape.family.title()}ForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": shape.d_model,
        "intermediate_size": shape.mlp_hidden_size,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope.theta,
        "tie_word_embeddings": shape.weight_tying,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(fields | config))
    save_file(dict(model.state_dict()), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
