"""Writes baselines/golden: what the reference samplers give on the tiny random models in the cases listed there.

    python tests/support/make_golden.py

A case is held to only if no decision in it is close, float64 arithmetic gives the same ids and at least three of
them differ, so any correct implementation in float32 must reproduce it. Exactly equal importances (max-pooling
makes those) go to the lower index; ``tie_sensitive`` marks cases where another order gives other ids.
"""

import hashlib
import json
import math
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from support.reference_dllm_cache import dllm_cache, dream_dllm_cache
from support.reference_samplers import (
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
from support.tiny_models import DREAM, GQA, LOUD, MHA, MQA, ONE_LAYER, TinyCheckpoint

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


def replayed(case: dict[str, Any]) -> dict[str, Any]:
    weights = CHECKPOINTS[case["checkpoint"]].weights()
    run = partial(sample, case["checkpoint"], case["method"], prompt=tuple(case["prompt_ids"]), params=case["params"])
    sampled = run(weights)
    ids, margins = sampled.token_ids, sampled.margins
    assert is_decided(margins), case["id"]
    assert len(set(ids)) >= min(3, len(ids)), case["id"]
    assert run({key: tensor.double() for key, tensor in weights.items()}).token_ids == ids, case["id"]
    others = [run(weights, ties=ties) for ties in ("last", "topk")] if margins.selection_ties else []
    return case | {
        "expected_ids": list(ids),
        "nfe": sampled.forwards,
        "tie_sensitive": any(other.token_ids != ids for other in others),
        "boundary_ties": margins.selection_ties,
        "min_confidence_margin": rounded(margins.confidence),
        "min_token_logit_margin": rounded(margins.token),
    }


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
    cases = [replayed(case) for case in json.loads((GOLDEN / "cases.json").read_bytes())["cases"]]
    assert len({case["id"] for case in cases}) == len(cases)
    checkpoints = json.dumps({name: checkpoint_of(name) for name in CHECKPOINTS}, indent=1)
    lines = ",\n".join(json.dumps(case, allow_nan=False) for case in cases)
    partial_file = GOLDEN / "cases.json.partial"
    partial_file.write_text(
        f'{{"format": 1, "ties": "stable",\n"checkpoints": {checkpoints},\n"cases": [\n{lines}\n]}}\n'
    )
    partial_file.replace(GOLDEN / "cases.json")


if __name__ == "__main__":
    main()
