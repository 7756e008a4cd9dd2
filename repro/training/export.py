"""Write a trained model as a checkpoint folder, measure the very weights written, and describe them."""

import json
import os
import platform
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from engines.machine import held
from engines.models.block_config import BLOCK_TYPES, BlockConfig
from engines.models.config import DECODER_SIZES, LLaDAConfig
from engines.models.decoder import BlockModel
from engines.models.llada import LLaDAModelLM
from engines.models.tokenizer import load_tokenizer
from repro.files import replace_bytes, replace_text
from repro.runs.workers import worker_processes
from repro.tasks.mini import GENERATORS
from repro.training.config import TrainConfig
from repro.training.evaluate import measure_accuracy

FINAL_SEED = 7_002
WEIGHTS_FILE = "model.safetensors"
REPORT_FILE = "training_report.json"
MADE = (WEIGHTS_FILE, "config.json", "generation_config.json", REPORT_FILE, "README.md")
"""Files of a checkpoint that is exported, besides its tokenizer's."""
_WORTH_A_PROCESS = 100


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
    """Save, reload, evaluate on held-out problems, write the report and the card; returns the report."""
    save_model(model, config, directory)
    began = time.perf_counter()
    tasks = config.tasks
    if config.final_problems < _WORTH_A_PROCESS:
        parts = [evaluate_task(directory, config, task) for task in tasks]
    else:
        # Two single-threaded evaluations do not disturb each other; two threads of one do.
        with worker_processes(len(tasks)) as pool:
            with held():
                made = pool.map(evaluate_task, [directory] * len(tasks), [config] * len(tasks), tasks)
            parts = list(made)
    accuracy = [entry for part in parts for entry in part]
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
    replace_text(directory / "README.md", render_card(report))
    return report


def render_card(report: dict[str, Any]) -> str:
    config = report["config"]
    shape = (
        f"{config['n_layers']} layers, width {config['d_model']}, {config['n_heads']} heads of "
        f"{config['d_model'] // config['n_heads']}, SwiGLU {config['mlp_hidden_size']}, vocabulary {report['vocab_size']}, "
        f"{report['parameters']:,} parameters, weights stored in float16"
    )
    stages = "\n".join(
        f"| {stage['until']:.0%} | {_span(stage['num_facts'])} | {_span(stage['num_distractors'])} | {_span(stage['num_used'])} | "
        f"{_span(stage['num_terms'])} | {_span(stage['num_operations'])} | {stage['listing_share']:.0%} | {stage['drill_share']:.0%} | {stage['num_names']} |"
        for stage in config["curriculum"]
    )
    rows = "\n".join(
        f"| {entry['task']} | {entry['block_length']} | {entry['n']} | {entry['exact']:.1%} "
        f"({entry['low']:.1%} to {entry['high']:.1%}) | {entry['strict']:.1%} | {entry['flexible']:.1%} |"
        for entry in report["accuracy"]
    )
    figures = config | {"steps": report["steps_done"], "tasks": ", ".join(config["tasks"])}
    text = Path(__file__).with_name("card.md").read_text(encoding="utf-8")
    return text.format(
        shape=shape,
        stages=stages,
        rows=rows,
        **(_full_diffusion(config) if config["block_diffusion"] is None else _block_diffusion(config)),
        minutes=f"{report['training_wall_s'] / 60:.1f}",
        evaluation=f"{report['evaluation_wall_s'] / 60:.1f}",
        hardware=report["hardware"],
        torch=report["torch"],
        command=_command(config),
        **figures,
    )


def _command(config: dict[str, Any]) -> str:
    usual = asdict(TrainConfig())
    tasks = [] if tuple(config["tasks"]) == usual["tasks"] else [f"--task {task}" for task in config["tasks"]]
    names = ("start", "seed", "steps", "gen_length", "tokens_per_batch", "block_diffusion")
    asked = [name for name in names if config[name] != usual[name]]
    return " ".join(
        ["repro train-tiny --out DIR", *tasks, *(f"--{name.replace('_', '-')} {config[name]}" for name in asked)]
    )


def _full_diffusion(config: dict[str, Any]) -> dict[str, str]:
    whole, random_block, left = (f"{share:.0%}" for share in config["pattern_shares"])
    lengths = " or ".join(map(str, config["block_lengths"]))
    return {
        "family": "llada",
        "title": "Tiny LLaDA",
        "kind": "A masked-diffusion language model of LLaDA's architecture",
        "masks": f"Masks: {whole} of sequences over the whole answer at a ratio\nt ~ U(0, 1); {random_block} at such a ratio "
        f"within one block of {lengths} tokens, earlier blocks clean, later ones masked; {left} left to\nright within one block.",
    }


def _block_diffusion(config: dict[str, Any]) -> dict[str, str]:
    block, left = config["block_diffusion"], config["pattern_shares"][2]
    of_blocks, of_tokens = config["replaced_shares"]
    return {
        "family": "sdar",
        "title": "Tiny block diffusion",
        "kind": f"A block-diffusion language model of SDAR's architecture, in blocks of {block} tokens",
        "masks": "Sequences are doubled: noisy copies of the answer's\nblocks see themselves and the clean blocks before them, so "
        f"all blocks are trained at once. Masks, drawn per block: {1 - left:.0%} at a\nratio t ~ U(0, 1), {left:.0%} left to right. "
        f"In {of_blocks:.0%} of the blocks {of_tokens:.0%} of the visible tokens are replaced by others, and what was there is to be\n"
        "predicted: rules that edit ask for it.",
    }


def _span(span: Any) -> str:
    return str(span) if isinstance(span, int) else f"{span[0]} to {span[1]}"
