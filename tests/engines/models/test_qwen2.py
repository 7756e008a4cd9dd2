"""Causal checkpoints as transformers saves them give transformers' own tokens, step by step in our engine."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.causal import LLAMA3, SIZES, causal_logits, executor, generate, run, start

from engines.errors import UserError
from engines.models.loader import load_causal

transformers = pytest.importorskip("transformers", reason="transformers is not installed: no model to compare with")

CONTEXT, ANSWER = 150, 12
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-untied": ("Qwen2", {"tie_word_embeddings": False, "rope_theta": 1e6}),
    "qwen2-one-kv-head": ("Qwen2", {"num_key_value_heads": 1}),
    "qwen2-window-of-no-layer": ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    "qwen3-tied": ("Qwen3", {"tie_word_embeddings": True, "head_dim": 16}),
    "qwen3-untied": ("Qwen3", {"head_dim": 8, "rope_theta": 1e6}),
    "qwen3-biased": ("Qwen3", {"head_dim": 24, "attention_bias": True, "num_key_value_heads": 1}),
    "qwen3-usual-head": ("Qwen3", {"num_attention_heads": 2}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": CONTEXT + ANSWER, "head_dim": 16}),
    "llama": ("Llama", {"num_key_value_heads": 6}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-wide-heads": ("Llama", {"head_dim": 16}),
    "llama-3.1-rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear-rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
}


def saved(name: str, folder: Path) -> Any:
    """transformers' model with weights that make its answers vary; saved to ``folder``."""
    family, options = VARIANTS[name]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **options})
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            spread, centre = (0.1, 1.0) if "norm" in key else (0.2, 0.0)
            parameter.normal_(centre, spread)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_tokens_and_logits_are_those_of_transformers(name, tmp_path):
    theirs = saved(name, tmp_path)
    ids = torch.randint(SIZES["vocab_size"], (1, CONTEXT), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        expected = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=ANSWER,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        logits = theirs(ids).logits[0]
    ours = load_causal(str(tmp_path))
    worker = executor(ours, max_len=CONTEXT + ANSWER)
    slot = start(worker, ids[0].numpy(), room=CONTEXT + ANSWER)
    found = generate(worker, slot, CONTEXT, ANSWER)
    assert found == expected[0, CONTEXT:].tolist()
    assert len(set(found)) > 3, "an answer that says nothing"
    assert worker.read(slot, 0, CONTEXT + ANSWER) == expected[0].tolist()
    torch.testing.assert_close(causal_logits(ours, ids[0].tolist()), logits, atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", ["qwen2-tied", "qwen3-tied", "llama-3.1-rope"])
def test_a_second_turn_over_cached_history_goes_on_as_transformers_does(name, tmp_path):
    theirs = saved(name, tmp_path)
    random = np.random.default_rng(3)
    first, second = random.integers(97, size=30), random.integers(97, size=21)
    worker = executor(load_causal(str(tmp_path)))
    slot = start(worker, first, room=100)
    answer = generate(worker, slot, 30, 5)
    worker.write(slot, 35, second)
    # The newest token of the first answer has no K/V yet: the second turn begins with it.
    (token,) = run(worker, (slot, 34, 22, True))
    ids = torch.tensor([[*first, *answer, *second]])
    with torch.inference_mode():
        assert token == theirs(ids).logits[0, -1].argmax().item()


def test_a_checkpoint_that_does_not_fit_its_config_is_refused(tmp_path):
    saved("qwen2-untied", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "intermediate_size": 81}))
    with pytest.raises(UserError, match="mis-shaped"):
        load_causal(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({**raw, "model_type": "llama"}))
    with pytest.raises(UserError, match="unexpected"):
        load_causal(str(tmp_path))
