"""Write a trained model as a checkpoint folder, measure the very weights written, and describe them.

Accuracy is that of the dense reference sampler: no cache, block-wise, the most confident token first.
"""

import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save
from torch import Tensor

from engines.models.block_config import BLOCK_TYPES, BlockConfig
from engines.models.config import DECODER_SIZES, LLaDAConfig
from engines.models.decoder import BlockModel
from engines.models.llada import LLaDAModelLM
from engines.models.protocol import Attend
from engines.models.tokenizer import TextTokenizer, load_tokenizer
from repro.files import replace_bytes, replace_text
from repro.runs.statistics import wilson_interval
from repro.tasks.mini import GENERATORS
from repro.tasks.problem import Problem, grade
from repro.training.config import TrainConfig


def batched_attention(lengths: Tensor, columns: int) -> Attend:
    """Rows are B sequences of ``columns`` each; columns beyond ``lengths`` [B] are never attended."""
    padded = torch.arange(columns, device=lengths.device) >= lengths[:, None]
    return masked_attention(~padded[:, None])


def masked_attention(allowed: Tensor) -> Attend:
    """Rows are B sequences of R each; ``allowed`` [B, R or 1, R] says which columns a row of its sequence sees.

    With gradients it is written as two batched products: on a CPU their backward pass takes half the
    time of the fused call's in bfloat16. Query and key heads must be equal in number.
    """
    batch, _, columns = allowed.shape
    is_masked = not bool(allowed.all())
    bias = torch.zeros(allowed.shape, device=allowed.device).masked_fill(~allowed, -1e4)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads, width = q.shape[1:]

        def per_head(x: Tensor) -> Tensor:
            return x.view(batch, columns, heads, width).transpose(1, 2).reshape(batch * heads, columns, width)

        if not torch.is_grad_enabled():
            wide_q, wide_k, wide_v = (x.view(batch, columns, heads, width).transpose(1, 2) for x in (q, k, v))
            fused = F.scaled_dot_product_attention(
                wide_q, wide_k, wide_v, attn_mask=allowed[:, None] if is_masked else None
            )
            return fused.transpose(1, 2).reshape(batch * columns, heads, width)
        scores = torch.bmm(per_head(q) * width**-0.5, per_head(k).transpose(1, 2))
        if is_masked:
            scores = (scores.view(batch, heads, columns, columns) + bias[:, None].to(scores.dtype)).view_as(scores)
        mixed = torch.bmm(scores.softmax(-1).to(v.dtype), per_head(v))
        return mixed.view(batch, heads, columns, width).transpose(1, 2).reshape(batch * columns, heads, width)

    return attend


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Shares of n problems; ``low`` and ``high`` bound ``exact`` (Wilson, 95 %)."""

    n: int
    exact: float
    strict: float
    flexible: float
    low: float
    high: float


@torch.inference_mode()
def sample_dense(
    model: LLaDAModelLM | BlockModel, prompts: Sequence[Sequence[int]], *, gen_length: int, block_length: int
) -> list[list[int]]:
    """Temperature 0, one token a step, ``gen_length`` steps; returns the answer regions.

    Blocks of a LLaDA begin behind the prompt, those of a block-diffusion model at multiples of their length.

    Stops early once a sequence's committed text is closed by an end-of-text token with no mask
    before it: later commits cannot change that text, and the rest is returned as end-of-text.
    """
    mask_id, eos_id = model.config.mask_token_id, model.config.eos_token_id
    starts = torch.tensor([len(prompt) for prompt in prompts])
    lead = starts % block_length if isinstance(model, BlockModel) else torch.zeros_like(starts)
    lengths = starts + gen_length
    if isinstance(model, BlockModel):
        lengths = -(-lengths // block_length) * block_length
    count, columns = len(prompts), int(lengths.max())
    ids = torch.full((count, columns), eos_id)
    for row, prompt, length in zip(ids, prompts, lengths.tolist(), strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
        row[len(prompt) : length] = mask_id
    live = torch.arange(count)
    for block in range(0, gen_length + int(lead.max()), block_length):
        where = (starts - lead)[:, None] + torch.arange(block, block + block_length)
        where = torch.minimum(where, lengths[:, None] - 1)
        for _ in range(where.shape[1]):
            live = live[~_is_closed(ids, starts, live, gen_length, mask_id, eos_id)]
            if not len(live):
                break
            _commit_best(model, ids, lengths, live, where[live], block_length)
    answers = [row[start : start + gen_length].tolist() for row, start in zip(ids, starts.tolist(), strict=True)]
    return [[eos_id if token == mask_id else token for token in answer] for answer in answers]


def _is_closed(ids: Tensor, starts: Tensor, live: Tensor, gen_length: int, mask_id: int, eos_id: int) -> Tensor:
    answers = ids[live[:, None], starts[live][:, None] + torch.arange(gen_length)]
    first_mask = torch.where(answers == mask_id, torch.arange(gen_length), gen_length).amin(1)
    first_eos = torch.where(answers == eos_id, torch.arange(gen_length), gen_length).amin(1)
    return first_eos < first_mask


def _commit_best(
    model: LLaDAModelLM | BlockModel, ids: Tensor, lengths: Tensor, live: Tensor, where: Tensor, block_length: int
) -> None:
    columns = int(lengths[live].max())
    inputs = ids[live, :columns]
    if isinstance(model, BlockModel):
        # A row sees its own block and those before.
        block = torch.arange(columns) // block_length
        attend = masked_attention((block[None, :] <= block[:, None]).expand(len(live), -1, -1))
    else:
        attend = batched_attention(lengths[live], columns)
    hidden = model(inputs.reshape(-1), torch.arange(columns).repeat(len(live)), attend)
    rows = torch.arange(len(live))[:, None] * columns + where
    logits = model.logits(hidden[rows.reshape(-1)]).float().view(*where.shape, -1)
    logits[..., model.config.mask_token_id] = -torch.inf
    confidence, token = logits.softmax(-1).max(-1)
    masked = ids[live[:, None], where] == model.config.mask_token_id
    best = torch.where(masked, confidence, -torch.inf).argmax(1, keepdim=True)
    place = where.gather(1, best)
    before = ids[live[:, None], place]
    ids[live[:, None], place] = torch.where(masked.gather(1, best), token.gather(1, best), before)


def measure_accuracy(
    model: LLaDAModelLM | BlockModel,
    tokenizer: TextTokenizer,
    problems: Sequence[Problem],
    *,
    gen_length: int,
    block_length: int,
    batch_size: int = 32,
) -> Accuracy:
    order = np.argsort([len(problem.prompt) for problem in problems], kind="stable")
    grades = []
    for first in range(0, len(order), batch_size):
        chunk = [problems[int(i)] for i in order[first : first + batch_size]]
        prompts = tokenizer.encode_batch([problem.prompt for problem in chunk])
        answers = sample_dense(model, prompts, gen_length=gen_length, block_length=block_length)
        grades += [grade(problem, tokenizer.decode(answer)) for problem, answer in zip(chunk, answers, strict=True)]
    n = len(grades)
    exact = sum(g.exact for g in grades)
    low, high = wilson_interval(exact, n)
    return Accuracy(
        n=n,
        exact=exact / n,
        strict=sum(g.strict for g in grades) / n,
        flexible=sum(g.flexible for g in grades) / n,
        low=low,
        high=high,
    )


FINAL_SEED = 7_002
WEIGHTS_FILE = "model.safetensors"
REPORT_FILE = "training_report.json"
MADE = (WEIGHTS_FILE, "config.json", "generation_config.json", REPORT_FILE)
"""Files of a checkpoint that is exported, besides its tokenizer's."""


def _write_json(path: Path, content: Any) -> None:
    replace_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def save_model(model: LLaDAModelLM | BlockModel, config: TrainConfig, directory: Path) -> None:
    """``config.json``, ``generation_config.json`` and float16 weights."""
    halved = {name: tensor.detach().to(torch.float16).contiguous() for name, tensor in model.state_dict().items()}
    replace_bytes(directory / WEIGHTS_FILE, save(halved, metadata={"format": "pt"}))
    own = model.config
    described = own.to_dict() if isinstance(own, LLaDAConfig) else sdar_dict(own)
    _write_json(directory / "config.json", described | {"torch_dtype": "float16"})
    generation = {
        "gen_length": config.gen_length,
        "block_length": max(config.own_block_lengths),
        "steps": config.gen_length,
        "temperature": 0.0,
        "mask_token_id": model.config.mask_token_id,
        "eos_token_id": model.config.eos_token_id,
        "pad_token_id": model.config.eos_token_id,
    }
    _write_json(directory / "generation_config.json", generation)


def sdar_dict(config: BlockConfig) -> dict[str, Any]:
    """The published layout of a SDAR's ``config.json``."""
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


def load_model(directory: Path) -> LLaDAModelLM | BlockModel:
    """The stored weights in float32; every name and shape must match."""
    raw = json.loads((directory / "config.json").read_text())
    is_block = raw["model_type"] in BLOCK_TYPES
    model = BlockModel(BlockConfig.from_dict(raw)) if is_block else LLaDAModelLM(LLaDAConfig.from_dict(raw))
    weights = load_file(directory / WEIGHTS_FILE)
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, strict=True)
    return model.eval()


def evaluate_task(directory: Path, config: TrainConfig, task: str) -> list[dict[str, Any]]:
    """Accuracy of the stored weights on held-out problems of one task, one entry per block length."""
    torch.set_num_threads(1)
    model, tokenizer = load_model(directory), load_tokenizer(directory)
    problems = GENERATORS[task](FINAL_SEED, config.final_problems, "heldout")
    return [
        {"task": task, "block_length": block_length, "obtained": "measured"}
        | asdict(measure_accuracy(model, tokenizer, problems, gen_length=config.gen_length, block_length=block_length))
        for block_length in config.own_block_lengths
    ]


def export_checkpoint(
    model: LLaDAModelLM | BlockModel,
    config: TrainConfig,
    directory: Path,
    *,
    step: int,
    wall_s: float,
    history: list[dict[str, Any]],
) -> dict[str, Any]:
    """Save, reload, evaluate on held-out problems, write the report and return it."""
    save_model(model, config, directory)
    began = time.perf_counter()
    accuracy = [entry for task in config.tasks for entry in evaluate_task(directory, config, task)]
    tokenizer = load_tokenizer(directory)
    report = {
        "schema_version": 1,
        "obtained": "measured",
        "config": asdict(config),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "vocab_size": tokenizer.vocab_size,
        "steps_done": step,
        "training_wall_s": round(wall_s, 1),
        "evaluation_wall_s": round(time.perf_counter() - began, 1),
        "hardware": f"{platform.machine()} CPU, {config.threads} threads, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "accuracy": accuracy,
        "history": history,
    }
    _write_json(directory / REPORT_FILE, report)
    return report
