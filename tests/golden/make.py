"""Writes cases.json: what the reference samplers give on the tiny random models.

    python tests/golden/make.py

A candidate is kept only if no decision in it was close, float64 arithmetic gives the same ids and at least
three of them differ, so any correct implementation in float32 must reproduce it. ``tie_sensitive`` marks
cases whose ids depend on the order of exactly equal importances (max-pooling makes those): they are golden
for the stable rule only.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from reference_samplers import SAMPLERS, Dims, Sampled, Weights
from tiny_models import MODELS, TinyModel, prompt_of

CASES = Path(__file__).with_name("cases.json")
MIN_CONFIDENCE, MIN_TOKEN, MIN_SELECTION = 1e-4, 1e-3, 1e-4

# (prompt, gen, block, steps); whole blocks and whole steps per block, then shapes only dllm_serve takes.
EVEN = ((5, 16, 8, 16), (13, 24, 8, 12), (1, 12, 12, 12), (20, 16, 16, 24), (9, 16, 4, 8), (7, 8, 8, 1), (30, 16, 8, 4))
RAGGED = ((6, 18, 8, 18), (11, 21, 8, 10), (4, 7, 16, 7), (16, 20, 6, 29), (3, 13, 5, 3))
RETENTION = ((0.5, 3), (0.3, 1), (0.2, 5), (1.0, 3))


def dims_of(model: TinyModel) -> Dims:
    return Dims(heads=model.heads, kv_heads=model.kv_heads, layers=model.layers, mask_id=model.mask_id)


def checksum(model: TinyModel) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.weights().items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def candidates() -> Iterator[tuple[str, str, int, dict[str, Any]]]:
    """(model, sampler, prompt length, parameters)"""
    for model in ("mha", "gqa", "loud"):
        for prompt, gen, block, steps in EVEN:
            yield model, "llada", prompt, {"gen_length": gen, "block_length": block, "steps": steps}
    for m, model in enumerate(("mha", "gqa", "mqa", "loud")):
        for i, (prompt, gen, block, steps) in enumerate(EVEN):
            shape = {"gen_length": gen, "block_length": block, "steps": steps}
            for ratio, kernel in (RETENTION[(i + m) % 4], RETENTION[(i + m + 2) % 4]):
                yield model, "sparse_dllm", prompt, {**shape, "keep_ratio": ratio, "kernel_size": kernel}
    turn = 0
    for model in ("mha", "gqa", "mqa", "loud", "one-layer"):
        for prompt, gen, block, steps in (*EVEN[:5], *RAGGED):
            shape = {"gen_length": gen, "block_length": block, "steps": steps}
            for selection in ("head", "uniform", "dense"):
                turn += 1
                ratio, kernel = RETENTION[turn % 4]
                delay = 0 if turn % 3 == 0 else 1
                yield model, "dllm_serve", prompt, {
                    **shape, "keep_ratio": ratio, "kernel_size": kernel, "selection": selection, "delay": delay,
                    "first_token_rule": delay == 1 and turn % 5 < 2,
                    "threshold": (None, None, 0.6, None, 0.25)[turn % 5 if turn % 2 else 0],
                }  # fmt: skip


def run(
    model: TinyModel, sampler: str, weights: Weights, prompt: tuple[int, ...], params: dict[str, Any], ties: str
) -> Sampled:
    with torch.inference_mode():
        return SAMPLERS[sampler](weights, dims_of(model), prompt, **params, ties=ties)


def case_of(name: str, sampler: str, prompt_len: int, params: dict[str, Any]) -> dict[str, Any] | None:
    """The first prompt of a few whose outcome is beyond rounding."""
    model = MODELS[name]
    weights = model.weights()
    double = {key: tensor.double() for key, tensor in weights.items()}
    for seed in range(1, 9):
        prompt = prompt_of(model, 100 * seed + prompt_len, prompt_len)
        sampled = run(model, sampler, weights, prompt, params, "stable")
        margins = sampled.margins
        if margins.confidence < MIN_CONFIDENCE or margins.token < MIN_TOKEN or margins.selection < MIN_SELECTION:
            continue
        if len(set(sampled.token_ids)) < min(3, params["gen_length"]):
            continue
        if run(model, sampler, double, prompt, params, "stable").token_ids != sampled.token_ids:
            continue
        other = run(model, sampler, weights, prompt, params, "topk")
        return {
            "model": name, "sampler": sampler, "params": params, "prompt_ids": list(prompt),
            "expected_ids": list(sampled.token_ids), "forwards": sampled.forwards,
            "tie_sensitive": other.token_ids != sampled.token_ids, "selection_ties": margins.selection_ties,
        }  # fmt: skip
    return None


def main() -> None:
    torch.set_num_threads(1)
    found = [case_of(*candidate) for candidate in candidates()]
    cases = [case for case in found if case is not None]
    content = {"weights_sha256": {name: checksum(model) for name, model in MODELS.items()}, "cases": cases}
    lines = ",\n".join(json.dumps(case) for case in content["cases"])
    head = json.dumps(content["weights_sha256"])
    CASES.write_text(f'{{"weights_sha256": {head},\n"cases": [\n{lines}\n]}}\n')
    print(f"{len(cases)} of {len(found)} candidates kept, {sum(c['tie_sensitive'] for c in cases)} tie-sensitive")


if __name__ == "__main__":
    main()
