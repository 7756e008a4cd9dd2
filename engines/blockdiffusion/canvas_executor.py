"""Runs steps of DiffusionGemma, as ``TorchBlockExecutor`` runs those of block models. Final tokens are causal. A canvas' rows see the whole
canvas and all final tokens before it; layers with a window see only the last of these.

Attention is one call per layer: each final token is a segment of its own. A canvas' rows write their K/V where its final tokens' K/V will
lie, which nothing else reads. Logits of all its rows are made in chunks. Each chunk gives at once the rule's input and the expected
embedding for the next step. We keep [block, d] of a canvas, in the dtype of the weights, and no logits.
"""

from time import perf_counter
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from engines.attention.registry import attention_backend
from engines.blockdiffusion.executor import BlockStepRows, GatheredAttention, TorchBlockExecutor, equal_parts, step_rows
from engines.blockdiffusion.rules import EntropyBudget
from engines.blockdiffusion.sequence import BlockStepPlan, Denoised, Outcome
from engines.errors import require
from engines.models.block_config import BlockConfig, CanvasConfig
from engines.models.gemma import CanvasRows, GemmaModel
from engines.models.packed import PackedModel
from engines.models.protocol import Attend
from engines.runtime.device import PoolTensors, on
from engines.runtime.noise import gumbel_argmax, row_keys, uniform
from engines.runtime.rows import Ints, ranks

_START, _NOISE = 0, 1
_DRAWN_ROWS = 32
"""Rows whose tokens are drawn at a time: noise takes several float64 per logit."""


class CanvasDraws:
    """Random ids. Each is a function of a request's seed, its canvas and step (``CanvasSequence.draw``), and the position."""

    def start(self, seed: Ints, draw: Ints, position: Ints, vocabulary: int) -> Ints:
        """Ids that canvases begin with; the arguments are all [n, B], or one number."""
        return self._ids(_START, seed, draw, position, vocabulary)

    def noise(self, seed: Ints, draw: Ints, position: Ints, vocabulary: int) -> Ints:
        """Ids for places where no token is accepted."""
        return self._ids(_NOISE, seed, draw, position, vocabulary)

    def tokens(self, logits: Tensor, seed: Tensor, draw: Tensor, position: Tensor) -> Tensor:
        """Draw [m] tokens from softmax(logits [m, V]); may overwrite the logits."""
        ones = torch.ones((), dtype=torch.float64, device=logits.device).expand(len(logits))
        return gumbel_argmax(logits, ones, row_keys(seed, draw, position))

    @staticmethod
    def _ids(stream: int, seed: Ints, draw: Ints, position: Ints, vocabulary: int) -> Ints:
        flat = (torch.from_numpy(np.ascontiguousarray(array).ravel()) for array in (seed, draw, position))
        drawn = uniform(~row_keys(*flat), 2)[:, stream].numpy().reshape(position.shape)
        return (drawn * vocabulary).astype(np.int64)


class _TwoPools:
    def __init__(self, windowed: PoolTensors, full: PoolTensors) -> None:
        self.windowed, self.full = windowed, full

    def close(self) -> None:
        self.windowed.close()
        self.full.close()


class _TwoAttentions:
    """Two attentions, because layers with a window and full layers have different keys, of different shapes."""

    def __init__(self, windowed: GatheredAttention, full: GatheredAttention, config: CanvasConfig, block: int) -> None:
        self._windowed, self._full, self._config, self._block = windowed, full, config, block
        self._place = [0, 0]
        self._index = []
        for layer in range(config.n_layers):
            self._index.append(self._place[config.is_full(layer)])
            self._place[config.is_full(layer)] += 1

    @property
    def name(self) -> str:
        return " and ".join(dict.fromkeys((self._windowed.name, self._full.name)))

    def attend(self, rows: BlockStepRows, pool: PoolTensors) -> Attend:
        config, pools = self._config, cast(_TwoPools, pool)
        window_rows = within_window(rows, self._block, config.window)
        windowed, full = self._windowed.attend(window_rows, pools.windowed), self._full.attend(rows, pools.full)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return (full if config.is_full(layer) else windowed)(self._index[layer], q, k, v)

        return attend


def within_window(rows: BlockStepRows, block: int, window: int) -> BlockStepRows:
    """Return the rows with the keys that layers with a window see. A final token sees its last ``window`` tokens, itself included. A canvas
    sees all of itself and ``window`` - 1 tokens before it."""
    reach = np.where(rows.q_len == block, block + window - 1, window)
    window_start = np.maximum(rows.k_len - reach, 0)
    # A request's segments follow each other, and so do the ends of the keys they see.
    first = np.flatnonzero(np.diff(rows.k_start, prepend=-1))
    last = np.append(first[1:], len(window_start)) - 1
    count = rows.k_len[last] - window_start[first]
    begin = count.cumsum() - count
    index = (rows.k_start[first] + window_start[first]).repeat(count) + ranks(count)
    segments = last - first + 1
    start = begin.repeat(segments) + window_start - window_start[first].repeat(segments)
    return rows._replace(keys=rows.keys[index], k_start=start, k_len=rows.k_len - window_start)


class CanvasExecutor(TorchBlockExecutor):
    model: GemmaModel
    makes_canvases = True

    def __init__(self, model: GemmaModel, *, draws: CanvasDraws | None = None, **options: Any) -> None:
        """``options`` are ``TorchBlockExecutor``'s; ``block_size`` does not depend on the canvas."""
        super().__init__(model, **options)
        self._draws = draws or CanvasDraws()
        slots = self.tables.num_slots
        self._soft = torch.zeros((slots, self.block, model.config.d_model), dtype=model.dtype, device=self.device)
        """For each slot, the embedding that the last forward expects in each place of its canvas."""

    def _place(self, attention: str) -> None:
        config, model = self.model.config, self.model
        attentions, pools = [], []
        for kv_heads, head_dim, count in (
            (config.n_kv_heads, config.head_dim, config.n_layers - len(config.full_layers)),
            (config.full_kv_heads, config.full_head_dim, len(config.full_layers)),
        ):
            backend = attention_backend(attention, self.device, model.dtype, head_dim, config.n_heads, kv_heads)
            attentions.append(self._gathering(backend))
            shape = SimpleNamespace(n_layers=count, head_dim=head_dim)
            layers: Any = SimpleNamespace(config=shape, kv_heads_here=kv_heads, parameters=model.parameters)
            pools.append(PoolTensors.of_blocks(layers, self.tables))
        windowed, full = attentions
        self.attention = cast(GatheredAttention, _TwoAttentions(windowed, full, config, self.block))
        self.pool = cast(PoolTensors, _TwoPools(*pools))

    @torch.inference_mode()
    def run(self, plan: BlockStepPlan, denoised: Denoised) -> Outcome:
        start_s = perf_counter()
        min_rows = self.model.min_rows
        shape, vocabulary = denoised.holes.shape, self.model.config.vocab_size
        with on(self.device):
            rows = step_rows(plan.works, self.tables, self.block, least=min_rows, grain=1)
            if not shape[0]:
                self._hidden(rows, self._tokens_of(rows), None)
                empty = np.zeros(shape, dtype=np.int64)
                return Outcome(empty, np.zeros(shape), empty.ravel(), perf_counter() - start_s, empty, empty)
            position = rows.block_start[:, None] + np.arange(self.block)
            seed = np.array([each.seed for each in denoised.sampling], dtype=np.int64)[:, None].repeat(self.block, 1)
            draw = denoised.draw[:, None].repeat(self.block, 1)
            drawn = seed, draw, position
            is_first = denoised.step == 0
            ids = self._tokens_of(rows)
            index = rows.first_denoised[:, None] + np.arange(self.block)
            starts = self._draws.start(*drawn, vocabulary)
            ids[index] = np.where(is_first[:, None], starts, denoised.ids)
            slots = np.array([work.slot for work in plan.works if work.rows is not None], dtype=np.int64)
            slot, row, has_soft = self._staging.send(slots, index.ravel(), (~is_first).astype(np.int64))
            soft = self._soft.index_select(0, slot) * has_soft.view(-1, 1, 1).to(self.model.dtype)
            hidden = self._hidden(rows, ids, CanvasRows(row, soft.flatten(0, 1)), min_rows)
            temperature = [
                cast(EntropyBudget, rule).temperature(step)
                for rule, step in zip(denoised.rules, denoised.step, strict=True)
            ]
            temperatures = self._staging.floats(np.repeat(temperature, self.block)).float()
            values, soft = self._reduce(hidden.index_select(0, row), temperatures, self._staging.send(*drawn))
            self._soft.index_copy_(0, slot, soft.view(len(slots), self.block, -1))
            # One transfer, the only one that waits for the device.
            sampled, likeliest, entropy = values.cpu().numpy().reshape(3, *shape)
        require(
            bool(np.isfinite(entropy).all()),
            "the model's logits are not finite: check its weights, or give a wider dtype",
        )
        return Outcome(
            sampled.astype(np.int64),
            -entropy,
            np.zeros(0, dtype=np.int64),
            perf_counter() - start_s,
            likeliest.astype(np.int64),
            self._draws.noise(*drawn, vocabulary),
        )

    # ---- in between ------------------------------------------------------------------------------------------------------

    def _tokens_of(self, rows: BlockStepRows) -> Ints:
        """[N] ids of final tokens; those of a canvas are arbitrary."""
        return self._tokens[rows.slot, np.minimum(rows.position, self._tokens.shape[1] - 1)]

    def _hidden(self, rows: BlockStepRows, ids: Ints, canvas: CanvasRows | None, least: int = 0) -> Tensor:
        if canvas is not None and len(canvas.row) < least:
            # Repeat rows: their numbers then are those they have among others.
            index = torch.arange(least, device=self.device) % len(canvas.row)
            canvas = CanvasRows(canvas.row[index], canvas.soft[index])
        sent, position = self._staging.send(ids, rows.position)
        attend = self.attention.attend(rows, self.pool)
        return self.model.hidden(sent, self.model.rotary(position), attend, canvas)

    def _reduce(self, hidden: Tensor, temperature: Tensor, draws: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return float64 [3, m]: drawn tokens, likeliest tokens and entropies of hidden states [m, d]; and their soft embeddings [m, d]."""
        values, soft = [], []
        m, flat = len(hidden), [tensor.flatten() for tensor in draws]
        min_rows = self.model.min_rows
        if m < min_rows:
            index = torch.arange(min_rows, device=self.device) % m
            hidden, temperature, flat = hidden[index], temperature[index], [tensor[index] for tensor in flat]
        for part in equal_parts(len(hidden), self._max_num_logits):
            result = self._reduce_part(hidden[part], temperature[part], [tensor[part] for tensor in flat])
            values.append(result[0])
            soft.append(result[1])
        return torch.cat(values, dim=1)[:, :m], torch.cat(soft)[:m]

    def _reduce_part(self, hidden: Tensor, temperature: Tensor, draws: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Like ``_reduce``, for so few rows that their logits fit."""
        scaled = self.model.logits(hidden).div_(temperature.unsqueeze(1))
        likeliest = scaled.argmax(dim=-1)
        sampled = [
            self._draws.tokens(scaled[part], *(tensor[part] for tensor in draws))
            for part in equal_parts(len(scaled), _DRAWN_ROWS)
        ]
        soft = None
        if self.model.dtype != torch.float32:  # self-conditioning sees rounded logits
            p = scaled.to(self.model.dtype).float()
            p -= p.amax(dim=-1, keepdim=True)
            soft = self.model.soft_embeddings(p.exp_().div_(p.sum(dim=-1, keepdim=True)))
            del p
        scaled -= scaled.logsumexp(dim=-1, keepdim=True)
        p = scaled.exp()
        soft = self.model.soft_embeddings(p) if soft is None else soft
        entropy = -p.mul_(scaled).sum(dim=-1)
        return torch.stack((torch.cat(sampled).double(), likeliest.double(), entropy.double())), soft


def executor_for(model: PackedModel[BlockConfig], **options: Any) -> TorchBlockExecutor:
    """Make the executor that runs the model's steps."""
    return CanvasExecutor(model, **options) if isinstance(model, GemmaModel) else TorchBlockExecutor(model, **options)
