"""Random LLaDA and Dream checkpoints small enough for tests, the same numbers on every machine.

Weights come from numpy's legacy generator, whose stream is frozen. Their scale is large, so that logits
are well separated and sampled tokens do not hang on the last bit of a sum.
"""

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from engines.dllm.config import GenerationConfig
from engines.dllm.plan import Request
from engines.models.config import DreamConfig, LLaDAConfig
from engines.models.decoder import DreamModel
from engines.models.llada import LLaDAModelLM

MaskRow = Literal["zero", "loud"]


@dataclass(frozen=True, kw_only=True)
class TinyCheckpoint(ABC):
    name: str
    seed: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int
    max_len: int = 256

    @property
    def mask_id(self) -> int:
        return self.vocab - 2

    @property
    @abstractmethod
    def config(self) -> LLaDAConfig | DreamConfig: ...

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """The published tensor names."""

    def write(self, directory: Path) -> Path:
        """A checkpoint folder in the published layout."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config.to_dict(), indent=1) + "\n")
        save_file(self.weights(), directory / "model.safetensors", metadata={"format": "pt"})
        return directory

    def _sizes(self) -> dict[str, int]:
        return {
            "d_model": self.width,
            "n_layers": self.layers,
            "n_heads": self.heads,
            "n_kv_heads": self.kv_heads,
            "mlp_hidden_size": self.mlp,
            "vocab_size": self.vocab,
            "max_sequence_length": self.max_len,
            "mask_token_id": self.mask_id,
            "eos_token_id": self.vocab - 1,
            "pad_token_id": self.vocab - 1,
        }


@dataclass(frozen=True, kw_only=True)
class TinyModel(TinyCheckpoint):
    """LLaDA. ``mask_row`` is the head's row of the mask token: ``zero`` is hardly ever predicted, ``loud`` often."""

    mask_row: MaskRow = "zero"

    @property
    def config(self) -> LLaDAConfig:
        return LLaDAConfig(**self._sizes(), rope_theta=500000.0, rms_norm_eps=1e-5)

    def weights(self) -> dict[str, Tensor]:
        random = np.random.RandomState(self.seed)

        def normal(rows: int, columns: int, gain: float) -> Tensor:
            values = random.standard_normal((rows, columns)) * gain / np.sqrt(columns)
            return torch.from_numpy(values.astype(np.float32))

        def norm() -> Tensor:
            return torch.from_numpy((1 + 0.2 * random.standard_normal(self.width)).astype(np.float32))

        d, kv = self.width, self.kv_heads * (self.width // self.heads)
        root = "model.transformer"
        embedding = normal(self.vocab, d, float(np.sqrt(d)))
        # All masks share one embedding: quiet, so that where they are and what is around them decides.
        embedding[self.mask_id] *= 0.3
        tensors = {f"{root}.wte.weight": embedding}
        for n in range(self.layers):
            block = f"{root}.blocks.{n}"
            tensors[f"{block}.attn_norm.weight"] = norm()
            tensors[f"{block}.q_proj.weight"] = normal(d, d, 2.5)
            tensors[f"{block}.k_proj.weight"] = normal(kv, d, 2.5)
            tensors[f"{block}.v_proj.weight"] = normal(kv, d, 2.0)
            tensors[f"{block}.attn_out.weight"] = normal(d, d, 2.0)
            tensors[f"{block}.ff_norm.weight"] = norm()
            tensors[f"{block}.ff_proj.weight"] = normal(self.mlp, d, 1.5)
            tensors[f"{block}.up_proj.weight"] = normal(self.mlp, d, 1.5)
            tensors[f"{block}.ff_out.weight"] = normal(d, self.mlp, 1.5)
        tensors[f"{root}.ln_f.weight"] = norm()
        head = normal(self.vocab, d, 3.0)
        head[self.mask_id] *= 0.0 if self.mask_row == "zero" else 1.6
        tensors[f"{root}.ff_out.weight"] = head
        return tensors


@dataclass(frozen=True, kw_only=True)
class TinyDream(TinyCheckpoint):
    """Biases that count, and a mask token that is hardly ever predicted."""

    @property
    def config(self) -> DreamConfig:
        return DreamConfig(**self._sizes(), rope_theta=1e6, rms_norm_eps=1e-6)

    def weights(self) -> dict[str, Tensor]:
        random = np.random.RandomState(self.seed)
        d, kv = self.width, self.kv_heads * (self.width // self.heads)

        def normal(*shape: int, gain: float) -> Tensor:
            return torch.from_numpy((random.standard_normal(shape) * gain).astype(np.float32))

        def matrix(rows: int, columns: int, gain: float) -> Tensor:
            return normal(rows, columns, gain=gain / np.sqrt(columns))

        tensors = {"model.embed_tokens.weight": normal(self.vocab, d, gain=1.0)}
        tensors["model.embed_tokens.weight"][self.mask_id] *= 0.3
        for n in range(self.layers):
            layer = f"model.layers.{n}"
            for name in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"{layer}.{name}.weight"] = 1 + normal(d, gain=0.2)
            for what, rows in (("q", d), ("k", kv), ("v", kv)):
                tensors[f"{layer}.self_attn.{what}_proj.weight"] = matrix(rows, d, 2.2)
                tensors[f"{layer}.self_attn.{what}_proj.bias"] = normal(rows, gain=0.6)
            tensors[f"{layer}.self_attn.o_proj.weight"] = matrix(d, d, 2.0)
            tensors[f"{layer}.mlp.gate_proj.weight"] = matrix(self.mlp, d, 1.5)
            tensors[f"{layer}.mlp.up_proj.weight"] = matrix(self.mlp, d, 1.5)
            tensors[f"{layer}.mlp.down_proj.weight"] = matrix(d, self.mlp, 1.5)
        tensors["model.norm.weight"] = 1 + normal(d, gain=0.2)
        tensors["lm_head.weight"] = matrix(self.vocab, d, 2.0)
        tensors["lm_head.weight"][self.mask_id] = 0
        return tensors


@lru_cache
def any_network(model: TinyCheckpoint) -> LLaDAModelLM | DreamModel:
    if isinstance(model, TinyModel):
        return network(model)
    found = DreamModel(model.config).requires_grad_(False)
    found.load_state_dict(model.weights())
    return found.eval()


@lru_cache
def network(model: TinyModel) -> LLaDAModelLM:
    loaded = LLaDAModelLM(model.config)
    loaded.load_state_dict(model.weights())
    return loaded.requires_grad_(False).eval()


def prompt_of(model: TinyCheckpoint, seed: int, length: int) -> tuple[int, ...]:
    return tuple(int(i) for i in np.random.RandomState(seed).randint(0, model.mask_id, length))


def request_on(
    model: TinyCheckpoint, request_id: int, prompt_len: int, generation: GenerationConfig, *, seed: int | None = None
) -> Request:
    """A request with a prompt of its own: its id's, or another seed's."""
    prompt = prompt_of(model, request_id if seed is None else seed, prompt_len)
    return Request(request_id=request_id, prompt_len=prompt_len, prompt_ids=prompt, generation=generation)


MHA = TinyModel(name="mha", seed=1, layers=3, width=32, heads=4, kv_heads=4, mlp=48, vocab=96)
GQA = TinyModel(name="gqa", seed=2, layers=2, width=48, heads=6, kv_heads=2, mlp=64, vocab=128)
MQA = TinyModel(name="mqa", seed=3, layers=2, width=32, heads=4, kv_heads=1, mlp=40, vocab=80)
LOUD = TinyModel(name="loud", seed=4, layers=2, width=32, heads=2, kv_heads=2, mlp=40, vocab=64, mask_row="loud")
ONE_LAYER = TinyModel(name="one-layer", seed=5, layers=1, width=32, heads=4, kv_heads=2, mlp=48, vocab=96)
DREAM = TinyDream(name="dream", seed=11, layers=3, width=32, heads=4, kv_heads=2, mlp=48, vocab=96)
