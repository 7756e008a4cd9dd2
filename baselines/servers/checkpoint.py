"""A Qwen2 of random weights, small enough for a CPU and made in a moment, with the tokenizer of the embedded model.

Its answers mean nothing; servers load it, chat with it and charge it like any other model of its size.
"""

import json
import shutil
from pathlib import Path

import numpy as np

from engines.models.checkpoint import TINY_DIR
from engines.models.qwen2_config import CausalConfig, tiny_causal

TINY = "tiny"
MAX_MODEL_LEN = 32768
_END_OF_TEXT = 0
"""Id in the embedded tokenizer."""
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def tiny_config() -> CausalConfig:
    """0.6 million parameters over the embedded tokenizer's vocabulary, rounded up to whole blocks of kernels."""
    return tiny_causal(d_model=128, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=576)


def write_tiny(folder: Path, *, seed: int = 0) -> Path:
    """The checkpoint folder; the same bytes for the same seed."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config()
    described = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": config.d_model,
        "intermediate_size": config.mlp_hidden_size,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": MAX_MODEL_LEN,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "hidden_act": "silu",
        "tie_word_embeddings": config.weight_tying,
        "use_sliding_window": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": _END_OF_TEXT,
        "eos_token_id": _END_OF_TEXT,
        "pad_token_id": _END_OF_TEXT,
    }
    _write(folder / "config.json", described)
    _write(folder / "generation_config.json", {"eos_token_id": _END_OF_TEXT, "pad_token_id": _END_OF_TEXT})
    shutil.copyfile(TINY_DIR / "tokenizer.json", folder / "tokenizer.json")
    tokens = json.loads((TINY_DIR / "tokenizer_config.json").read_text())
    tokens |= {"model_max_length": MAX_MODEL_LEN, "chat_template": _CHAT_TEMPLATE}
    del tokens["mask_token"]
    _write(folder / "tokenizer_config.json", tokens)
    save_file(_weights(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def _weights(config: CausalConfig, seed: int) -> dict[str, np.ndarray]:
    """The published tensor names."""
    # The legacy generator's stream is frozen.
    random = np.random.RandomState(seed)
    d, hidden = config.d_model, config.mlp_hidden_size
    queries, keys = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim

    def draw(*shape: int) -> np.ndarray:
        return (random.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    weights = {"model.embed_tokens.weight": draw(config.vocab_size, d), "model.norm.weight": np.ones(d, np.float32)}
    for layer in range(config.n_layers):
        name = f"model.layers.{layer}"
        for part, rows in (("q", queries), ("k", keys), ("v", keys)):
            weights[f"{name}.self_attn.{part}_proj.weight"] = draw(rows, d)
            weights[f"{name}.self_attn.{part}_proj.bias"] = np.zeros(rows, np.float32)
        weights[f"{name}.self_attn.o_proj.weight"] = draw(d, queries)
        weights[f"{name}.mlp.gate_proj.weight"] = draw(hidden, d)
        weights[f"{name}.mlp.up_proj.weight"] = draw(hidden, d)
        weights[f"{name}.mlp.down_proj.weight"] = draw(d, hidden)
        weights[f"{name}.input_layernorm.weight"] = np.ones(d, np.float32)
        weights[f"{name}.post_attention_layernorm.weight"] = np.ones(d, np.float32)
    return weights
