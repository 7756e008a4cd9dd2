"""Writes baselines/golden: what the reference samplers give on the tiny random models.

    python tests/support/make_golden.py

A candidate is kept only if no decision in it was close, float64 arithmetic gives the same ids and at least
three of them differ, so any correct implementation in float32 must reproduce it. Exactly equal importances
(max-pooling makes those) go to the lower index; ``tie_sensitive`` marks cases where another order gives other ids.
"""

import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from support.reference_dllm_cache import INTERVALS, dllm_cache, dream_dllm_cache
from support.reference_samplers import (
    COMMITS,
    Dims,
    Margins,
    Sampled,
    Ties,
    Weights,
    dllm_serve,
    dream,
    dream_blocks,
    fast_dllm,
    llada,
    sparse_dllm,
)
from support.tiny_models import DREAM, GQA, LOUD, MHA, MQA, ONE_LAYER, TinyCheckpoint, prompt_of

GOLDEN = Path(__file__).resolve().parents[2] / "baselines" / "golden"
CHECKPOINTS: Mapping[str, TinyCheckpoint] = {
    "dream": DREAM,
    **{f"llada-{model.name}": model for model in (MHA, GQA, MQA, LOUD, ONE_LAYER)},
}
SAMPLERS: Mapping[str, Callable[..., Sampled]] = {
    "llada": llada,
    **{
        f"fast_dllm_{name}": partial(fast_dllm, cache=cache)
        for name, cache in (("nocache", "none"), ("prefix_cache", "prefix"), ("dual_cache", "dual"))
    },
    "sparse_dllm": sparse_dllm,
    "dllm_cache": dllm_cache,
    "dream_vanilla": dream,
    "dream_nocache": dream,
    "dream_prefix_cache": partial(dream_blocks, cache="prefix"),
    "dream_dual_cache": partial(dream_blocks, cache="dual"),
    "dream_sparse_dllm": partial(dream_blocks, cache="sparse"),
    "dream_dllm_cache": dream_dllm_cache,
    **{
        f"{family}dllm_serve_{name}": partial(dllm_serve, selection=name)
        for family in ("", "dream_")
        for name in ("head", "uniform", "dense")
    },
}

LEAST = Margins(confidence=1e-4, token=1e-3, selection=1e-4, similarity=4e-6, schedule=1e-5)
"""What rounding on another machine stays well below."""

# (prompt, gen, block, steps); whole blocks and whole steps per block, then shapes only dllm_serve takes.
EVEN = (
    (5, 16, 8, 16),
    (13, 24, 8, 12),
    (1, 12, 12, 12),
    (20, 16, 16, 24),
    (9, 16, 4, 8),
    (7, 8, 8, 1),
    (30, 16, 8, 4),
    (12, 64, 32, 64),
)
RAGGED = ((6, 18, 8, 18), (11, 21, 8, 10), (4, 7, 16, 7), (16, 20, 6, 29), (3, 13, 5, 3))
RETENTION = ((0.5, 3), (0.3, 1), (0.2, 5), (1.0, 3))
GUIDANCE = (0.5, 1.0, 2.0)
DREAM_SHAPES = (*EVEN[:5], (7, 20, 20, 5), (3, 9, 9, 30))
ALGORITHMS = ("entropy", "maskgit_plus", "topk_margin")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    checkpoint: str
    method: str
    prompt_len: int
    params: Mapping[str, Any]

    @property
    def id(self) -> str:
        short = {
            "gen_length": "g",
            "block_length": "b",
            "steps": "s",
            "keep_ratio": "r",
            "kernel_size": "k",
            "delay_step": "d",
            "threshold": "t",
            "factor": "f",
            "cfg_scale": "w",
            "prompt_interval": "pi",
            "gen_interval": "gi",
            "transfer_ratio": "tr",
            "alg": "",
        }
        parts = [f"{short[name]}{value}" for name, value in self.params.items() if name in short]
        if self.params.get("first_token_rule"):
            parts.append("rule")
        return f"{self.checkpoint}/{self.method}-{'-'.join([f'p{self.prompt_len}', *parts])}"


def candidates() -> Iterator[Candidate]:
    for family in (llada_cases, fast_dllm_cases, sparse_dllm_cases, dllm_cache_cases, dllm_serve_cases, dream_cases):
        for checkpoint, method, prompt_len, params in family():
            yield Candidate(checkpoint=checkpoint, method=method, prompt_len=prompt_len, params=params)


Cases = Iterator[tuple[str, str, int, dict[str, Any]]]


def shape_of(gen: int, block: int, steps: int) -> dict[str, Any]:
    return {"gen_length": gen, "block_length": block, "steps": steps}


def llada_cases() -> Cases:
    """Random remasking is left out: its ids are those of a random stream, and every implementation has its own."""
    for model in ("llada-mha", "llada-gqa", "llada-loud"):
        for prompt, *shape in EVEN:
            yield model, "llada", prompt, shape_of(*shape)
    for i, (model, (prompt, *shape)) in enumerate(product(("llada-mha", "llada-gqa"), EVEN[:4])):
        yield model, "llada", prompt, {**shape_of(*shape), "cfg_scale": GUIDANCE[i % 3]}


def fast_dllm_cases() -> Cases:
    """Without the model that predicts mask ids: published code fails on one."""
    models = ("llada-mha", "llada-gqa", "llada-mqa")
    for c, name in enumerate(("nocache", "prefix_cache", "dual_cache")):
        for m, model in enumerate(models):
            for (prompt, *shape), commit in list(product(EVEN, COMMITS))[2 * c + m :: 6]:
                gen, block, steps = shape
                if not commit and steps * block == gen and name != "nocache":
                    continue  # one step per block: published code runs past its schedule's end
                yield model, f"fast_dllm_{name}", prompt, {**shape_of(*shape), **commit}


def sparse_dllm_cases() -> Cases:
    for m, model in enumerate(("llada-mha", "llada-gqa", "llada-mqa", "llada-loud")):
        for i, (prompt, *shape) in enumerate(EVEN):
            for ratio, kernel in (RETENTION[(i + m) % 4], RETENTION[(i + m + 2) % 4]):
                yield model, "sparse_dllm", prompt, {**shape_of(*shape), "keep_ratio": ratio, "kernel_size": kernel}


def dllm_cache_cases() -> Cases:
    grid = list(product(EVEN, INTERVALS))
    for model, start, stride in (("llada-mha", 0, 4), ("llada-gqa", 1, 8), ("llada-mqa", 2, 10), ("llada-loud", 3, 16)):
        for (prompt, *shape), interval in grid[start::stride]:
            yield model, "dllm_cache", prompt, {**shape_of(*shape), **intervals(*interval)}


def intervals(prompt: int, gen: int, ratio: float) -> dict[str, Any]:
    return {"prompt_interval": prompt, "gen_interval": gen, "transfer_ratio": ratio}


def dllm_serve_cases() -> Cases:
    models = ("llada-mha", "llada-gqa", "llada-mqa", "llada-loud", "llada-one-layer")
    # Different periods, so that what varies meets in every combination.
    for n, (model, (prompt, *shape)) in enumerate(product(models, (*EVEN[:5], *RAGGED))):
        for turn, selection in enumerate(("head", "uniform", "dense"), start=3 * n):
            delay = 0 if (turn + n) % 3 == 0 else 1
            params = shape_of(*shape)
            if selection != "dense":
                params |= dict(zip(("keep_ratio", "kernel_size"), RETENTION[turn % 4], strict=True))
            params |= {"delay_step": delay, "first_token_rule": delay == 1 and turn % 5 < 2}
            params |= {1: {"threshold": 0.6}, 3: {"threshold": 0.25}}.get(n % 4, {})
            yield model, f"dllm_serve_{selection}", prompt, params
    for i, (model, selection) in enumerate(product(("llada-mha", "llada-gqa"), ("head", "uniform", "dense"))):
        prompt, *shape = EVEN[i % 5]
        params = shape_of(*shape) | ({} if selection == "dense" else {"keep_ratio": 0.5, "kernel_size": 3})
        rule = {"delay_step": i % 2, "first_token_rule": i == 3, "factor": (0.5, 1.2, 2.5)[i % 3]}
        yield model, f"dllm_serve_{selection}", prompt, params | rule


def dream_cases() -> Cases:
    for i, ((prompt, gen, _, steps), alg) in enumerate(product(DREAM_SHAPES, ALGORITHMS)):
        yield "dream", "dream_vanilla", prompt, {"gen_length": gen, "steps": steps, "alg": alg}
        if i % 4 == 0:
            yield "dream", "dream_nocache", prompt, {"gen_length": gen, "steps": steps, "alg": alg}
        interval = intervals(*INTERVALS[(i + i // 3) % len(INTERVALS)])
        yield "dream", "dream_dllm_cache", prompt, {"gen_length": gen, "steps": steps, "alg": alg, **interval}
    rules = [{"alg": "entropy"}, {"alg": "maskgit_plus"}]
    rules += [{"alg": "confidence_threshold", "threshold": value} for value in (0.3, 0.7, 0.9)]
    for c, name in enumerate(("dream_prefix_cache", "dream_dual_cache")):
        for (prompt, *shape), rule in list(product((*EVEN[:5], EVEN[7]), rules))[c::3]:
            yield "dream", name, prompt, {**shape_of(*shape), **rule}
    # Published code fixes the block length of 32.
    shapes = ((9, 32, 32, 32), (20, 64, 32, 32), (4, 64, 32, 64))
    for i, ((prompt, *shape), (ratio, kernel)) in enumerate(product(shapes, RETENTION)):
        chosen = {"keep_ratio": ratio, "kernel_size": kernel, "alg": ALGORITHMS[i % 3]}
        yield "dream", "dream_sparse_dllm", prompt, {**shape_of(*shape), **chosen}
    commits: tuple[dict[str, float], ...] = ({}, {}, {"threshold": 0.6}, {}, {"threshold": 0.25}, {"factor": 1.2})
    for i, ((prompt, *shape), selection) in enumerate(product((*EVEN[:5], *RAGGED), ("head", "uniform", "dense"))):
        params = shape_of(*shape)
        if selection != "dense":
            params |= dict(zip(("keep_ratio", "kernel_size"), RETENTION[i % 4], strict=True))
        params |= {"delay_step": i // 3 % 2, **commits[i // 2 % 6]}
        yield "dream", f"dream_dllm_serve_{selection}", prompt, params


def dims_of(model: TinyCheckpoint) -> Dims:
    config = model.config
    return Dims(
        heads=config.n_heads,
        kv_heads=config.n_kv_heads,
        layers=config.n_layers,
        mask_id=config.mask_token_id,
        theta=config.rope_theta,
        eps=config.rms_norm_eps,
    )


def sample(
    checkpoint: str, method: str, weights: Weights, prompt: tuple[int, ...], params: Mapping[str, Any], **ties: Ties
) -> Sampled:
    with torch.inference_mode():
        return SAMPLERS[method](weights, dims_of(CHECKPOINTS[checkpoint]), prompt, **params, **ties)


def is_decided(margins: Margins) -> bool:
    return all(
        getattr(margins, name) >= getattr(LEAST, name)
        for name in ("confidence", "token", "selection", "similarity", "schedule")
    )


def case_of(candidate: Candidate) -> dict[str, Any] | None:
    """The first prompt of a few whose outcome is beyond rounding."""
    model = CHECKPOINTS[candidate.checkpoint]
    weights = model.weights()
    double = {key: tensor.double() for key, tensor in weights.items()}
    run = partial(sample, candidate.checkpoint, candidate.method)
    for seed in range(1, 9):
        prompt = prompt_of(model, 100 * seed + candidate.prompt_len, candidate.prompt_len)
        sampled = run(weights, prompt, candidate.params)
        if not is_decided(sampled.margins):
            continue
        if len(set(sampled.token_ids)) < min(3, candidate.params["gen_length"]):
            continue
        if run(double, prompt, candidate.params).token_ids != sampled.token_ids:
            continue
        others = []
        if sampled.margins.selection_ties:
            others = [run(weights, prompt, candidate.params, ties=ties) for ties in ("last", "topk")]
        return {
            "id": candidate.id,
            "checkpoint": candidate.checkpoint,
            "method": candidate.method,
            "params": dict(candidate.params),
            "prompt_ids": list(prompt),
            "expected_ids": list(sampled.token_ids),
            "nfe": sampled.forwards,
            "tie_sensitive": any(other.token_ids != sampled.token_ids for other in others),
            "boundary_ties": sampled.margins.selection_ties,
            "min_confidence_margin": rounded(sampled.margins.confidence),
            "min_token_logit_margin": rounded(sampled.margins.token),
        }
    return None


def rounded(margin: float) -> float | None:
    """None where there was nothing to decide."""
    return float(f"{margin:.2g}") if math.isfinite(margin) else None


def checkpoint_of(name: str) -> dict[str, Any]:
    model = CHECKPOINTS[name]
    weights = model.write(GOLDEN / "checkpoints" / name) / "model.safetensors"
    weights.chmod(0o644)
    return {
        "path": f"checkpoints/{name}",
        "sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "mask_token_id": model.mask_id,
        "eos_token_id": model.config.eos_token_id,
    }


def main() -> None:
    torch.set_num_threads(1)
    found = [case_of(candidate) for candidate in candidates()]
    cases = [case for case in found if case is not None]
    assert len({case["id"] for case in cases}) == len(cases)
    checkpoints = json.dumps({name: checkpoint_of(name) for name in CHECKPOINTS}, indent=1)
    lines = ",\n".join(json.dumps(case, allow_nan=False) for case in cases)
    partial_file = GOLDEN / "cases.json.partial"
    partial_file.write_text(
        f'{{"format": 1, "ties": "stable",\n"checkpoints": {checkpoints},\n"cases": [\n{lines}\n]}}\n'
    )
    partial_file.replace(GOLDEN / "cases.json")
    print(f"{len(cases)} of {len(found)} candidates kept, {sum(c['tie_sensitive'] for c in cases)} tie-sensitive")


if __name__ == "__main__":
    main()
