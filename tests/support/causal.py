"""Small causal decoders and an executor for them."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from support.graph_recorders import EagerRecorder
from support.tables import data_beside

from engines.ampd.live.coordinator import Prompts
from engines.ar.torch.attention import PagedAttention, reference_kernel
from engines.ar.torch.executor import PagedExecutor
from engines.ar.torch.rows import PackedWork
from engines.cluster.sessions import Session
from engines.models.decoder import CausalModel
from engines.models.layers import FusedOps, fuse
from engines.models.loader import load_causal
from engines.models.qwen2_config import CausalConfig, tiny_causal
from engines.runtime.device import Staging, store_by_index

DATA = data_beside(__file__, "causal")

VOCAB = 97
SIZES = DATA["sizes"]
"""A small decoder's, by the names of a published config.json."""
LLAMA3 = DATA["llama3"]
"""Positions as Llama 3.1 scales them, of a model so small."""


def small_config(n_layers: int = 2, vocab_size: int = VOCAB) -> CausalConfig:
    return tiny_causal(d_model=32, n_layers=n_layers, n_heads=4, n_kv_heads=2, vocab_size=vocab_size)


def small_qwen3() -> CausalConfig:
    """Heads wider than the width has room for, and normed."""
    return replace(small_config(), family="qwen3", qkv_bias=False, head_dim=16)


def small_model(
    seed: int = 0, scale: float = 8.0, *, vocab_size: int = VOCAB, config: CausalConfig | None = None
) -> CausalModel:
    """Random weights, large enough that the likeliest token is not always the same."""
    model = load_causal(config or small_config(vocab_size=vocab_size), weights="random", seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
    # A product of several layers does not see that they were written to.
    fuse(model, FusedOps(joins=False))
    model.reorder(joins=True)
    return model


def executor(model: CausalModel | None = None, **options: object) -> PagedExecutor:
    sizes = {"num_slots": 24, "max_len": 256, "num_tokens": 4096, "longest_bucket": 32, **options}
    return PagedExecutor(model or small_model(), **sizes)


def paged_executor(model: CausalModel, block_size: int = 16, **options: object) -> PagedExecutor:
    """What runs on a card, on any device: the reference of the kernels that read blocks, and graphs that run their forward."""
    attention = PagedAttention("reference", reference_kernel, store_by_index, Staging(), block_size=block_size)
    return executor(model, attention=attention, recorder=EagerRecorder(), **options)


def prompt(tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(VOCAB, size=tokens)


def start(worker: PagedExecutor, ids: np.ndarray, *, room: int | None = None) -> int:
    """A slot with these ids and blocks for ``room`` tokens, by default twice as many."""
    slot = worker.open()
    worker.write(slot, 0, ids)
    worker.tables.grow(np.array([slot]), np.array([room or min(2 * len(ids) + 32, worker.tables.max_len)]))
    return slot


def run(worker: PagedExecutor, *entries: tuple[int, int, int, bool], mode: object = None) -> list[int]:
    """A step over (slot, start, count, samples); the sampled ids."""
    return worker.run(PackedWork.of(list(entries)), mode).tokens.tolist()


def generate(worker: PagedExecutor, slot: int, context: int, tokens: int) -> list[int]:
    """Greedy ids after a prefill of ``context`` tokens in one step."""
    found = run(worker, (slot, 0, context, True))
    for place in range(context, context + tokens - 1):
        found += run(worker, (slot, place, 1, True))
    return found


def session_answers(worker: PagedExecutor, session: Session, prompts: Prompts) -> list[list[int]]:
    """The session alone, each turn prefilled from its first token: no cache, no company, no policy."""
    ids: list[int] = []
    answers = []
    for index, (_, decode, _) in enumerate(session.rounds):
        ids += prompts(session, index).tolist()
        slot = start(worker, np.array(ids))
        answers.append(generate(worker, slot, len(ids), decode))
        ids += answers[-1]
        worker.close_slot(slot)
    return answers


def causal_logits(model: CausalModel, ids: Sequence[int]) -> torch.Tensor:
    """[n, V] by torch's own causal attention over the whole sequence."""

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    with torch.inference_mode():
        positions = torch.arange(len(ids))
        return model.logits(model.hidden(torch.tensor(ids), model.rotary(positions), attend))


def pooled(worker: PagedExecutor, slot: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [layers, tokens, Hkv, D] of a sequence."""
    rows = torch.from_numpy(worker.tables.rows(np.full(tokens, slot), np.arange(tokens)))
    return tuple(pool.flatten(1, 2)[:, rows].clone() for pool in (worker.pool.k, worker.pool.v))
