"""Every causal family against a decoder in plain numpy, alone and in company, on the executor and its host kernels."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.causal import SIZES, causal_logits, executor, generate, run, start
from support.reference_decoder import logits
from support.tables import data_beside

from engines.models.loader import build_causal, load_causal
from engines.models.qwen2_config import CausalConfig

RAW: dict[str, Any] = {**SIZES, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": False}
CASES: dict[str, dict[str, Any]] = data_beside(__file__, "causal_reference")["cases"]
TOKENS = 9
LENGTHS = (3, 70, 19, 33)


def saved(raw: dict[str, Any], folder: Path) -> dict[str, np.ndarray]:
    """Weights that make answers vary; float64."""
    random = np.random.default_rng(1)
    shapes = {name: tuple(each.shape) for name, each in build_causal(CausalConfig.from_dict(raw)).state_dict().items()}
    found = {
        name: random.normal(1.0 if "norm" in name else 0.0, 0.2, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file({name: torch.from_numpy(each) for name, each in found.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))
    return {name: each.astype(np.float64) for name, each in found.items()}


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_alone_and_in_company_are_those_of_a_plain_decoder(name, tmp_path):
    raw = RAW | CASES[name]
    tensors = saved(raw, tmp_path)
    random = np.random.default_rng(2)
    prompts = [random.integers(97, size=length) for length in LENGTHS]
    wanted = []
    for ids in prompts:
        ids = ids.tolist()
        for _ in range(TOKENS):
            ids.append(int(logits(raw, tensors, ids)[-1].argmax()))
        wanted.append(ids[-TOKENS:])
    assert len({*chain(*wanted)}) > len(prompts), "an answer that says nothing"
    worker = executor(load_causal(str(tmp_path)))
    for ids, answer in zip(prompts, wanted, strict=True):
        slot = start(worker, ids)
        assert generate(worker, slot, len(ids), TOKENS) == answer
        worker.close_slot(slot)
    slots = [start(worker, ids) for ids in prompts]
    steps = [run(worker, *((slot, 0, length, True) for slot, length in zip(slots, LENGTHS, strict=True)))]
    for place in range(TOKENS - 1):
        steps.append(
            run(worker, *((slot, length + place, 1, True) for slot, length in zip(slots, LENGTHS, strict=True)))
        )
    assert list(map(list, zip(*steps, strict=True))) == wanted


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_a_plain_decoder(name, tmp_path):
    raw = RAW | CASES[name]
    tensors = saved(raw, tmp_path)
    model = load_causal(str(tmp_path))
    ids = np.random.default_rng(3).integers(97, size=60)
    found = causal_logits(model, ids.tolist()).double().numpy()
    expected = logits(raw, tensors, ids)
    assert np.abs(expected).max() > 3
    np.testing.assert_allclose(found, expected, atol=2e-4, rtol=0)
