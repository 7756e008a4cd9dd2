"""The seeded and logged training loop, and initial weights that already lean towards recall from context.

Recall ("Mia has 4 ... Mia has _") needs two things at once: positions that know their neighbours, and
a match of that knowledge across the text. Neither helps without the other, so training from plain
random weights stays on a plateau for thousands of steps. If we start near both (in the spirit of
mimetic initialisation, Trockman and Kolter 2023), the model recalls within a few hundred steps.
Nothing is frozen: training changes every weight.
"""

import json
import logging
import math
import os
import platform
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from rich.console import Console
from rich.progress import Progress
from safetensors.torch import load_file, save
from torch import Tensor, nn

from engines.errors import require
from engines.models.block_config import BLOCK_TYPES, BlockConfig, CanvasConfig
from engines.models.checkpoint import checkpoint_dir, config_of
from engines.models.config import DECODER_SIZES, LLaDAConfig, Rope
from engines.models.decoder import BlockModel, DecoderLayer
from engines.models.gemma import GemmaLayer, GemmaModel
from engines.models.layers import RotaryAttention
from engines.models.llada import LLaDABlock, LLaDAModelLM
from engines.models.protocol import Attend
from engines.models.tokenizer import TextTokenizer, load_tokenizer
from repro.files import replace_bytes, replace_text, writable_file, writable_folder
from repro.training import objective
from repro.training.config import TrainConfig
from repro.training.objective import canvas_batch, canvas_config, canvas_dict, canvas_loss, prepare

# -- the loop ---------------------------------------------------------------------------------------------

Trained = LLaDAModelLM | BlockModel | GemmaModel

_SHARED = 0.5
"""The value of coordinate 0 in every embedding. Scores that are "always on" come from this shared coordinate."""
_SHARPNESS = 10.0
_OFFSETS = (-1, 1, -2, 2, -3, 3, -4, 4)
"""The offsets at which the first layer's heads look. The operands of a sum are two and four to its left."""
_FAST_PAIRS = 3
_SLOW_RADIANS = 0.02
"""Rotary pairs that rotate less than this per position hardly depend on distance."""
_MATCH_GAIN = 2.4
_MASK_PENALTY = 4.6
_NORM_GAINS = (2.6, 1.9)
"""The root mean squares of queries and keys from the initial weights of the first two layers. If norms follow, these are their gains."""


class _Layer(NamedTuple):
    attention: RotaryAttention
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear | None
    out: nn.Linear
    mlp_out: nn.Linear


@torch.no_grad()
def initialise(model: Trained, seed: int) -> None:
    """Set the initial weights from a seed. They are normal with deviation 1/sqrt(fan-in), and then:

    - each head of the first layer looks at one relative offset, from four to the left to four to the right;
    - heads of the second layer look for positions with the same token at that offset;
    - keys of later layers equal their queries, so that similar positions attend to each other;
    - value projections are orthogonal and output projections half their transpose, so that heads copy;
    - the output head starts as the embedding, so that the model predicts what it copies.
    """
    generator = torch.Generator().manual_seed(seed)
    embedding = cast(nn.Embedding, model.embedding).weight
    for parameter in model.parameters():
        if parameter.ndim == 2:
            std = 0.1 if parameter is embedding else parameter.shape[1] ** -0.5
            nn.init.normal_(parameter, std=std, generator=generator)
    layers = [_layer(block) for block in model.blocks]
    has_mask = not isinstance(model, GemmaModel)
    if isinstance(model, GemmaModel):
        prepare(model, generator)
    embedding[:, 0] = 0
    mask = embedding[model.config.mask_token_id].clone() * has_mask
    direction = mask / mask.norm().clamp(min=1e-9)
    embedding[:, 0] = _SHARED
    for index, layer in enumerate(layers):
        layer.mlp_out.weight.mul_(0.1)
        if layer.v_proj is None:
            continue
        nn.init.orthogonal_(layer.v_proj.weight, generator=generator)
        if index == 0:  # Values ignore the shared coordinate and masked neighbours.
            layer.v_proj.weight[:, 0] = 0
            layer.v_proj.weight -= torch.outer(layer.v_proj.weight @ direction, direction)
        else:
            layer.k_proj.weight.copy_(layer.q_proj.weight)
        layer.out.weight.copy_(0.5 * layer.v_proj.weight.T)
    theta = model.config.rope_theta if isinstance(model, LLaDAModelLM) else model.config.rope.theta
    _look_at_neighbours(layers[0], embedding, theta)
    if len(layers) > 1 and layers[1].v_proj is not None:
        _find_same_neighbour(layers[0], layers[1], mask, theta)
    for layer, gain in zip(layers, _NORM_GAINS, strict=False):
        for norm in (layer.attention.q_norm, layer.attention.k_norm):
            if norm is not None:  # Gemma's scores are not divided by the square root of a head's width
                norm.weight.fill_(gain if has_mask else gain * layer.attention.head_dim**-0.25)
    if not model.config.weight_tying:
        cast(nn.Linear, model.head).weight.copy_(embedding)


def _layer(block: nn.Module) -> _Layer:
    if isinstance(block, LLaDABlock):
        return _Layer(block, block.q_proj, block.k_proj, block.v_proj, block.attn_out, block.ff_out)
    layer = cast(DecoderLayer | GemmaLayer, block)
    attention = layer.self_attn
    values = attention.v_proj if getattr(attention, "has_values", True) else None
    return _Layer(attention, attention.q_proj, attention.k_proj, values, attention.o_proj, layer.mlp.down_proj)


def _look_at_neighbours(layer: _Layer, embedding: Tensor, theta: float) -> None:
    """Let each head of a layer look at one offset. Queries and keys read the shared coordinate into the fastest rotary pairs, rotated
    by the offset's angle. So a head scores sharpness * sum of cos(theta_f * (distance - offset))."""
    width, half = layer.attention.head_dim, layer.attention.head_dim // 2
    normed = _SHARED / embedding.pow(2).mean(1).sqrt().mean()
    radius = math.sqrt(_SHARPNESS * math.sqrt(width)) / normed
    for weight in (layer.q_proj.weight, layer.k_proj.weight):
        weight.mul_(0.3)
        weight[:, 0] = 0
    for head in range(layer.attention.heads):
        offset = _OFFSETS[head % len(_OFFSETS)]
        first = head * width
        for pair in range(min(_FAST_PAIRS, half)):
            angle = offset * theta ** (-2 * pair / width)
            layer.q_proj.weight[first + pair, 0] = radius * math.cos(angle)
            layer.q_proj.weight[first + half + pair, 0] = radius * math.sin(angle)
            layer.k_proj.weight[first + pair, 0] = radius


def _find_same_neighbour(first: _Layer, second: _Layer, mask: Tensor, theta: float) -> None:
    """Let a head find positions with the same neighbour. Its queries and keys both read the output of the first layer's head of the
    same index, in the slow rotary pairs. We lower keys of masked positions, because each would find itself first."""
    heads, width, half = second.attention.heads, second.attention.head_dim, second.attention.head_dim // 2
    slow = torch.tensor([theta ** (-2 * pair / width) < _SLOW_RADIANS for pair in range(half)]).repeat(2)
    outputs = first.out.weight / first.out.weight.norm(dim=0)
    rows = _MATCH_GAIN * outputs.T * slow.repeat(heads)[:, None]
    second.q_proj.weight.copy_(rows)
    second.k_proj.weight.copy_(rows)
    for slowest in range(half - 1, heads * width, width):
        second.q_proj.weight[slowest, 0] += _MASK_PENALTY
        second.k_proj.weight[slowest] -= _MASK_PENALTY * mask / mask.norm().clamp(min=1e-9)


log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Trainer:
    """A model in training. Its batches and masks depend only on the config and the step."""

    config: TrainConfig
    tokenizer: TextTokenizer
    model: Trained
    optimizers: tuple[torch.optim.Optimizer, ...]
    """Muon for the matrices of the blocks, AdamW for the rest."""
    step: int = 0
    wall_s: float = 0.0
    """Seconds spent so far."""
    history: list[dict[str, Any]] = field(default_factory=list)

    def loss(self) -> Tensor:
        batch = objective.make_batch(self.config, self.tokenizer, self.step)
        if isinstance(self.model, GemmaModel):
            canvases = canvas_batch(self.config, batch, self.tokenizer, self.step)
            with self.autocast():
                return canvas_loss(self.config, self.model, canvases, masked_attention, self.step)
        masked: objective.MaskedBatch
        if self.config.block_diffusion is None:
            masked = objective.mask_batch(self.config, batch, self.tokenizer.mask_token_id, self.step)
            count, columns = batch.ids.shape
            attend = batched_attention(torch.from_numpy(batch.lengths), columns)
            positions = torch.arange(columns).repeat(count)
        else:
            masked = objective.double_batch(self.config, batch, self.tokenizer, self.step)
            attend = masked_attention(torch.from_numpy(masked.allowed))
            positions = torch.from_numpy(masked.positions).reshape(-1)
        with self.autocast():
            ids = torch.from_numpy(masked.inputs).reshape(-1)
            hidden = self.model(ids, positions, attend)
            logits = self.model.logits(hidden[torch.from_numpy(masked.rows)])
        return objective.masked_loss(logits, torch.from_numpy(masked.targets), torch.from_numpy(masked.weights))

    def advance(self) -> float:
        """Make one optimiser step, and return its loss."""
        share = rate_share(self.config, self.step)
        peaks = (self.config.matrix_learning_rate, self.config.learning_rate)
        for optimizer, peak in zip(self.optimizers, peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * share
        loss = self.loss()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss.item()

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", dtype=torch.bfloat16) if self.config.bfloat16 else nullcontext()


def new_model(config: TrainConfig, tokenizer: TextTokenizer) -> Trained:
    """Return a model on the CPU, with torch's own initial weights."""
    if config.canvas is not None:
        return GemmaModel(canvas_config(config, config.canvas, _sizes(config, tokenizer)))
    if config.block_diffusion is None:
        return LLaDAModelLM(model_config(config, tokenizer))
    return BlockModel(block_model_config(config, config.block_diffusion, tokenizer))


def block_model_config(config: TrainConfig, block: int, tokenizer: TextTokenizer) -> BlockConfig:
    """The configuration of SDAR's architecture, in the size of ``model_config``."""
    head_dim = config.d_model // config.n_heads
    rope = Rope(theta=config.rope_theta)
    options: dict[str, Any] = {"head_dim": head_dim, "rotary_dim": head_dim, "rope": rope, "block_length": block}
    return BlockConfig(family="sdar", **options, **_sizes(config, tokenizer))


def model_config(config: TrainConfig, tokenizer: TextTokenizer) -> LLaDAConfig:
    sizes = _sizes(config, tokenizer)
    return LLaDAConfig(rope_theta=config.rope_theta, pad_token_id=tokenizer.eos_token_id, **sizes)


def _sizes(config: TrainConfig, tokenizer: TextTokenizer) -> dict[str, Any]:
    names = ("d_model", "n_layers", "n_heads", "mlp_hidden_size", "max_sequence_length", "rms_norm_eps", "weight_tying")
    token_names = ("vocab_size", "mask_token_id", "eos_token_id")
    return {
        **{name: getattr(config, name) for name in names},
        **{name: getattr(tokenizer, name) for name in token_names},
        "n_kv_heads": config.n_heads,
    }


def rate_share(config: TrainConfig, step: int) -> float:
    """The learning rate as a share of its peak: a linear warm-up, then a cosine down to ``final_rate_share``."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    low = config.final_rate_share
    return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def build_trainer(config: TrainConfig, out_dir: Path) -> Trainer:
    """Save the tokenizer, and make the model and its optimisers. Tokenizer and weights come from the seed or from ``start``."""
    if config.start is None:
        vocabulary = {"problems_per_task": config.tokenizer_problems, "vocab_size": config.vocab_size}
        raw = objective.train_tokenizer(config.tasks, seed=config.seed, **vocabulary)
        objective.save_tokenizer(raw, out_dir, max_length=config.max_sequence_length)
        tokenizer = load_tokenizer(out_dir)
        model = new_model(config, tokenizer)
        initialise(model, config.seed)
    else:
        folder = checkpoint_dir(config.start)
        tokenizer, stored = load_tokenizer(folder), config_of(config.start)
        require(
            replace(stored, max_sequence_length=config.max_sequence_length) == model_config(config, tokenizer),
            f"start={config.start!r} is a model of another shape: give one that 'repro train-tiny' made",
        )
        for name in objective.TOKENIZER_FILES:
            replace_bytes(out_dir / name, (folder / name).read_bytes())
        model = new_model(config, tokenizer)
        model.load_state_dict(load_model(folder).state_dict())
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    matrix_ids = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in matrix_ids]
    muon = torch.optim.Muon(matrices, lr=config.matrix_learning_rate, weight_decay=config.weight_decay)
    adamw = torch.optim.AdamW(rest, lr=config.learning_rate, betas=config.betas, weight_decay=0.0, fused=True)
    return Trainer(config=config, tokenizer=tokenizer, model=model, optimizers=(muon, adamw))


def train_tiny(config: TrainConfig, out_dir: Path, *, stop_after: int | None = None) -> dict[str, Any]:
    """Train into ``out_dir``, and return the report written there as ``training_report.json``. ``stop_after`` exports the model
    after that many steps."""
    torch.set_num_threads(config.threads)
    writable_folder("out", out_dir)
    for name in (*objective.TOKENIZER_FILES, *MADE):
        writable_file("out", out_dir / name)
    trainer = build_trainer(config, out_dir)
    _train(trainer, config.steps if stop_after is None else min(stop_after, config.steps))
    return export_checkpoint(
        trainer.model, config, out_dir, step=trainer.step, wall_s=trainer.wall_s, history=trainer.history
    )


def _train(trainer: Trainer, last: int) -> None:
    config = trainer.config
    began = time.perf_counter()
    losses: list[float] = []
    with _progress() as bar:
        task = bar.add_task("training", total=last)
        while trainer.step < last:
            losses.append(trainer.advance())
            trainer.wall_s = time.perf_counter() - began
            step = trainer.step
            bar.update(task, completed=step)
            if step % config.log_every == 0 or step == last:
                entry = {"step": step, "loss": sum(losses) / len(losses), "wall_s": trainer.wall_s}
                losses.clear()
                trainer.history.append(entry)
                log.info("step %d  loss %.4g  wall_s %.4g", *entry.values())


def _progress() -> Progress:
    """A progress bar on a terminal, which disappears at the end. Elsewhere there is none, because the log has the same facts."""
    return Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())


# -- checkpoints ------------------------------------------------------------------------------------------


def batched_attention(lengths: Tensor, columns: int) -> Attend:
    """Attention for rows of B sequences with ``columns`` each. Columns beyond ``lengths`` [B] are never attended."""
    padded = torch.arange(columns, device=lengths.device) >= lengths[:, None]
    return masked_attention(~padded[:, None])


def masked_attention(allowed: Tensor) -> Attend:
    """Attention for B sequences of R rows each. ``allowed`` [B, R or 1, C] says which columns of its sequence a row sees.

    We use two batched products, because their backward pass takes half the time of the fused call
    on a CPU in bfloat16. Query and key heads must be equal in number.
    """
    batch, _, columns = allowed.shape
    is_masked = not bool(allowed.all())
    bias = torch.zeros(allowed.shape, device=allowed.device).masked_fill(~allowed, -1e4)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads, width = q.shape[1:]

        def per_head(x: Tensor) -> Tensor:
            return x.view(batch, -1, heads, width).transpose(1, 2).reshape(batch * heads, -1, width)

        scores = torch.bmm(per_head(q) * width**-0.5, per_head(k).transpose(1, 2))
        if is_masked:
            scores = (scores.view(batch, heads, -1, columns) + bias[:, None].to(scores.dtype)).view_as(scores)
        mixed = torch.bmm(scores.softmax(-1).to(v.dtype), per_head(v))
        return mixed.view(batch, heads, -1, width).transpose(1, 2).reshape(-1, heads, width)

    return attend


WEIGHTS_FILE = "model.safetensors"
REPORT_FILE = "training_report.json"
MADE = (WEIGHTS_FILE, "config.json", "generation_config.json", REPORT_FILE)
"""The files of an exported checkpoint, besides those of its tokenizer."""


def _write_json(path: Path, content: Any) -> None:
    replace_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def save_model(model: Trained, config: TrainConfig, directory: Path) -> None:
    """Write ``config.json``, ``generation_config.json`` and float16 weights."""
    halved = {name: tensor.detach().to(torch.float16).contiguous() for name, tensor in model.state_dict().items()}
    replace_bytes(directory / WEIGHTS_FILE, save(halved, metadata={"format": "pt"}))
    settings = model.config
    if isinstance(settings, CanvasConfig):
        content = canvas_dict(settings)
    else:
        content = settings.to_dict() if isinstance(settings, LLaDAConfig) else sdar_dict(settings)
    _write_json(directory / "config.json", content | {"torch_dtype": "float16"})
    generation = {
        "gen_length": config.gen_length,
        "block_length": config.canvas or config.block_diffusion or max(config.block_lengths),
        "steps": config.gen_length,
        "temperature": 0.0,
        "mask_token_id": model.config.mask_token_id,
        "eos_token_id": model.config.eos_token_id,
        "pad_token_id": model.config.eos_token_id,
    }
    _write_json(directory / "generation_config.json", generation)


def sdar_dict(config: BlockConfig) -> dict[str, Any]:
    """The content of a SDAR's ``config.json``, in the published layout."""
    return {
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        **{published: getattr(config, ours) for ours, published in DECODER_SIZES.items()},
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": None,
        "tie_word_embeddings": config.weight_tying,
        "block_size": config.block_length,
        "mask_token_id": config.mask_token_id,
        "eos_token_id": config.eos_token_id,
    }


def load_model(directory: Path) -> Trained:
    """Load the model with its stored weights in float32. Every name and shape must match."""
    raw = json.loads((directory / "config.json").read_text())
    model: Trained
    if raw["model_type"] in BLOCK_TYPES:
        settings = BlockConfig.from_dict(raw)
        model = GemmaModel(settings) if isinstance(settings, CanvasConfig) else BlockModel(settings)
    else:
        model = LLaDAModelLM(LLaDAConfig.from_dict(raw))
    weights = load_file(directory / WEIGHTS_FILE)
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, strict=True)
    return model.eval()


def export_checkpoint(
    model: Trained, config: TrainConfig, directory: Path, *, step: int, wall_s: float, history: list[dict[str, Any]]
) -> dict[str, Any]:
    """Save the weights, write the report and return it."""
    save_model(model, config, directory)
    tokenizer = load_tokenizer(directory)
    report = {
        "schema_version": 2,
        "obtained": "measured",
        "config": asdict(config),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "vocab_size": tokenizer.vocab_size,
        "steps_done": step,
        "training_wall_s": round(wall_s, 1),
        "hardware": f"{platform.machine()} CPU, {config.threads} threads, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "history": history,
    }
    _write_json(directory / REPORT_FILE, report)
    return report
