"""Configurations of causal checkpoints: published ones are read, what is not computed is refused by name.

Causal checkpoints as transformers saves them give transformers' own tokens, step by step in our engine.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.causal import LLAMA3, SIZES, causal_logits, executor, generate, run, start
from support.tables import data_beside

from engines.errors import UserError
from engines.models.config import LinearScaling, Llama3Scaling, Rope
from engines.models.decoder import rope_frequencies
from engines.models.loader import load_causal
from engines.models.qwen2_config import CAUSAL_SHAPES, CausalConfig, tiny_causal

SCALING = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
CONFIGS = data_beside(__file__, "causal_configs")
REFUSED = data_beside(__file__, "refused_configs")


def test_published_layouts_of_the_config_are_read(tmp_path):
    """As on the hub: ``rope_theta`` and ``rope_scaling`` in place of ``rope_parameters``."""
    scaling = {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
    old = {**CONFIGS["older"], "rope_scaling": scaling}
    found = CausalConfig.from_dict(old)
    assert found.rope == Rope(theta=5e5, scaling=SCALING)
    assert found.n_kv_heads == 4, "checkpoints from before grouped heads"
    assert not found.qkv_bias
    oldest = {**old, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert CausalConfig.from_dict(oldest).rope.scaling == LinearScaling(factor=2.0)
    assert CausalConfig.from_dict({**old, "model_type": "qwen2", "rope_scaling": None}).qkv_bias


@pytest.mark.parametrize(("change", "said"), REFUSED["causal"])
def test_a_config_that_is_not_computed_is_refused_in_one_line(change, said):
    raw = {"model_type": "qwen2", **SIZES, "rms_norm_eps": 1e-6, "rope_theta": 1e4, **change}
    with pytest.raises(UserError) as caught:
        CausalConfig.from_dict(raw)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_llama3_frequencies_keep_short_wavelengths_and_stretch_long_ones():
    """Worked by hand: wavelength w = 2 pi / f; kept below 64 / 4, stretched above 64 / 1, interpolated between."""
    plain = rope_frequencies(16, Rope(theta=10000.0))
    found = rope_frequencies(16, Rope(theta=10000.0, scaling=SCALING))
    wavelengths = 2 * torch.pi / plain
    assert torch.equal(found[wavelengths < 16], plain[wavelengths < 16])
    torch.testing.assert_close(found[wavelengths > 64], plain[wavelengths > 64] / 8)
    between = (wavelengths > 16) & (wavelengths < 64)
    share = (64 / wavelengths[between] - 1) / 3
    assert between.any()
    torch.testing.assert_close(found[between], plain[between] * ((1 - share) / 8 + share))


def test_shapes_without_weights_need_random_ones():
    with pytest.raises(UserError, match="add --weights random"):
        load_causal("Qwen2.5-14B")
    model = load_causal(tiny_causal(n_layers=1), weights="random", seed=3)
    again = load_causal(tiny_causal(n_layers=1), weights="random", seed=3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert load_causal(tiny_causal(), weights="random", dtype=torch.bfloat16).dtype == torch.bfloat16


PUBLISHED = json.loads(Path(__file__).with_name("published_configs.json").read_text(encoding="utf-8"))


def test_published_sizes_of_qwen3_and_mistral_are_the_shapes():
    same = ("d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "mlp_hidden_size", "vocab_size", "weight_tying")
    for name in ("qwen3-0.6b", "mistral-7b-v0.1"):
        found, shape = CausalConfig.from_dict(PUBLISHED[name]), CAUSAL_SHAPES[name]
        assert {each: getattr(found, each) for each in (*same, "qk_norm", "qkv_bias")} == {
            each: getattr(shape, each) for each in (*same, "qk_norm", "qkv_bias")
        }


def test_what_a_family_leaves_unsaid_is_what_it_means():
    """A head of Qwen3 has 128, whatever the width over the heads is; Llama 2 publishes no theta."""
    qwen, llama = PUBLISHED["qwen3-0.6b"], PUBLISHED["llama-2-7b"]
    unsaid = {name: value for name, value in qwen.items() if name != "head_dim"}
    assert CausalConfig.from_dict(unsaid) == CausalConfig.from_dict(qwen)
    assert CausalConfig.from_dict(llama).rope == Rope(theta=1e4)
    said = {"rope_theta": 1e4, "hidden_act": "swish", "rope_parameters": {"rope_type": "default"}, "is_causal": True}
    assert CausalConfig.from_dict({**llama, **said}) == CausalConfig.from_dict(llama)


@pytest.mark.parametrize("nothing", REFUSED["causal, not refused"])
def test_fields_that_say_nothing_change_nothing(nothing):
    raw = {"model_type": "qwen2", **SIZES, "rms_norm_eps": 1e-6, "rope_theta": 1e4}
    assert CausalConfig.from_dict({**raw, **nothing}) == CausalConfig.from_dict(raw)


@pytest.mark.parametrize(("change", "most"), REFUSED["windows"])
def test_no_sequence_outgrows_a_sliding_window(change, most):
    """Within it every query sees all, so what is computed is exact."""
    config = CausalConfig.from_dict({**SIZES, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "head_dim": 8, **change})
    assert config.max_sequence_length == most
    config.check_length("max_model_len", most)
    with pytest.raises(UserError, match=f"max_model_len={most + 1}") as caught:
        config.check_length("max_model_len", most + 1)
    assert ("sliding_window" in str(caught.value)) == (config.sliding_window is not None)


needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed: no model to compare with"
)

CONTEXT, ANSWER = 150, 12
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = CONFIGS["variants"] | {
    "mistral-window": ("Mistral", {"sliding_window": CONTEXT + ANSWER, "head_dim": 16}),
    "llama-3.1-rope": ("Llama", {"rope_parameters": LLAMA3}),
}


def saved(name: str, folder: Path) -> Any:
    """transformers' model with weights that make its answers vary; saved to ``folder``."""
    import transformers

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


@needs_transformers
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


@needs_transformers
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


@needs_transformers
def test_a_checkpoint_that_does_not_fit_its_config_is_refused(tmp_path):
    saved("qwen2-untied", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "intermediate_size": 81}))
    with pytest.raises(UserError, match="mis-shaped"):
        load_causal(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({**raw, "model_type": "llama"}))
    with pytest.raises(UserError, match="unexpected"):
        load_causal(str(tmp_path))
