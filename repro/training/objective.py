"""The tokenizer and the objectives of the tiny models. In this tokenizer every task word is one token. Batches and masks are functions of
(config, step), so resuming needs no generator state.

LLaDA's objective masks positions of the answer, and takes the loss on them.

The prompt is never masked. For each sequence we draw one of three patterns over the answer region:

- whole answer: each position is masked with probability t ~ U(0, 1) (the LLaDA objective);
- block, random: blocks before a drawn one are clean, later ones masked, the drawn one masked as above;
- block, left to right: the same, but the drawn block is clean up to a random position. Half of the time
  a quarter of its rest is revealed. Confidence decoding passes through states of this shape.

The loss is the weighted mean cross-entropy over the masked positions of the whole answer or of the
drawn block, without LLaDA's 1/t. So rare, nearly clean sequences get no excess weight.

Block diffusion's objective doubles sequences, and trains every block of the answer at once.

After the clean sequence come noisy copies of the blocks that hold its answer. Each block sees itself and the clean blocks before it, as
on a server (Arriola et al., arXiv 2503.09573, section 3.1). Blocks begin at multiples of their length. Prompt tokens in the answer's
first block are never masked.

Noise is drawn per block: each position is masked at ratio t ~ U(0, 1), or all but a left part, as above, without 1/t. In some blocks
we replace visible tokens by others of the batch, and the model must predict the original ones. Rules that edit need this (LLaDA2.1).
Shapes: B sequences of T clean columns followed by N noisy ones, R = T + N.

The objective of canvases (DiffusionGemma) computes clean sequences once, causally, and then canvases against their K/V, as a server does.
Canvases begin right after the prompt. They get two forwards. The first has only noise, like a server's first. The second has several
copies, in which some positions hold the true token and the others noise, and gets the first one's expectation. The model must predict all
positions, because noise is not marked.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

from engines.models.block_config import CANVAS_TYPE, NO_MASK, CanvasConfig, ExpertsConfig
from engines.models.config import DECODER_SIZES, LAYERS, Rope
from engines.models.gemma import CanvasRows, GemmaModel
from engines.models.protocol import Attend
from engines.models.tokenizer import TextTokenizer
from repro.files import replace_text
from repro.tasks import mini_code, mini_gsm
from repro.tasks.mini import GENERATORS
from repro.tasks.problem import Problem
from repro.training import objective
from repro.training.config import Stage, TrainConfig

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
MASK, EOS, BOS = "<|mdm_mask|>", "<|endoftext|>", "<|startoftext|>"

# Pieces: a number below 100 with its blank (so a sum is one look-up), a word with its blank, runs of punctuation or white space.
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
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` in Hugging Face's layout."""
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
    """B sequences of a prompt and an answer region, padded on the right to T columns with the end-of-text id."""

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
    """The batch of a step: equally many problems of each task, with the same numbers of facts and distractors for close lengths."""
    rng = np.random.default_rng((config.seed, step))
    stage_index = next(
        i for i, stage in enumerate(config.curriculum) if step < stage.until * config.steps or stage.until == 1.0
    )
    if stage_index and rng.random() < config.rehearsal:
        stage_index = int(rng.integers(stage_index))
    stage = config.curriculum[stage_index]
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
    if task in (mini_gsm.CHAIN, mini_gsm.FAR, mini_gsm.ROLL):
        return {"num_used": stage.num_terms, **sums}
    return {"num_used": stage.num_used, "listing_share": stage.listing_share, **sums}


def _round_up(columns: int) -> int:
    """Round up to 16, for few distinct shapes: on a CPU, planning a matrix product of a new shape costs more than running it."""
    return -(-columns // 16) * 16


def _draw(rng: np.random.Generator, span: int | tuple[int, int]) -> int:
    return span if isinstance(span, int) else int(rng.integers(span[0], span[1] + 1))


@dataclass(frozen=True, kw_only=True)
class MaskedBatch:
    inputs: np.ndarray
    """[B, T] ids with the masked positions replaced."""
    rows: np.ndarray
    """[B * gen_length] flat indices of the answer region into [B * T]."""
    targets: np.ndarray
    """[B * gen_length] clean ids."""
    weights: np.ndarray
    """[B * gen_length] float32; zero at positions without loss, which include all clean ones."""


def mask_batch(config: TrainConfig, batch: Batch, mask_token_id: int, step: int) -> MaskedBatch:
    rng = np.random.default_rng((config.seed, step, 1))
    count, columns = batch.ids.shape
    g = config.gen_length
    offsets = np.arange(g)
    patterns = np.asarray(rng.choice(3, size=count, p=config.pattern_shares))
    masked = rng.random((count, g)) < rng.random((count, 1))
    scored = np.ones((count, g), dtype=bool)
    for i in np.flatnonzero(patterns > 0):
        block = int(rng.choice(config.block_lengths))
        # Blocks after the answer hold only fill, so at most one of them is worth training on.
        last = min(g // block - 1, int(batch.answer_lengths[i]) // block)
        start = int(rng.integers(last + 1)) * block
        in_block = (offsets >= start) & (offsets < start + block)
        if patterns[i] == 2:
            reveal = 0.25 if rng.random() < 0.5 else 0.0
            masked[i] = (offsets >= start + rng.integers(block)) & (rng.random(g) >= reveal)
        masked[i] = np.where(in_block, masked[i], offsets >= start + block)
        scored[i] = in_block
    empty = ~(masked & scored).any(axis=1)
    for i in np.flatnonzero(empty):
        choice = int(rng.choice(np.flatnonzero(scored[i])))
        masked[i, choice] = True

    positions = batch.prompt_lengths[:, None] + offsets
    flat = np.arange(count)[:, None] * columns + positions
    inputs = batch.ids.copy()
    inputs.reshape(-1)[flat[masked]] = mask_token_id
    weights = np.where(offsets > batch.answer_lengths[:, None], config.fill_weight, 1.0) * (masked & scored)
    rows = flat.reshape(-1)
    return MaskedBatch(
        inputs=inputs, rows=rows, targets=batch.ids.reshape(-1)[rows], weights=weights.reshape(-1).astype(np.float32)
    )


def masked_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """The weighted mean cross-entropy of logits [rows, V]."""
    losses = F.cross_entropy(logits.float(), targets, reduction="none")
    return (losses * weights).sum() / weights.sum()


_VISIBLE_WEIGHT = 0.1
"""The loss weight of a visible token that is correct."""


@dataclass(frozen=True, kw_only=True)
class DoubledBatch(MaskedBatch):
    """A batch of doubled sequences. ``inputs`` is [B, R]; ``rows``, ``targets`` and ``weights`` cover the noisy columns."""

    positions: np.ndarray
    """[B, R]"""
    allowed: np.ndarray
    """bool [B, R, R]: which columns a row sees."""


def double_batch(config: TrainConfig, batch: Batch, tokenizer: TextTokenizer, step: int) -> DoubledBatch:
    block = config.block_diffusion
    assert block is not None
    rng = np.random.default_rng((config.seed, step, 1))
    count = len(batch.ids)
    opens = batch.prompt_lengths // block * block
    blocks = int(((batch.prompt_lengths + batch.answer_lengths) // block - opens // block).max()) + 1
    clean = np.pad(batch.ids, ((0, 0), (0, block)), constant_values=tokenizer.eos_token_id)[
        :, : int(opens.max()) + blocks * block
    ]
    columns, noisy = clean.shape[1], blocks * block
    noisy_positions = opens[:, None] + np.arange(noisy)
    truth = np.take_along_axis(clean, noisy_positions, axis=1)
    is_answer = noisy_positions >= batch.prompt_lengths[:, None]
    masked = masked_positions(config, rng, (count, blocks, block)).reshape(count, noisy) & is_answer
    is_wrong = _replaced(config, rng, (count, blocks, block)).reshape(count, noisy) & is_answer & ~masked
    is_fill = noisy_positions > (batch.prompt_lengths + batch.answer_lengths)[:, None]
    others = rng.choice(truth[is_answer & ~is_fill], size=truth.shape)
    is_wrong &= others != truth
    weights = np.where(masked | is_wrong, 1.0, _VISIBLE_WEIGHT) * np.where(is_fill, config.fill_weight, 1.0) * is_answer
    positions = np.concatenate((np.broadcast_to(np.arange(columns), clean.shape), noisy_positions), axis=1)
    rows = np.arange(count)[:, None] * (columns + noisy) + columns + np.arange(noisy)
    inputs = np.where(masked, tokenizer.mask_token_id, np.where(is_wrong, others, truth))
    return DoubledBatch(
        inputs=np.concatenate((clean, inputs), axis=1),
        positions=positions,
        allowed=_allowed(positions // block, columns),
        rows=rows.reshape(-1),
        targets=truth.reshape(-1),
        weights=weights.reshape(-1).astype(np.float32),
    )


def _allowed(block_of: NDArray[np.int64], columns: int) -> NDArray[np.bool_]:
    query, key = block_of[:, :, None], block_of[:, None, :]
    is_noisy = np.arange(block_of.shape[1]) >= columns
    return np.where(
        is_noisy, is_noisy[:, None] & (query == key), np.where(is_noisy[:, None], key < query, key <= query)
    )


def masked_positions(config: TrainConfig, rng: np.random.Generator, shape: tuple[int, int, int]) -> NDArray[np.bool_]:
    """The masked positions of ``shape`` (sequences, blocks, positions). A block is masked at a ratio, or except for a left part."""
    count, blocks, block = shape
    per_block = (count, blocks, 1)
    at_random = rng.random(shape) < rng.random(per_block)
    reveal = np.where(rng.random(per_block) < 0.5, 0.25, 0.0)
    from_left = (np.arange(block) >= rng.integers(block, size=per_block)) & (rng.random(shape) >= reveal)
    return np.where(rng.random(per_block) < config.pattern_shares[2], from_left, at_random)


def _replaced(config: TrainConfig, rng: np.random.Generator, shape: tuple[int, int, int]) -> NDArray[np.bool_]:
    of_blocks, of_tokens = config.replaced_shares
    return (rng.random((*shape[:2], 1)) < of_blocks) & (rng.random(shape) < of_tokens)


_EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_hidden": 64}
_WINDOW = 256
_FULL_THETA, _ROTATED = 1e6, 0.25
_POST_NORMS = {"post_attention_layernorm": 0.5, "post_feedforward_layernorm": 0.2}
"""Initial gains of the norms behind attention and MLP, which set the size of what a layer adds."""
_COPIES = 2
"""How many times as many canvases the second forward has as the first."""


def canvas_config(config: TrainConfig, canvas: int, sizes: dict[str, Any]) -> CanvasConfig:
    """The configuration of the tiny DiffusionGemma. All layers but the last have a window. It is about as large as other tiny models."""
    head_dim, hidden = config.d_model // config.n_heads, config.mlp_hidden_size // 2
    experts = ExpertsConfig(
        **_EXPERTS, num_groups=1, groups_per_token=1, scaling=1.0, shared_hidden=hidden, dense_layers=0
    )
    overrides = {"mask_token_id": NO_MASK, "weight_tying": True, "mlp_hidden_size": hidden}
    return CanvasConfig(
        **sizes | overrides,
        family="diffusion-gemma",
        head_dim=head_dim,
        rotary_dim=head_dim,
        rope=Rope(theta=config.rope_theta),
        block_length=canvas,
        experts=experts,
        window=_WINDOW,
        full_layers=(config.n_layers - 1,),
        full_kv_heads=config.n_heads // 2,
        full_head_dim=2 * head_dim,
        full_theta=_FULL_THETA,
        full_rotary_dim=2 * int(head_dim * _ROTATED),
    )


def canvas_dict(config: CanvasConfig) -> dict[str, Any]:
    """The content of ``config.json``, in the published layout."""
    mixture = config.mixture
    heads = {"head_dim": config.full_head_dim, "num_key_value_heads": config.full_kv_heads}
    share = config.full_rotary_dim / config.full_head_dim
    text = {
        **{published: getattr(config, ours) for ours, published in DECODER_SIZES.items()},
        "model_type": f"{CANVAS_TYPE}_text",
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "sliding_window": config.window,
        "layer_types": [LAYERS[not config.is_full(layer)] for layer in range(config.n_layers)],
        "per_layer_config": {str(layer): heads for layer in config.full_layers},
        "num_experts": mixture.num_experts,
        "top_k_experts": mixture.experts_per_token,
        "moe_intermediate_size": mixture.expert_hidden,
        "rope_parameters": {
            LAYERS[0]: {"rope_type": "proportional", "partial_rotary_factor": share, "rope_theta": config.full_theta},
            LAYERS[1]: {"rope_type": "default", "rope_theta": config.rope.theta},
        },
        "hidden_activation": "gelu_pytorch_tanh",
        "eos_token_id": config.eos_token_id,
        "tie_word_embeddings": True,
    }
    return {
        "architectures": ["DiffusionGemmaForBlockDiffusion"],
        "model_type": CANVAS_TYPE,
        "canvas_length": config.block_length,
        "text_config": text,
    }


@torch.no_grad()
def prepare(model: GemmaModel, generator: torch.Generator) -> None:
    """Initialise what ``loop.initialise`` does not know: experts, and norms that give scores and sums the same size as in other models."""
    for block in model.blocks:
        experts: Any = block.experts
        for matrix, share in ((experts.gate_up_proj, 1.0), (experts.down_proj, 0.1)):
            nn.init.normal_(matrix, std=share * matrix.shape[2] ** -0.5, generator=generator)
        for name, gain in _POST_NORMS.items():
            getattr(block, name).weight.fill_(gain)
        attention: Any = block.self_attn
        for norm in (attention.q_norm, attention.k_norm):
            norm.weight.fill_(attention.head_dim**-0.25)


Masks = Sequence[np.ndarray]
"""bool [B, N, columns]: which columns a row sees in full layers, and in layers with a window."""


@dataclass(frozen=True, kw_only=True)
class Canvases:
    """N canvas positions after each of B sequences, which have T clean columns."""

    ids: np.ndarray
    """[B, N]"""
    positions: np.ndarray
    """[B, N]"""
    masks: Masks
    targets: np.ndarray
    """[B, N]"""
    weights: np.ndarray
    """[B, N] float32"""


@dataclass(frozen=True, kw_only=True)
class CanvasBatch:
    clean: np.ndarray
    """[B, T]"""
    noise: Canvases
    mixed: Canvases
    """Copies of the canvases of ``noise``, one after the other."""


def canvas_batch(config: TrainConfig, batch: objective.Batch, tokenizer: TextTokenizer, step: int) -> CanvasBatch:
    block = config.canvas
    assert block is not None
    rng = np.random.default_rng((config.seed, step, 1))
    opens, ends = batch.prompt_lengths[:, None], (batch.prompt_lengths + batch.answer_lengths)[:, None]
    count = int(batch.answer_lengths.max()) // block + 1
    columns = int(opens.max()) + count * block
    clean = np.pad(batch.ids, ((0, 0), (0, count * block)), constant_values=tokenizer.eos_token_id)[:, :columns]

    def canvases(copies: int, *, has_truth: bool) -> Canvases:
        offsets = np.tile(np.arange(count * block), copies)
        positions = opens + offsets
        truth = np.take_along_axis(clean, positions, axis=1)
        ids = rng.integers(tokenizer.vocab_size, size=truth.shape)
        if has_truth:
            replaced = objective.masked_positions(config, rng, (len(clean), copies * count, block))
            ids = np.where(replaced.reshape(truth.shape), ids, truth)
        masks = _masks(opens + offsets // block * block, columns, block)
        weights = np.where(positions > ends, config.fill_weight, 1.0).astype(np.float32)
        return Canvases(ids=ids, positions=positions, masks=masks, targets=truth, weights=weights)

    return CanvasBatch(clean=clean, noise=canvases(1, has_truth=False), mixed=canvases(_COPIES, has_truth=True))


def _masks(begins: np.ndarray, columns: int, block: int) -> Masks:
    """The masks of canvases. A canvas sees itself and the clean columns before it; with a window, only the last of them."""
    number, starts = np.arange(begins.shape[1]) // block, begins[:, :, None]
    inside = np.broadcast_to(number[:, None] == number, (*begins.shape, begins.shape[1]))
    before = np.arange(columns) < starts
    near = before & (np.arange(columns) > starts - _WINDOW)
    return np.concatenate((before, inside), axis=2), np.concatenate((near, inside), axis=2)


def canvas_loss(
    config: TrainConfig, model: GemmaModel, batch: CanvasBatch, attention: Callable[[Tensor], Attend], step: int
) -> Tensor:
    rng = np.random.default_rng((config.seed, step, 2))
    count, columns = batch.clean.shape
    cache: dict[int, tuple[Tensor, Tensor]] = {}

    def forward(ids: np.ndarray, positions: np.ndarray, masks: Masks, canvas: CanvasRows | None) -> Tensor:
        full, windowed = (attention(torch.from_numpy(mask)) for mask in masks)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if canvas is None:
                cache[layer] = k, v
            else:
                k, v = (_joined(cached, current, count) for cached, current in zip(cache[layer], (k, v), strict=True))
            group = q.shape[1] // k.shape[1]
            k, v = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (k, v))
            return (full if model.config.is_full(layer) else windowed)(layer, q, k, v)

        rotary = model.rotary(torch.from_numpy(positions).reshape(-1))
        return model.hidden(torch.from_numpy(ids).reshape(-1), rotary, attend, canvas)

    def denoise(canvases: Canvases, soft: Tensor) -> tuple[Tensor, Tensor]:
        rows = CanvasRows(torch.arange(canvases.ids.size), soft)
        logits = model.logits(forward(canvases.ids, canvases.positions, canvases.masks, rows))
        targets, weights = (torch.from_numpy(array).reshape(-1) for array in (canvases.targets, canvases.weights))
        return logits, objective.masked_loss(logits, targets, weights)

    index = np.arange(columns)
    before = index <= index[:, None]
    near = before & (index > index[:, None] - _WINDOW)
    forward(batch.clean, np.tile(index, count), tuple(np.tile(mask, (count, 1, 1)) for mask in (before, near)), None)
    first, noise = denoise(batch.noise, torch.zeros(batch.noise.ids.size, model.config.d_model))
    with torch.no_grad():
        p = (first / rng.uniform(0.4, 0.8)).softmax(dim=-1)
        soft = model.soft_embeddings(p).float().view(*batch.noise.ids.shape, -1)
    mixed = denoise(batch.mixed, soft.repeat(1, _COPIES, 1).flatten(0, 1))[1]
    return (noise + _COPIES * mixed) / (1 + _COPIES)


def _joined(kept_rows: Tensor, own_rows: Tensor, count: int) -> Tensor:
    """Join the rows of ``count`` sequences: for each, its kept rows and then its own."""
    parts = (x.reshape(count, -1, *x.shape[1:]) for x in (kept_rows, own_rows))
    return torch.cat(tuple(parts), dim=1).flatten(0, 1)
